"""The runs that commands are tried on, and the lines of each: every command, and every member of every family, by registry."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from gpu_steps.lines import command_of

from bnncli import registry
from bnncli.cli.commands import own_commands
from bnncli.commands.demo import fixture_path

# Sums of float32 differ by their order; a weaker prior leaves Hessians near enough to singular for that to be seen.
_PRIOR = "--prior-precision 100"
ESTIMATORS = ("lrt", "mnf", "concrete")
COMPUTES_NOTHING = ("grid", "reproduce")  # their lines are other commands
SLOW_HEADS = ("single-logit", "wide")  # of the heads' shapes, where work is slow


@dataclass(frozen=True)
class Case:
    """A run and the lines that fill it, in their order.

    Args:
        arrays: what --from-npz reads; empty for the embedded network on its images.
    """

    name: str
    lines: tuple[str, ...]
    arrays: dict[str, np.ndarray]

    def thinned(self) -> Case:
        """Each command once, as its first line has it, with the posteriors that these lines name, and no demo."""
        firsts = {command_of(line): line for line in reversed(self.lines) if command_of(line) != "demo"}
        named = {name for line in firsts.values() for name in _values(line, "--posterior")}
        lines = [line for line in self.lines if line in firsts.values() or named & set(_values(line, "--name"))]
        return replace(self, lines=tuple(lines))

    def prepare(self, folder: Path) -> None:
        """Put what the first line reads into a new folder."""
        folder.mkdir(parents=True)
        if self.arrays:
            np.savez(folder / "arrays.npz", **self.arrays)  # type: ignore[arg-type]
        else:
            shutil.copy(fixture_path("lenet5-fmnist.pt"), folder / "run")


def small_case() -> Case:
    """A small head alone, each command on it once."""
    return Case("small", tuple(_quick_lines()), head_arrays(num_train=60))


def cases(*, is_slow: bool = False) -> list[Case]:
    """All runs: the embedded network, and heads of every shape; where work is slow, less of them."""
    images = Case("images", tuple(_lines(_extract_images())), {})
    heads = {
        "single-logit": head_arrays(num_classes=2, is_single=True),
        "two-classes": head_arrays(num_classes=2),
        "no-bias": head_arrays(has_bias=False),
        "half": head_arrays(is_half=True),
        "wide": head_arrays(num_train=50, num_features=60),
    }
    all_cases = [images, *(Case(name, tuple(_head_lines()), arrays) for name, arrays in heads.items())]
    return [images.thinned(), *(case for case in all_cases if case.name in SLOW_HEADS)] if is_slow else all_cases


def without_line(all_cases: list[Case]) -> list[str]:
    """Commands that no line of any case runs."""
    there = {command_of(line) for case in all_cases for line in case.lines}
    return sorted({command.name for command in own_commands()} - there - {*COMPUTES_NOTHING})


def _values(line: str, flag: str) -> list[str]:
    """What stands after a flag."""
    words = line.split()
    return [value for word, value in pairwise(words) if word == flag]


def head_arrays(
    *, num_train: int = 300, num_features: int = 6, num_classes: int = 3, is_single: bool = False,
    has_bias: bool = True, is_half: bool = False,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Features of a head that fits them, with labels that its logits and noise choose."""
    generator = np.random.default_rng(0)
    outputs = 1 if is_single else num_classes
    weight = generator.normal(size=(outputs, num_features)) * 2 / np.sqrt(num_features)
    bias = generator.normal(size=outputs) * has_bias
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", num_train), ("val", 60), ("test", 50), ("far", 40)):
        features = generator.normal(size=(count, num_features))
        logits = features @ weight.T + bias + generator.gumbel(size=(count, outputs))
        labels = logits[:, 0] > 0 if is_single else logits.argmax(axis=1)
        arrays |= {
            f"features_{split}": features.astype(np.float16 if is_half else np.float32),
            f"labels_{split}": labels.astype(np.int64),
        }
    arrays["head_weight"] = weight.astype(np.float32)
    if has_bias:
        arrays["head_bias"] = bias.astype(np.float32)
    return arrays


