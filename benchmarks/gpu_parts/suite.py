"""Tests of the project whose commands take the GPU: BNNCLI_DEVICE is every command's --device."""

from __future__ import annotations

from gpu_parts.gpu import Gpu
from gpu_parts.ledger import Ledger


def run_tests(gpu: Gpu, ledger: Ledger, is_quick: bool) -> None:
    ledger.note("tests", "todo")
