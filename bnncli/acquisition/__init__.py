"""Active learning: score the examples of a pool, or choose a batch jointly, to label next."""

from __future__ import annotations

from bnncli.acquisition.batch_bald import JointBatch as JointBatch
from bnncli.acquisition.batch_bald import batch_bald as batch_bald
from bnncli.acquisition.single import SCORES as SCORES
from bnncli.acquisition.single import highest as highest
