"""A command that has nothing to do, or whose input is missing, says so before PyTorch, scikit-learn or SciPy are imported."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from problems.command_line import Cli
from pyarrow import parquet

from bnncli.cli.commands import own_commands
from bnncli.cli.execute import run_command_line
from bnncli.system import devices

SLOW = ("torch", "sklearn", "scipy", "pandas", "matplotlib", "pyro", "pyarrow")


# What made the run below; said again, each has nothing to do.
MADE = (
    "extract-features net.pt --model net.py:make --data train=npz:data.npz --data test=npz:data.npz@40 --hold-out val=test:9",
    "extract-features flat --model flatten --data train=npz:data.npz --ood far=npz:data.npz@40 --hold-out val=train:9",
    "extract-features table --model flatten --data train=csv:table.csv:x=a+b --data test=jsonl:table.jsonl:x=a+b",
    "extract-features rows --model flatten --data train=parquet:rows.parquet:x=a+b",
    "extract-features ready --from-npz features.npz --ood far --hold-out some=test:9",
    "train new.safetensors --model net.py:make --data train=npz:data.npz --epochs 1",
    "fit-laplace small --prior-precision 10",
    "fit-laplace net.pt --structure diag --prior-precision 10",
    "fit-laplace net.pt --layers all --structure diag --prior-precision 10 --trust-code",
    "fit-ensemble net.pt more.pt --trust-code",
    "fit-temperature small",
    "fit-calibration small",
    "stack small",
    "refine small --epochs 1 --length 2",
    "refine small --flow planar --epochs 1 --elbo-draws 64 --name planar",
    "hmc small --chains 8 --warmup 8 --draws 16",
    "hmc small --chains 8 --warmup 8 --draws 16 --seed 1 --name again",
    "merge small --posterior hmc --posterior again",
    "fit-lbbnn small --epochs 1 --slab-sd 1",
    "prune small",
    "fit-swag small --warmup 1 --epochs 4 --rank 3",
    "fit-vi small --epochs 2 --elbo-draws 8",
    "fit-vi net.pt --layers all --prior-precision 3 --epochs 2 --elbo-draws 8 --trust-code",
    "fit-sghmc small --chains 2 --epochs 20",
    "fit-sghmc net.pt --layers all --prior-precision 3 --chains 1 --epochs 20 --batch-size 16 --trust-code",
    "predict small --samples 20 --split test --posterior temperature --posterior lbbnn",
    "predict net.pt --samples 20 --split test --trust-code",
    "export small --posterior laplace --integrator probit --head-only --format torch",
    "calibrate small --posterior lbbnn --split test --sets lac --false-alarm 0.1",
    "evaluate small --bootstrap 20 --posterior lbbnn",
)
NOTHING_TO_DO = (
    *MADE,
    "predict small --posterior laplace --posterior refine --posterior hmc --posterior map",
    "predict small --posterior laplace --integrator all --dry-run",
    "evaluate small --bootstrap 20 --posterior laplace --posterior refine --posterior hmc --posterior map",
    "status small",
    "status net.pt",
    "inspect small.bnn/posteriors/laplace.safetensors",
    "inspect small.bnn/posteriors/hmc.nc",
    "clean small",
    "clean small --stale --dry-run",
    "rm small hmc.mc --dry-run",
    "config show refine",
    "help",
    "help exit-codes",
    "help common",
    "help environment",
    "help specs",
    "help predict",
)
# These work whenever they are called, or their work is to read every byte.
ALWAYS_WORK = {
    "acquire",
    "compare",
    "diagnose",
    "integrals",
    "sbc",
    "auto",
    "verify",
    "demo",
    "convert",
    "monitor",
    "score",
    "grid",
    "reproduce",
    "report",
}
MISSING = {
    "calibrate": "--sets lac",
    "convert": "out.safetensors",
    "extract-features": "--model net.py:make --data train=npz:data.npz",
    "fit-ensemble": "more.pt",
    "rm": "laplace",
}

# In a process of its own, so that nothing is imported yet: each line with its code, and what it printed.
RUN = f"""
import io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {SLOW!r}:
            raise RuntimeError(f"{{name}} is imported")

sys.meta_path.insert(0, Refuse())
from bnncli.cli.execute import run_command_line

found = []
for words in json.load(sys.stdin):
    results, sys.stderr = io.StringIO(), io.StringIO()
    code = run_command_line(words, results)
    found.append([code, results.getvalue(), sys.stderr.getvalue()])
print(json.dumps(found))
"""

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
"""


