"""What a shell completes: values of options and arguments, from the choices and from the run folder on the line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from problems.command_line import Cli

from bnncli.registry import names


def completed(*words: str) -> list[str]:
    """What the last of these words may become."""
    line = {
        "_BNNCLI_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["bnncli", *words]),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "bnncli"]
    done = subprocess.run(command, env=os.environ | line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "among"),
    [
        (("predict", "x", "--integrator", "m"), ["mc", "mean", "mean-field"]),
        (("refine", "x", "--flow", ""), names("flows")),
        (("calibrate", "x", "--integrator", "pl"), ["plug-in"]),
        (("compare", "x", "--metric", "nl"), ["nll"]),
        (("evaluate", "x", "--score", "knn"), ["knn"]),
        (("help", "ex"), ["exit-codes", "export", "extract-features"]),
        (("config", "show", "fit-l"), ["fit-laplace", "fit-lbbnn"]),
        (("pre",), ["predict"]),
        (("predict", "absent", "--posterior", ""), []),
    ],
)
def test_choices_are_completed(words: tuple[str, ...], among: list[str]) -> None:
    assert completed(*words) == among


@pytest.mark.long
def test_names_in_the_run_folder_of_the_line_are_completed(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    posteriors = sorted(
        path.stem for path in (folder / "posteriors").iterdir() if path.suffix in (".safetensors", ".nc")
    )
    assert {"laplace", "map"} <= set(posteriors)
    assert completed("predict", str(small_run), "--posterior", "") == posteriors
    assert completed("evaluate", str(small_run), "--reference", "lap") == ["laplace"]
    assert completed("predict", str(small_run), "--follow", str(folder.parent), "--posterior", "lap") == ["laplace"]
    assert completed("rm", str(small_run), "hmc.") == ["hmc.mc"]
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    assert completed("predict", str(small_run), "--split", "t") == []
    assert completed("predict", str(small_run), "--run-dir", str(elsewhere), "--split", "t") == ["test", "train"]
