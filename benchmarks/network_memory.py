"""Planned and measured peaks of memory of commands over whole networks, each a process of its own.

    python benchmarks/network_memory.py
    python benchmarks/network_memory.py --only 'resnet20 *' '* hmc'

A command says with -v what its process has of memory before the work and what it expects the work to take; the system (Linux) says
what the process had at its peak. A line a case: what was planned and measured above what the process had, MiB, and their quotient,
which is to be within 20 %, or the difference below 32 MiB. Networks are as they are made and data are random: sizes alone
matter. Exit 1 when a case is not within that.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Runs bnncli and says its own peak. What the system keeps of an ended process counts the peak of the one that started it too.
_COMMAND = """
import atexit, pathlib, re, runpy, sys

def say():
    found = re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())
    print(f"peak of {found[1]} kB", file=sys.stderr)

atexit.register(say)
runpy.run_module("bnncli", run_name="__main__", alter_sys=True)
"""
WITHIN = 1.25  # a quotient of .8 to 1.25
SLACK = 32.0  # MiB, beside which small differences do not count
_TRANSFORMER = '''
import torch
from torch import nn


class Transformer(nn.Module):
    """Sixteen patches of an image of 28 x 28, layers of attention, and the mean of what comes out."""

    def __init__(self, width, num_layers):
        super().__init__()
        self.embed = nn.Linear(49, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        patches = x.reshape(-1, 4, 7, 4, 7).transpose(2, 3).reshape(-1, 16, 49)
        return self.head(self.encoder(self.embed(patches)).mean(dim=1))


def make():
    return Transformer(64, 2)


def large():
    return Transformer(512, 8)
'''


class Network(NamedTuple):
    """What extract-features is told, a factory of the module in a line, an image's shape, and examples to train and judge with."""

    words: tuple[str, ...]
    factory: str
    shape: tuple[int, ...]
    train: int
    val: int


def _mlp(hidden: str, activation: str) -> Network:
    words = ("--model", "mlp", "--model-arg", f"activation={activation}", "--model-arg", f"hidden={hidden}")
    built = f"__import__('bnncli.models.architectures.mlp').networks.mlp.build(hidden=({hidden},), activation={activation!r})"
    return Network(words, built, (28, 28), 5_000, 500)


