"""Which examples of a pool to label next: scores of each, and batches that are chosen together."""

from __future__ import annotations

from bnncli.acquisition.batch_bald import JointBatch as JointBatch
from bnncli.acquisition.batch_bald import batch_bald as batch_bald
from bnncli.acquisition.single import SCORES as SCORES
from bnncli.acquisition.single import highest as highest
