"""Every path on a GPU, on a pretend one: no mixes of devices, no syncs in captures, and the CPU's numbers.

The command lines come from the registry: a new command, flow, integrator, structure or estimator is in them, or a test fails.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pretend_cuda
import pytest
import torch

from bnncli import registry, seeds
from bnncli.cli.commands import COMMANDS, Command
from bnncli.cli.execute import run_command_line
from bnncli.inference import latent_fit, refine
from bnncli.networks import mlp
from bnncli.option import choices_of, flag_of
from bnncli.options import CommonOptions, ComputeOptions, EvaluateOptions, FitLbbnnOptions
from bnncli.stages import _lbbnn_report
from bnncli.storage.headers import read_header


def choices(group: type, name: str) -> list[str]:
    """The values that an option allows."""
    return choices_of(next(spec for spec in fields(group) if spec.name == name).metadata)


SMALL = "--epochs 2 --length 2 --num-draws 2 --elbo-draws 4 --patience 0"  # eight steps of batches, two of all data
LINES = (
    "extract-features s --from-npz features.npz --ood far",
    "extract-features b --from-npz binary.npz --dtype float16",
    "extract-features m.pt --model mlp --model-arg inputs=4 --model-arg hidden=3 --model-arg classes=3 "
    "--data train=npz:raw.npz --hold-out val=train:9",
    *(f"fit-laplace s --structure {name} --name {name} --prior-precision 5" for name in registry.names("covariances")),
    "fit-laplace s --structure kron --bias-precision 2",
    "fit-laplace b --center checkpoint --prior-precision marglik",
    "fit-temperature s",
    *(f"refine s --flow {name} --name r-{name} --batch-size 8 {SMALL}" for name in registry.names("flows")),
    f"refine s {SMALL}",
    f"refine s --scale block --name block-flow {SMALL}",
    f"refine s --scale low-rank --base kron --name low-rank-flow {SMALL}",
    f"refine s --flow radial --space whitened --base diag --name whitened-flow {SMALL}",
    f"refine b --flow radial --space weight {SMALL}",
    "hmc s --chains 2 --warmup 6 --draws 8",
    "hmc s --chains 2 --warmup 6 --draws 8 --dynamics leapfrog --name leap",
    "hmc b --chains 2 --warmup 6 --draws 4 --until ess>=1",
    *(
        f"fit-lbbnn s --estimator {name} --epochs 2 --batch-size 8 --early-epochs 1 --slab-sd 1 --name l-{name} --schedule constant"
        for name in choices(FitLbbnnOptions, "estimator")
    ),
    "fit-lbbnn s --epochs 2 --batch-size 8",
    "fit-lbbnn s --hidden 3 --repeats 2 --standardize --epochs 2 --batch-size 8 --schedule cosine --variance published --name h",
    "prune s",
    "prune s --posterior h --rule density --density 0.5 --name half",
    "predict s --integrator all --samples 6 --posterior laplace --table table.csv",
    "predict s --samples 6 --posterior refine --posterior hmc --posterior map --posterior lbbnn --split test --split far",
    "predict s --integrator mc --integrator logit-mc --qmc --samples 8 --posterior diag --split test",
    "predict s --integrator bridge --top-k neighbor --posterior kron --split test",
    "predict s --integrator bridge --top-k best --posterior full --split test",
    "predict b --integrator all --samples 6 --posterior laplace --split test",
    "evaluate s --bootstrap 5 --score all --integrator mc",
    "diagnose s --draws 16 --posterior laplace --posterior refine",
    "integrals --mean 1,2,0 --variance 1,1,1 --samples 9",
    "integrals --grid-size 2 --samples 9",
)


# Values of options that no line has, and why.
WITHOUT_LINE = {
    ("hmc", "--sampler", "nuts"): "Pyro's own, slow, and not for a pretend device",
    ("refine", "--scale", "kron"): "what affine does without --scale",
    ("fit-lbbnn", "--variance", "exact"): "what lrt and mnf do without --variance",
}
LEFT_OUT = {"demo": "runs other commands, for a minute"}


def make_arrays(num_outputs: int) -> dict[str, np.ndarray]:
    """A head and what it nearly says."""
    generator = np.random.default_rng(1)
    weight, bias = (generator.normal(size=size).astype(np.float32) for size in ((num_outputs, 4), num_outputs))
    arrays: dict[str, np.ndarray] = {"head_weight": weight, "head_bias": bias}
    for split, count in (("train", 36), ("val", 15), ("test", 12), ("far", 6)):
        features = generator.normal(size=(count, 4)).astype(np.float32)
        logits = features @ weight.T + bias + generator.normal(size=(count, num_outputs))
        arrays[f"features_{split}"] = features
        arrays[f"labels_{split}"] = (logits[:, 0] > 0).astype(np.int64) if num_outputs == 1 else logits.argmax(1)
    return arrays


def make_inputs(folder: Path) -> None:
    """The files that the lines read."""
    arrays = make_arrays(3)
    np.savez(folder / "features.npz", **arrays)
    np.savez(folder / "binary.npz", **make_arrays(1))
    np.savez(folder / "raw.npz", x=arrays["features_train"], y=arrays["labels_train"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.save(mlp.build(inputs=4, hidden=(3,), classes=3).state_dict(), folder / "m.pt")


@dataclass(frozen=True)
class Done:
    """What a line did: its exit code and stderr, and on the GPU its kernels, captures and replays."""

    line: str
    code: int
    stderr: str
    counts: tuple[int, int, int] = (0, 0, 0)


def run_line(line: str, device: str) -> Done:
    argv = [*shlex.split(line), "--device", device, "--progress", "none"]
    with redirect_stderr(io.StringIO()) as stderr:
        code = run_command_line(argv, io.StringIO())
    return Done(line, code, stderr.getvalue())


def counts(gpu: pretend_cuda.Pretend) -> np.ndarray:
    return np.array([gpu.num_kernels, gpu.num_captures, gpu.num_replays])


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU draws from a generator of its own where a GPU would: else the two could not be compared."""

    def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
        return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))

    with monkeypatch.context() as patches:
        for module in (latent_fit, refine, _lbbnn_report):
            assert module.on_device is seeds.on_device  # type: ignore[attr-defined]
            patches.setattr(module, "on_device", on_device)
        yield


