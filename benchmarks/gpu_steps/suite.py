"""Tests of the project with their commands on the GPU: BNNCLI_DEVICE is the --device of every command that is given none.

Tests that give tensors of their own stay on the CPU; what runs on the GPU here is what commands do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from gpu_steps.device import Gpu
from gpu_steps.ledger import Ledger
from gpu_steps.on_device import PRETEND, USED

ROOT = Path(__file__).parents[2]
FILES = ("stages/test_predict", "stages/test_prune")
# Too long on a pretend GPU, or in processes of their own, which know of none.
REAL_ONLY = (
    "stages/test_demo",
    "stages/test_diagnose",
    "stages/test_fit_lbbnn",
    "stages/test_fit_lbbnn_resume",
    "stages/test_hmc_runs",
    "inference/test_refine",
    "stages/test_refine_resume",
    "stages/test_row_space_runs",
)
# Their commands are to name no device in what they say to run next.
DESELECTED = ("tests/stages/test_hmc_runs.py::test_an_interrupted_run_continues_to_the_same_bits",)
SECONDS = 240.0


def run_tests(gpu: Gpu, ledger: Ledger, is_quick: bool) -> None:
    """All of them in a process of its own."""
    if is_quick:
        ledger.note("tests with their commands on the GPU", "left out where it is quick")
        return
    if importlib.util.find_spec("pytest") is None:
        ledger.miss("tests with their commands on the GPU", "pytest is not installed")
        return
    names = FILES if gpu.is_pretend else FILES + REAL_ONLY
    folders = os.pathsep.join(str(ROOT / name) for name in ("benchmarks", "tests"))
    path = os.pathsep.join(part for part in (folders, os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "BNNCLI_DEVICE": gpu.name, "PYTHONPATH": path}
    if gpu.is_pretend:
        environment[PRETEND] = "1"
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "gpu_steps.on_device",
        *(f"--deselect={name}" for name in DESELECTED),
        *(f"tests/{name}.py" for name in names),
    ]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    text = " ".join([*failed, *lines[-1:], done.stderr[-300:]])
    ledger.agree(f"{len(names)} files of tests with their commands on the GPU", done.returncode == 0, text)
    used = next((int(line.removeprefix(USED)) for line in lines if line.startswith(USED)), 0)
    what = "kernels" if gpu.is_pretend else "bytes"
    ledger.check(f"{what} that these tests took there", used, float("inf"), least=1, ended=lines[-1] if lines else "-")
