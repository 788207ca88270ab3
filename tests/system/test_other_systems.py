"""What only Linux has is not needed. This stands in for macOS, where nothing was run."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run


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

    monkeypatch.setattr(builtins, "open", open_without_proc)
    run = new_run(cli, tmp_path / "run", make_arrays())
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("hmc", run, "--chains", 2, "--warmup", 8, "--draws", 8).expect(0)
    cli("predict", run, "--posterior", "laplace", "--posterior", "hmc").expect(0)
    cli("evaluate", run).expect(0)
