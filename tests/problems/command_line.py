"""How tests run commands: what comes back, and the commands that make a small run."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    def expect(self, code: int, *said: str) -> Invocation:
        """Return this invocation after a check of its exit code, and that stderr has these texts and no traceback."""
        assert self.code == code, f"expected exit code {code}; got {self.code}: {self.stderr}"
        assert code == 1 or "Traceback" not in self.stderr, self.stderr
        for text in said:
            assert text in self.stderr, f"expected {text!r} in: {self.stderr}"
        return self

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON document on stdout; NaN and infinity are errors."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} in JSON")

        return json.loads(self.stdout, parse_constant=refuse)


Cli = Callable[..., Invocation]  # the fixture `cli`: cli("refine", path, "--epochs", 1)

# What makes a finished run of features: each is followed by the run.
STEPS: tuple[tuple[object, ...], ...] = (
    ("fit-laplace", "--prior-precision", "10"), ("refine", "--epochs", 1, "--length", 2),
    ("hmc", "--chains", 8, "--warmup", 8, "--draws", 16), ("predict",), ("evaluate",),
)  # fmt: skip


def new_run(cli: Cli, run: Path, arrays: Mapping[str, np.ndarray], *words: object) -> Path:
    """The run, which has the features of these arrays now: they go to a file beside it. Words go to extract-features."""
    path = run.with_name(f"{run.name}.npz")
    np.savez(path, **arrays)  # type: ignore[arg-type]
    done = cli("extract-features", run, "--from-npz", path, *words)
    assert done.code == 0, done.stderr
    return run


def extended_run(finished: Path, folder: Path, steps: Iterable[Sequence[object]]) -> Path:
    """Return a copy of a finished run in a folder, with more commands run on it."""
    from bnncli.cli.execute import run_command_line

    shutil.copytree(finished.with_name("small.bnn"), folder / "small.bnn")
    shutil.copy(finished.with_name("features.npz"), folder / "features.npz")
    for command, *words in steps:
        assert run_command_line([str(command), str(folder / "small"), *map(str, words), "-q"], io.StringIO()) == 0
    return folder / "small"


def file_of(run: Path, name: str) -> Path:
    """Return the file of a posterior of a run called small."""
    return next((run.with_name("small.bnn") / "posteriors").glob(f"{name}.*"))
