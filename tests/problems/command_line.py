"""How tests run commands: what comes back, and the commands that make a small run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SCRIPT = Path(sys.executable).with_name("bnncli")


@dataclass(frozen=True)
class Invocation:
    """What one command gave back."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON document on stdout; NaN and infinity are errors."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} in JSON")

        return json.loads(self.stdout, parse_constant=refuse)


Cli = Callable[..., Invocation]  # the fixture `cli`: cli("refine", path, "--epochs", 1)

# What makes a finished run of features: each is followed by the run.
STEPS: tuple[tuple[object, ...], ...] = (
    ("fit-laplace", "--prior-precision", "10"),
    ("refine", "--epochs", 1, "--length", 2),
    ("hmc", "--chains", 8, "--warmup", 8, "--draws", 16),
    ("predict",),
    ("evaluate",),
)


def new_run(cli: Cli, run: Path, arrays: Mapping[str, np.ndarray], *words: object) -> Path:
    """The run, which has the features of these arrays now: they go to a file beside it. Words go to extract-features."""
    path = run.with_name(f"{run.name}.npz")
    np.savez(path, **arrays)  # type: ignore[arg-type]
    done = cli("extract-features", run, "--from-npz", path, *words)
    assert done.code == 0, done.stderr
    return run
