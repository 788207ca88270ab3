"""What only Linux has is not needed. This stands in for macOS, where nothing was run."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run

from bnncli.data import loader
from bnncli.data.splits import load_split
from bnncli.errors import DataError


def test_the_pipeline_runs_without_what_only_linux_has(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("posix_fallocate", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    own = builtins.open

    def open_without_proc(file: Any, *words: Any, **named: Any) -> Any:
        if str(file).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(file)
        return own(file, *words, **named)

    for module in (builtins, io):  # pathlib takes the other
        monkeypatch.setattr(module, "open", open_without_proc)
    run = new_run(cli, tmp_path / "run", make_arrays())
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("hmc", run, "--chains", 2, "--warmup", 8, "--draws", 8).expect(0)
    cli("predict", run, "--posterior", "laplace", "--posterior", "hmc").expect(0)
    cli("evaluate", run).expect(0)


@pytest.mark.long
def test_data_loading_workers_may_be_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS. They are sent the data set; one of the user's code cannot be."""
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number).integers(256, size=(4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    make = "def make():\n    data = Data([([0.0], 0), ([1.0], 1)])\n    data.turn = lambda x: x\n    return data\n"
    code = f"class Data(list):\n    pass\n\n{make}"
    (tmp_path / "own.py").write_text(code)
    monkeypatch.setattr(loader, "WORKER_START", "spawn")
    split = load_split(f"images:{tmp_path}/images")
    (here, there) = ([batch.inputs for batch in split.batches(6, num_workers=count)] for count in (0, 1))
    np.testing.assert_array_equal(here[0], there[0])
    with pytest.raises(DataError, match="cannot be sent to data loading workers"):
        list(load_split(f"py:{tmp_path}/own.py:make").batches(2, num_workers=1))