def _extract_images() -> str:
    rows = {"train": 2000, "val": 500, "test": 500}
    data = " ".join(f"--data {split}=npz:{fixture_path(f'{split}.npz')}@{count}" for split, count in rows.items())
    return f"extract-features FOLDER/run --model lenet5 {data} --ood mnist=npz:{fixture_path('mnist.npz')}@300"


_RULES = "--sets lac --coverage 0.8 --recall 0.6 --class 1 --false-alarm 0.1 --shift-level 0.01"
EXTRACT_ARRAYS = "extract-features FOLDER/run --from-npz FOLDER/arrays.npz --ood far"


def _lines(extract: str) -> list[str]:
    """Every command, and every member of every family."""
    structures, flows = registry.names("curvature"), registry.names("flows")
    return [
        extract,
        f"fit-laplace FOLDER/run {_PRIOR}",
        *(f"fit-laplace FOLDER/run {_PRIOR} --structure {name} --name {name}" for name in structures),
        "fit-laplace FOLDER/run --name by-val",
        "fit-laplace FOLDER/run --prior-precision marglik --name by-evidence",
        f"fit-laplace FOLDER/run {_PRIOR} --center checkpoint --name beside",
        f"fit-laplace FOLDER/run {_PRIOR} --bias-precision 3 --structure kron --name bias",
        "fit-temperature FOLDER/run",
        "fit-calibration FOLDER/run",
        "stack FOLDER/run",
        "refine FOLDER/run",
        *(f"refine FOLDER/run --flow {name} --epochs 60 --name {name}" for name in flows),
        "refine FOLDER/run --base diag --epochs 60 --scale block --name from-diag",
        "refine FOLDER/run --base kron --epochs 60 --scale low-rank --name from-kron",
        "hmc FOLDER/run",
        "hmc FOLDER/run --dynamics leapfrog --name leapfrog",
        "hmc FOLDER/run --gradients tf32 --name tf32",
        "hmc FOLDER/run --gradients bfloat16 --name bfloat16",
        "hmc FOLDER/run --seed 1 --name again",
        "merge FOLDER/run --posterior hmc --posterior again",
        # One slab: a search for it chooses by few val examples, another one for other noise, and 100 nats lie between them.
        *(
            f"fit-lbbnn FOLDER/run --estimator {name} --slab-sd 0.25 --repeats 4 --epochs 60 --name {name}"
            for name in ESTIMATORS
        ),
        "fit-lbbnn FOLDER/run --hidden 20 --standardize --epochs 20 --name hidden",
        "fit-lbbnn FOLDER/run --slab-sd 0.25 --repeats 2 --estimator mnf --epochs 20 --shards 64 --name apart",
        "prune FOLDER/run --posterior lrt",
        "prune FOLDER/run --posterior mnf --rule density --density 0.2",
        "predict FOLDER/run --integrator all --samples 100",
        "predict FOLDER/run --integrator mc --integrator logit-mc --qmc --posterior laplace",
        f"calibrate FOLDER/run --split test --posterior laplace --integrator mc {_RULES}",
        "monitor FOLDER/run --split test --posterior laplace --integrator mc --coverage 0.8 --reset",
        "evaluate FOLDER/run --score all --bootstrap 100",
        "acquire FOLDER/run --pool test --by batchbald --batch 5",
        *_new_fits("200"),
        *_trainings(),
        *_readers(),
        "integrals --grid-size 20",
        "demo --dir FOLDER/demo",
    ]