@dataclass(frozen=True)
class Both:
    """All lines on the CPU and on the pretend GPU, each in a folder of its own."""

    cpu: Path
    gpu: Path
    device: pretend_cuda.Pretend
    done: list[Done]
    plain: list[Done]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folders = [tmp_path_factory.mktemp(name) for name in ("cpu", "gpu")]
    done = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for folder in folders:
            make_inputs(folder)
        monkeypatch.chdir(folders[0])
        with as_on_a_gpu(monkeypatch):
            plain = [run_line(line, "cpu") for line in LINES]
        monkeypatch.chdir(folders[1])
        with pretend_cuda.pretend() as gpu:
            for line in LINES:
                before = counts(gpu)
                one = run_line(line, "cuda")
                done.append(replace(one, counts=tuple((counts(gpu) - before).tolist())))
    return Both(*folders, gpu, done, plain)


def test_every_command_that_takes_a_device_has_a_line() -> None:
    named = {command.name for command in COMMANDS if ComputeOptions in command.groups}
    assert named - {line.split()[0] for line in LINES} == set(LEFT_OUT)


def values_to_cover(command: Command) -> set[tuple[str, str, str]]:
    """Command, option and value, of every option with choices; one value may be the default of a line without the option."""
    own = [group for group in command.groups if group not in (CommonOptions, ComputeOptions)]
    specs = [spec for group in own for spec in fields(group) if spec.name not in ("metric",)]
    return {
        (command.name, flag_of(spec.name), value)
        for spec in specs
        for value in choices_of(spec.metadata)
        if value != spec.default
    }


def covered_by(line: str) -> set[tuple[str, str, str]]:
    """Command, option and value, of every option of a line; `all` and `integrals` without --integrator are all of them."""
    words = shlex.split(line)
    given = {(words[0], flag, value) for flag, value in pairwise(words) if flag.startswith("--")}
    if words[0] == "integrals" or (words[0], "--integrator", "all") in given:
        given |= {(words[0], "--integrator", name) for name in registry.names("integrators")}
    if (words[0], "--score", "all") in given:
        given |= {(words[0], "--score", name) for name in choices(EvaluateOptions, "score")}
    return given


def test_every_choice_of_every_option_has_a_line() -> None:
    wanted = set().union(*(values_to_cover(command) for command in COMMANDS if ComputeOptions in command.groups))
    assert wanted - set().union(*map(covered_by, LINES)) == set(WITHOUT_LINE)


def test_every_line_runs_as_on_the_cpu_without_anything_a_gpu_refuses(both: Both) -> None:
    for one, plain in zip(both.done, both.plain, strict=True):
        assert one.code == plain.code == 0, (one, plain)
    assert both.device.problems() == []


def test_every_line_computes_on_the_device_and_training_replays_graphs(both: Both) -> None:
    for one in both.done:
        kernels, captures, replays = one.counts
        assert kernels > 0 or "--from-npz" in one.line, one.line
        if "--batch-size" in one.line:
            assert captures >= 1, one.line
            assert replays >= 3, one.line


def test_every_artifact_is_the_cpus(both: Both) -> None:
    runs = [folder.relative_to(both.cpu) for folder in both.cpu.glob("*.bnn/[a-z]*")]
    names = [path.relative_to(both.cpu) for run in runs for path in (both.cpu / run).rglob("*") if path.is_file()]
    differing = [str(name) for name in names if not is_same(both.cpu / name, both.gpu / name)]
    assert len(names) > 50
    assert differing == []


def is_same(ours: Path, theirs: Path) -> bool:
    return read_header(ours).content_digest == read_header(theirs).content_digest