NETWORKS = {
    "mlp": _mlp("50", "relu"),
    "tanh": _mlp("200,200", "tanh"),
    "few": _mlp("200,200", "tanh")._replace(train=100, val=50),  # for chains, which take many passes
    "lenet5": Network(("--model", "lenet5"), "__import__('bnncli.models.architectures.lenet5').networks.lenet5.build()", (28, 28), 5_000, 500),
    "resnet20": Network(
        ("--model", "resnet20"), "__import__('bnncli.models.architectures.resnet20').networks.resnet20.build()", (32, 32, 3), 500, 200
    ),
    "transformer": Network(("--model", "net.py:make"), "make()", (28, 28), 5_000, 500),
    "part": Network(("--model", "net.py:large"), "large()", (28, 28), 200, 100),  # 17 million parameters, few of which vary
    "small": Network(
        ("--model", "mlp", "--model-arg", "hidden=20", "--model-arg", "inputs=100"),
        "__import__('bnncli.models.architectures.mlp').networks.mlp.build(hidden=(20,), inputs=100)", (10, 10), 5_000, 500,
    ),
}  # fmt: skip
NUMBER = ("--prior-precision", "50")
FIT = ("fit-laplace", "--layers", "all")
PART = ("fit-laplace", "--layers", "encoder.layers.7.linear1+head")
HMC = ("hmc", "--layers", "all", "--prior-precision", "5000", "--warmup", "5", "--draws", "4")
REFINE = ("refine", "--layers", "all", "--epochs", "2")
CASES: dict[str, tuple[str, ...]] = {
    "mlp diag": (*FIT, *NUMBER, "--structure", "diag"),
    "mlp diag val": (*FIT, "--structure", "diag"),
    "mlp kron": (*FIT, *NUMBER, "--structure", "kron"),
    "mlp kron val": (*FIT, "--structure", "kron"),
    "mlp low-rank": (*FIT, *NUMBER, "--structure", "low-rank"),
    "mlp subnetwork": (*FIT, *NUMBER, "--structure", "subnetwork"),
    "mlp draws": (*FIT, *NUMBER, "--structure", "diag", "--draws", "20"),
    "small full": (*FIT, *NUMBER, "--structure", "full"),
    "small full val": (*FIT, "--structure", "full"),
    "tanh diag val": (*FIT, "--structure", "diag"),
    "tanh kron val": (*FIT, "--structure", "kron"),
    "tanh ekfac val": (*FIT, "--structure", "ekfac"),
    "tanh low-rank": (*FIT, *NUMBER, "--structure", "low-rank", "--rank", "20"),
    "tanh subnetwork": (*FIT, *NUMBER, "--structure", "subnetwork"),
    "tanh kron mode": (*FIT, "--prior-precision", "500", "--structure", "kron", "--center", "mode"),
    "few hmc": (*HMC, "--chains", "16"),
    "few hmc more": (*HMC, "--chains", "4", "--draws", "40"),
    "lenet5 diag val": (*FIT, "--structure", "diag"),
    "lenet5 kron": (*FIT, *NUMBER, "--structure", "kron"),
    "lenet5 kron val": (*FIT, "--structure", "kron"),
    "lenet5 ekfac val": (*FIT, "--structure", "ekfac"),
    "lenet5 low-rank": (*FIT, *NUMBER, "--structure", "low-rank", "--rank", "20"),
    "lenet5 subnetwork": (*FIT, *NUMBER, "--structure", "subnetwork"),
    "resnet20 diag": (*FIT, *NUMBER, "--structure", "diag"),
    "resnet20 kron": (*FIT, *NUMBER, "--structure", "kron"),
    "resnet20 kron val": (*FIT, "--structure", "kron"),
    "resnet20 ekfac": (*FIT, *NUMBER, "--structure", "ekfac"),
    "resnet20 low-rank": (*FIT, *NUMBER, "--structure", "low-rank", "--rank", "3"),
    "transformer diag": (*FIT, *NUMBER, "--structure", "diag"),
    "transformer kron": (*FIT, *NUMBER, "--structure", "kron"),
    "transformer kron val": (*FIT, "--structure", "kron"),
    "transformer ekfac": (*FIT, *NUMBER, "--structure", "ekfac"),
    "part diag": (*PART, *NUMBER, "--structure", "diag"),
    "part kron": (*PART, *NUMBER, "--structure", "kron"),
    "part kron val": (*PART, "--structure", "kron"),
}  # fmt: skip
BASE = (*FIT, *NUMBER, "--structure", "diag")
# Of a base that is fitted first, unmeasured.
BASED: dict[str, tuple[str, ...]] = {
    "mlp refine": (*REFINE, "--flow", "affine"),
    "mlp refine radial": (*REFINE, "--flow", "radial"),
    "tanh refine": (*REFINE, "--flow", "affine"),
    "tanh refine low-rank": (*REFINE, "--scale", "low-rank"),
    "tanh refine radial": (*REFINE, "--flow", "radial"),
    "lenet5 refine": (*REFINE, "--flow", "affine"),
    "resnet20 refine": (*REFINE, "--elbo-draws", "8"),
    "transformer refine": (*REFINE, "--elbo-draws", "16"),
    "part refine": ("refine", *PART[1:], "--base", "laplace-all", "--epochs", "2", "--elbo-draws", "4"),
}
# Of the base, and what refines it.
REFINED = (*REFINE[:3], "--epochs", "1", "--elbo-draws", "4")
BOTH = ("--posterior", "laplace-all", "--posterior", "refine-all")
JUDGED: dict[str, tuple[str, ...]] = {
    "mlp predict": ("predict", "--posterior", "laplace-all"),
    "tanh predict": ("predict", "--posterior", "laplace-all"),
    "tanh predict refined": ("predict", "--posterior", "refine-all"),
    "tanh diagnose": ("diagnose", *BOTH, "--draws", "32"),
    "lenet5 predict": ("predict", "--posterior", "laplace-all"),
    "lenet5 predict probit": ("predict", "--posterior", "laplace-all", "--integrator", "probit"),
    "lenet5 predict refined": ("predict", "--posterior", "refine-all"),
    "lenet5 diagnose": ("diagnose", *BOTH, "--draws", "32"),
    "resnet20 predict": ("predict", "--posterior", "laplace-all"),
    "transformer predict": ("predict", "--posterior", "laplace-all"),
    "transformer diagnose": ("diagnose", "--posterior", "laplace-all", "--draws", "16"),
    "part predict": ("predict", "--posterior", "laplace-all"),
    "part diagnose": ("diagnose", "--posterior", "laplace-all", "--draws", "16"),
}