def _head_lines() -> list[str]:
    """The pipeline, each command once or twice, for a head of another shape."""
    return [
        EXTRACT_ARRAYS,
        f"fit-laplace FOLDER/run {_PRIOR}",
        f"fit-laplace FOLDER/run {_PRIOR} --structure kron --name kron",
        "refine FOLDER/run",
        "refine FOLDER/run --base kron --flow spline --epochs 50 --name spline",
        "hmc FOLDER/run",
        "fit-lbbnn FOLDER/run --epochs 60",
        "predict FOLDER/run --integrator all --samples 100",
        "evaluate FOLDER/run --score all --bootstrap 50",
        "diagnose FOLDER/run",
    ]


def _quick_lines() -> list[str]:
    """Every command once, as little as it can do."""
    test = "--split test --posterior laplace"
    return [
        EXTRACT_ARRAYS,
        f"fit-laplace FOLDER/run {_PRIOR}",
        "fit-temperature FOLDER/run",
        "fit-calibration FOLDER/run",
        "stack FOLDER/run",
        "refine FOLDER/run --epochs 30 --length 1 --elbo-draws 32",
        "hmc FOLDER/run --chains 8 --warmup 10 --draws 20",
        "hmc FOLDER/run --chains 8 --warmup 10 --draws 20 --seed 1 --name again",
        "merge FOLDER/run --posterior hmc --posterior again",
        "fit-lbbnn FOLDER/run --slab-sd 1 --repeats 2 --epochs 3",
        "prune FOLDER/run",
        f"predict FOLDER/run --integrator mc --integrator plug-in --samples 20 {test}",
        f"calibrate FOLDER/run {test} --integrator mc {_RULES}",
        f"monitor FOLDER/run {test} --integrator mc --reset",
        f"evaluate FOLDER/run --bootstrap 10 {test}",
        *_new_fits("20"),
        *_readers("--posterior laplace"),
        "integrals --mean 1 --variance 2 --integrator probit",
    ]


def _new_fits(epochs: str) -> list[str]:
    """Baselines on the last layer, and what judges fits and files."""
    train, test = f"--epochs {epochs}", "FOLDER/run.bnn/predictions/laplace.mc/test.h5"
    return [
        f"fit-sghmc FOLDER/run {train} --chains 2 --sampler sghmc",
        # The search halves the rate once more or less by the noise: val NLL of four seeds is .53 to .67.
        f"fit-swag FOLDER/run {train} --learning-rate 0.03 --warmup 2 --rank 2",
        f"fit-vi FOLDER/run {train}",
        "sbc FOLDER/run --simulations 20 --draws 9",
        f"score {test} --bootstrap 10",
    ]


_NETWORK = "--model mlp --model-arg inputs=784 --model-arg hidden=4"


def _trainings() -> list[str]:
    """Networks of our own, and what is made of them."""
    data = f"--data train=npz:{fixture_path('train.npz')}@200 --data val=npz:{fixture_path('val.npz')}@100"
    return [
        f"train FOLDER/net.safetensors {_NETWORK} {data} --epochs 2 --seeds 2",
        f"extract-features FOLDER/net-0.safetensors {data}",
        "fit-ensemble FOLDER/net-0.safetensors FOLDER/net-1.safetensors",
        "fit-ensemble FOLDER/net-0.safetensors FOLDER/net-1.safetensors --each laplace",
        "auto FOLDER/net-0.safetensors",
        f"predict FOLDER/net-0.safetensors --data new=npz:{fixture_path('val.npz')}@50 --table FOLDER/new.csv --keep-features",
    ]


def _readers(diagnosed: str = "") -> list[str]:
    return [
        f"diagnose FOLDER/run {diagnosed}",
        "export FOLDER/run --posterior laplace --integrator probit --head-only --format torch",
        "compare FOLDER/run",
        "report FOLDER/run",
        "status FOLDER/run",
        "verify FOLDER/run.bnn",
        "inspect FOLDER/run.bnn/posteriors/laplace.safetensors",
        "convert FOLDER/run.bnn/posteriors/map.safetensors FOLDER/state.safetensors",
        "clean FOLDER/run",
        "rm FOLDER/run laplace --dependents --dry-run",
        "config show refine",
        "help specs",
    ]
