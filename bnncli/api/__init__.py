"""Runs as Python sees them: what `bnncli.open` gives, and what that gives. Nothing here writes a file.

The work is that of the commands: what they read is checked as they check it, and what they store of a prediction is what
is given here for the same features. torch is imported when something is computed.
"""

from __future__ import annotations

from bnncli.api.predictions import ClassProbabilities as ClassProbabilities
from bnncli.api.predictions import OpenedPosterior as OpenedPosterior
from bnncli.api.run import OpenedRun as OpenedRun
from bnncli.api.run import SplitArrays as SplitArrays
