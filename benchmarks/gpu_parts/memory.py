"""Part *memory*: graphs, determinism, memory."""

from __future__ import annotations

from pathlib import Path

from gpu_parts.gpu import Gpu
from gpu_parts.graphs import check_graphs
from gpu_parts.ledger import Ledger
from gpu_parts.peaks import check_peaks
from gpu_parts.repeats import check_repeats


def run(gpu: Gpu, ledger: Ledger, folder: Path, *, is_quick: bool) -> None:
    """All of it, the quick checks first; folders of runs are made in `folder`."""
    check_graphs(gpu, ledger, is_quick=is_quick)
    check_peaks(
        gpu, ledger, is_quick=is_quick or gpu.is_pretend
    )  # a pretend GPU has no peaks: that the work runs is all
    check_repeats(gpu, ledger, folder, is_quick=is_quick)