class Peak(NamedTuple):
    """MiB of a command: planned, and measured above what its process had before."""

    planned: float
    measured: float
    before: float

    @property
    def quotient(self) -> float:
        """Planned to measured."""
        return self.planned / self.measured

    @property
    def is_within(self) -> bool:
        """Whether the plan is as good as it is to be."""
        return 1 / WITHIN <= self.quotient <= WITHIN or abs(self.planned - self.measured) <= SLACK


@dataclass(frozen=True)
class Folder:
    """Where a network's run lives."""

    path: Path

    def run(self, *words: str) -> tuple[str, float]:
        """What a command says on stderr, and its peak, MiB. Raises RuntimeError where it fails."""
        command = [sys.executable, "-c", _COMMAND, words[0], "ckpt.pt", *words[1:], "-v"]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        ran = subprocess.run(command, cwd=self.path, capture_output=True, text=True, env=environment)
        peak = re.search(r"peak of (\d+) kB", ran.stderr)
        if ran.returncode or peak is None:
            raise RuntimeError(f"bnncli {' '.join(words)} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
        return ran.stderr, float(peak[1]) / 1024

    def measure(self, *words: str) -> Peak:
        """Of a command's work."""
        said, peak = self.run(*words, "--trust-code", *(("--force",) if words[0] != "diagnose" else ()))
        found = re.search(r"the process uses ([\d.]+ \w+) of memory, the work needs about ([\d.]+ \w+) more", said)
        if found is None:
            raise RuntimeError(f"no plan of the memory in:\n{said[-2000:]}")
        before, planned = (_mib(text) for text in found.groups())
        return Peak(planned, peak - before, before)


def make_run(path: Path, name: str) -> Folder:
    """A network's run: weights and data that nobody trained on, and the features."""
    network, folder = NETWORKS[name], Folder(path)
    path.mkdir()
    (path / "net.py").write_text(_TRANSFORMER)
    code = (
        "import sys, torch, numpy as np; sys.path.insert(0, '.'); from net import large, make; torch.manual_seed(0)\n"
        f"torch.save({network.factory}.state_dict(), 'ckpt.pt'); rng = np.random.default_rng(0)\n"
        f"for split, count in (('train', {network.train}), ('val', {network.val})):\n"
        f"    x = rng.integers(0, 256, (count, *{network.shape!r}), dtype=np.uint8)\n"
        "    np.savez(f'{split}.npz', x=x, y=rng.integers(0, 10, count))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=path, check=True)
    folder.run("extract-features", *network.words, "--data", "train=npz:train.npz", "--data", "val=npz:val.npz")
    return folder


def _mib(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024, "TiB": 2**20}[unit]


def _before(name: str) -> list[tuple[str, ...]]:
    """Commands that make what a case starts from."""
    is_refined = "refine-all" in JUDGED.get(name, ())
    base = (*PART, *NUMBER, "--structure", "diag", "--name", "laplace-all") if name.startswith("part ") else BASE
    return [base] * (name not in CASES) + [REFINED] * is_refined


def measured_cases(folder: Path, patterns: list[str]) -> dict[str, Peak]:
    """Of the cases that a shell pattern names, told as they come."""
    runs: dict[str, Folder] = {}
    made: set[tuple[str, ...]] = set()
    found = {}
    for name, words in {**CASES, **BASED, **JUDGED}.items():
        network = name.partition(" ")[0]
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if network not in runs:
            runs[network] = make_run(folder / network, network)
        for before in _before(name):
            if (network, *before) not in made:
                runs[network].run(*before, "--trust-code", "--force")
                made.add((network, *before))
        try:
            one = found[name] = runs[network].measure(*words)
        except RuntimeError as error:
            print(f"{name}: failed: {error}", flush=True)
            found[name] = Peak(float("nan"), 1.0, 0.0)
            continue
        print(
            f"{name}: planned {one.planned:.0f} MiB, measured {one.measured:.0f} MiB above {one.before:.0f}, quotient {one.quotient:.2f}"
            f"{'' if one.is_within else '  <--'}",
            flush=True,
        )
    return found


def main() -> None:
    """All cases, or those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of the cases' names")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured_cases(Path(folder), arguments.only)
    missed = [name for name, peak in found.items() if not peak.is_within]
    print(f"{len(found) - len(missed)} of {len(found)} within; not: {', '.join(missed) or 'none'}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
