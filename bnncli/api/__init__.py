"""Python interface to runs: `bnncli.open` and the objects it returns. Only the methods named like commands write files.

The work is shared with the commands: inputs are checked in the same way, and predictions match those stored for the
same features. torch is imported on the first computation.
"""

from __future__ import annotations

from bnncli.api.commands import CommandResult as CommandResult
from bnncli.api.predictions import ClassProbabilities as ClassProbabilities
from bnncli.api.predictions import OpenedPosterior as OpenedPosterior
from bnncli.api.run import OpenedRun as OpenedRun
from bnncli.api.run import SplitArrays as SplitArrays
