"""Memory of passes over feature files, in a process that does nothing else."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kills import SERVER
from peaks import MMAP_THRESHOLD, OWN_PAGES, now

from bnncli.artifacts.features import read_features
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.targets.blocks import FeatureBlocks
from bnncli.targets.last_layer import LastLayerTarget


def private_peaks(files: Sequence[Path], folder: Path) -> list[int]:
    """Bytes that the system cannot take back, as it can a mapped file's pages: most in a block of passes over each."""
    process = SERVER.Process(target=_measure, args=(files, folder / "peaks.json"))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0
    return json.loads((folder / "peaks.json").read_text())


def _measure(files: Sequence[Path], path: Path) -> None:
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, OWN_PAGES) == 1
    plain, seen = FeatureBlocks.map, [0]

    def watched(self: FeatureBlocks, work: Any, **rest: Any) -> Any:
        def look(rows: slice, block: torch.Tensor) -> Any:
            parts = work(rows, block)
            seen.append(now("RssAnon"))
            return parts

        return plain(self, look, **rest)

    FeatureBlocks.map = watched  # type: ignore[method-assign]
    torch.ones(300, 300) @ torch.ones(300, 300)
    ctypes.CDLL(None).malloc_trim(0)
    start, peaks = now("RssAnon"), []
    for name in files:
        split = read_features(name)
        assert split.labels is not None
        layout = HeadLayout(3, split.features.shape[1])
        features, labels = torch.from_numpy(split.features), torch.from_numpy(split.labels)
        target = LastLayerTarget(features, labels, layout, Prior(1.0))
        theta = torch.zeros(1, layout.num_params)
        target.log_joint_and_grad(theta)
        ggn(target, theta[0], "diag")
        peaks.append(max(seen) - start)
        seen.clear()
    path.write_text(json.dumps(peaks))