@pytest.fixture(scope="module")
def folder(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of features and one of a checkpoint, with an artifact of every command."""
    folder = tmp_path_factory.mktemp("quick")
    shutil.copytree(finished_run.with_name("small.bnn"), folder / "small.bnn")
    shutil.copy(finished_run.with_name("features.npz"), folder)
    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=rng.random((60, 1, 2, 2), dtype=np.float32), y=rng.integers(3, size=60))
    (folder / "table.csv").write_text("a,b,label\n" + "1,2.5,0\n3,4,1\n" * 5)
    (folder / "table.jsonl").write_text('{"a": 1, "b": 2.5, "label": 0}\n' * 5)
    columns = {"a": [1.0, 3.0], "b": [2.5, 4.0], "label": [0, 1]}
    parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
    (folder / "net.py").write_text(NETWORK)
    shapes = {"1.weight": (3, 4), "1.bias": (3,), "3.weight": (3, 3), "3.bias": (3,)}
    for file in ("net.pt", "more.pt"):
        torch.save({name: torch.from_numpy(rng.random(shape)).float() for name, shape in shapes.items()}, folder / file)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in MADE:
            assert run_command_line(shlex.split(words), io.StringIO()) == 0, words
    return folder


def results_of(folder: Path, lines: Sequence[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each line, in one process where slow imports fail."""
    words = json.dumps([shlex.split(line) for line in lines])
    done = subprocess.run([sys.executable, "-c", RUN], cwd=folder, input=words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [(code, stdout, stderr) for code, stdout, stderr in json.loads(done.stdout)]


def test_what_has_nothing_to_do_says_so_without_slow_imports(folder: Path) -> None:
    for line, (code, stdout, stderr) in zip(NOTHING_TO_DO, results_of(folder, NOTHING_TO_DO), strict=True):
        assert code == 0, f"{line}: {stderr}"
        assert line not in MADE or "up to date" in stderr, f"{line}: {stdout}{stderr}"


def test_every_command_that_may_have_nothing_to_do_is_tried() -> None:
    tried = {line.split()[0] for line in NOTHING_TO_DO} | {"-".join(line.split()[:2]) for line in NOTHING_TO_DO}
    assert {command.name for command in own_commands()} - tried == ALWAYS_WORK


def test_missing_inputs_data_and_code_are_told_without_slow_imports(folder: Path) -> None:
    commands = [
        one for one in own_commands() if one.arguments and one.name not in ("config-show", "help", "train", "reproduce")
    ]
    kinds = ("npz:absent", "idx:absent,data.npz", "images:absent")
    network = "--model absent.py:make --data more=npz:data.npz"
    lines = [
        *(f"{one.name} absent.pt {MISSING.get(one.name, '')}" for one in commands),
        *(f"extract-features net.pt --model net.py:make --data more={kind}" for kind in kinds),
        *(f"train new.safetensors --model net.py:make --data train={kind}" for kind in kinds),
        "train other.safetensors --model absent.py:make --data train=npz:data.npz",
        "extract-features small --from-npz absent",
        f"extract-features net.pt {network}",
        f"extract-features net.pt --run-dir fresh {network}",
    ]
    for line, (code, _, stderr) in zip(lines, results_of(folder, lines), strict=True):
        assert code == 66, f"{line}: {stderr}"
        assert ("absent.pt" if "absent.pt" in line else "absent") in stderr


def test_the_device_is_named_without_slow_imports(folder: Path) -> None:
    line = "fit-laplace net.pt --structure diag --prior-precision 10 --json"
    if devices.device_name("auto") == "cpu":
        ((code, stdout, stderr),) = results_of(folder, [line])
        assert (code, json.loads(stdout)["device"]) == (0, "cpu"), stderr


class Refuse:
    """Fails when one of some modules is imported anew."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(name == slow or name.startswith(f"{slow}.") for slow in self.names):
            raise RuntimeError(f"{name} is imported")
        return None


def test_pipeline_imports_no_scikit_learn(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in [name for name in sys.modules if name.startswith(("sklearn", "scipy.stats"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuse("sklearn", "scipy.stats"), *sys.meta_path])
    extract = MADE[0].replace("extract-features net.pt", "extract-features net.pt --run-dir again")
    names = ("fit-laplace net", "refine small --epochs", "hmc", "predict small", "evaluate")
    for words in (extract, *(f"{words} --force" for words in MADE if words.startswith(names))):
        done = cli(*shlex.split(words))
        assert done.code == 0, f"{words}: {done.stderr}"
    quasi = cli(*shlex.split("predict small --posterior laplace --qmc --samples 16 --split test"))
    assert "scipy.stats is imported" in quasi.stderr
