"""Every path on a GPU, on a pretend one: no mixes of devices, no syncs in captures, and the CPU's numbers.

The command lines come from the registry: a new command, flow, integrator, structure or estimator is in them, or a test fails.
"""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch

from bnncli import registry
from bnncli.artifacts.files import read_header
from bnncli.cli.commands import own_commands
from bnncli.cli.execute import run_command_line
from bnncli.commands import fit_lbbnn
from bnncli.commands.export import ExportOptions
from bnncli.commands.export import build as export
from bnncli.commands.fit_lbbnn import FitLbbnnOptions
from bnncli.commands.report import ReportOptions
from bnncli.commands.train import AUGMENTATIONS, OPTIMIZERS, SCHEDULES
from bnncli.evaluation.calibration_maps import MAPS
from bnncli.inference import refine, sghmc, swag, vi
from bnncli.latent import fit as latent_fit
from bnncli.models.architectures import mlp
from bnncli.numerics import random
from bnncli.options.command import Command, CommonOptions, ComputeOptions
from bnncli.options.declaration import choices_of, flag_of, map_options
from bnncli.options.scoring import EvaluateOptions
from bnncli.targets.last_layer import LastLayerTarget


def choices(group: type, name: str) -> list[str]:
    """The values that an option allows."""
    return choices_of(map_options(group)[name][0].metadata)


EXTRACT = "extract-features s --from-npz features.npz --ood far"
LAPLACE = "fit-laplace s --structure diag --prior-precision 5"
SMALL = "--epochs 2 --length 2 --num-draws 2 --elbo-draws 4 --patience 0"  # eight steps of batches, two of all data
TRAIN = (
    "--model mlp --model-arg inputs=4 --model-arg hidden=3 --model-arg classes=3 --data train=npz:raw.npz --hold-out val=train:9 "
    "--batch-size 4 --epochs 2"
)
LINES = (
    EXTRACT,
    "extract-features b --from-npz binary.npz --dtype float16 --task binary",
    "extract-features m.pt --model mlp --model-arg inputs=4 --model-arg hidden=3 --model-arg classes=3 "
    "--data train=npz:raw.npz --hold-out val=train:9 --task multiclass",
    *(f"fit-laplace s --structure {name} --name {name} --prior-precision 5" for name in registry.names("curvature")),
    "fit-laplace s --prior-precision loo --name left-out",
    *(
        f"fit-laplace m.pt --layers all --structure {name} --name n-{name} --prior-precision 5"
        for name in registry.names("network_curvature")
    ),
    "fit-laplace m.pt --layers all --structure full --curvature hessian --prior-precision 500 --name exact",
    "fit-laplace m.pt --layers ll --structure diag --center mode --prior-precision 5 --name moded",
    "fit-laplace m.pt --layers all --structure subnetwork --size 6 --curvature hessian --prior-precision 500 --name some",
    "fit-laplace m.pt --layers all --structure kron --draws 6 --prior-precision 5 --name drawn",
    "fit-laplace m.pt --layers all --structure diag --curvature fisher --prior-precision 5 --name fisher",
    "fit-laplace m.pt --layers all --structure diag --precision-per layer --prior-precision marglik --name each",
    *(
        f"fit-laplace m.pt --layers all --structure {name} --prior-precision val --name v-{name}"
        for name in ("full", "kron")
    ),
    "hmc m.pt --layers all --base n-full --chains 2 --warmup 6 --draws 8",
    *(
        f"train t-{name}.safetensors {TRAIN} --optimizer {name} --schedule {schedule} --learning-rate 0.01"
        for name, schedule in zip(OPTIMIZERS, (*SCHEDULES, "cosine"), strict=True)
    ),
    *(
        f"train a-{name}.safetensors --recipe lenet-fmnist --model-arg classes=3 --data train=npz:images.npz --batch-size 8 --epochs 1 "
        f"--augment {name}"
        for name in AUGMENTATIONS
    ),
    "train own.safetensors --model file-net.py:make --data train=npz:images.npz --epochs 3 --augment crop+flip",
    f"train several.safetensors {TRAIN} --seeds 2 --ema 0.9 --label-smoothing 0.1",
    f"train apart.safetensors {TRAIN} --seeds 2 --ema 0.9 --shards 64",
    "train p.safetensors --recipe mlp-fmnist --model-arg inputs=4 --data train=npz:raw.npz --batch-size 8 --epochs 1 --task multiclass",
    "train b.safetensors --model mlp --model-arg inputs=4 --model-arg classes=1 --data train=npz:pair.npz --epochs 1 --task binary",
    "train v.safetensors --model mlp --model-arg inputs=4 --model-arg classes=3 --data train=npz:several.npz --epochs 1 --task multilabel",
    "fit-laplace s --structure kron --bias-precision 2",
    "fit-laplace b --center checkpoint --prior-precision marglik",
    "fit-temperature s",
    "fit-calibration s",
    *(f"fit-calibration s --map {name}" for name in MAPS if name != "temperature"),
    *(f"predict s --posterior {name} --split val" for name in ("calibration", "isotonic")),
    "stack s",
    *(f"refine s --flow {name} --name r-{name} --batch-size 8 {SMALL}" for name in registry.names("flows")),
    f"refine s {SMALL}",
    f"refine s --scale block --name block-flow {SMALL}",
    f"refine s --scale diag --name diag-flow {SMALL}",
    f"refine s --scale low-rank --base kron --name low-rank-flow {SMALL}",
    f"refine s --flow radial --space whitened --base diag --name whitened-flow {SMALL}",
    f"refine b --flow radial --space weight {SMALL}",
    "hmc s --chains 2 --warmup 6 --draws 8",
    "hmc s --chains 2 --warmup 6 --draws 8 --dynamics leapfrog --name leap",
    "hmc s --chains 8 --warmup 6 --draws 32 --name searched",
    "refine s --epochs 200 --length 1 --elbo-draws 8 --name searched-flow",
    "hmc b --chains 2 --warmup 6 --draws 4 --until ess>=1",
    "hmc s --chains 2 --warmup 6 --draws 8 --gradients tf32 --name tf32",
    "hmc b --chains 2 --warmup 6 --draws 8 --gradients bfloat16 --name bf16",
    "fit-sghmc s --chains 2 --epochs 8 --batch-size 8",
    "fit-sghmc s --chains 2 --epochs 8 --batch-size 8 --sampler sgld --preconditioner rmsprop --name sgld",
    "fit-sghmc s --chains 2 --epochs 12 --sampler sghmc --start init --preconditioner none --name whole-sghmc",
    "fit-sghmc m.pt --layers all --base n-full --sampler cyclical --preconditioner base --chains 2 --epochs 8 --batch-size 16",
    "fit-swag s --warmup 1 --epochs 4 --rank 3 --batch-size 8",
    "fit-swag m.pt --layers all --base n-full --warmup 1 --epochs 4 --rank 3 --batch-size 8",
    "fit-vi s --epochs 3 --batch-size 8 --elbo-draws 8",
    "fit-vi s --epochs 3 --batch-size 8 --elbo-draws 8 --estimator flipout --start init --name v-flipout",
    "fit-vi s --epochs 3 --batch-size 8 --elbo-draws 8 --estimator reparam --name v-reparam",
    "fit-vi s --epochs 30 --elbo-draws 8 --optimizer ivon --name v-ivon",
    "fit-vi m.pt --layers all --base n-full --estimator local --epochs 2 --batch-size 16 --elbo-draws 8",
    *(
        f"fit-lbbnn s --estimator {name} --epochs 2 --batch-size 8 --slab-sd 1 --name l-{name} --schedule constant"
        for name in choices(FitLbbnnOptions, "estimator")
    ),
    "fit-lbbnn s --epochs 2 --batch-size 8",
    "fit-lbbnn s --hidden 3 --repeats 2 --standardize --epochs 2 --batch-size 8 --schedule cosine --variance published --name h",
    "fit-lbbnn s --repeats 2 --epochs 2 --batch-size 8 --estimator mnf --flow-hidden 3 --shards 64 --name apart",
    "prune s",
    "prune s --posterior h --rule density --density 0.5 --name half",
    "predict s --integrator all --samples 6 --posterior laplace --table table.csv",
    "predict s --samples 6 --posterior refine --posterior hmc --posterior map --posterior lbbnn --split test --split far",
    "predict s --integrator mc --integrator logit-mc --qmc --samples 8 --posterior diag --split test",
    "predict s --integrator bridge --top-k neighbor --posterior kron --split test",
    "predict s --integrator bridge --top-k best --posterior full --split test",
    "predict b --integrator all --samples 6 --posterior laplace --split test",
    "predict m.pt --samples 6 --posterior n-diag --posterior n-full --posterior some --integrator logit-mc --integrator mc --split val",
    "predict m.pt --samples 6 --layers all --posterior hmc-all --split val",
    "predict m.pt --samples 6 --posterior some --posterior map --data new=npz:raw.npz --table new.csv",
    "predict m.pt --posterior map --ood far=npz:raw.npz --table kept.csv --keep-features",
    "fit-ensemble m.pt n.pt",
    "predict m.pt --posterior ensemble --split val",
    "fit-ensemble m.pt n.pt --each temperature --name tempered",
    "fit-ensemble m.pt n.pt --each laplace",
    "predict m.pt --posterior mola --samples 6 --split val",
    "predict m.pt --posterior drawn --integrator logit-mc --integrator probit --split val",
    "diagnose m.pt --draws 16 --layers all --posterior n-diag --posterior some --posterior drawn",
    *(
        f"export s --posterior diag --integrator {name} --draws 9 --head-only --format torch"
        for name in ("plug-in", "probit", "mean-field", "bridge", "mc", "importance", "logit-mc")
    ),
    "export s --posterior lbbnn --integrator mean --head-only --format torch",
    "export b --posterior laplace --integrator quadrature --head-only --format torch",
    *(
        f"export s --posterior kron --integrator mc --draws 9 --head-only --format torch --dtype float16 --score {name} --name {name}"
        for name in choices(ExportOptions, "score")
    ),
    "evaluate s --bootstrap 5 --score all --integrator mc",
    "acquire s --pool test --by batchbald --batch 3 --samples 8",
    *(f"acquire s --pool test --by {rule} --batch 3 --posterior diag" for rule in ("entropy", "margin", "random")),
    "acquire m.pt --pool val --batch 2 --posterior some --samples 8",
    "diagnose s --draws 16 --posterior laplace --posterior refine",
    "report s --posterior laplace --posterior refine --posterior hmc",
    "extract-features v --from-npz labels.npz --ood far --task multilabel",
    "fit-laplace v --prior-precision val --structure full",
    "fit-laplace v --prior-mean checkpoint --structure full --name about",
    "fit-laplace v --fit-on train+val --prior-mean checkpoint --structure full --name folded",
    "fit-laplace v --fit-on val --prior-precision 5 --structure full --name of-val",
    "predict v --posterior folded --integrator probit --split val",
    "hmc v --base about --chains 2 --warmup 6 --draws 8 --name about-hmc",
    f"refine v --flow radial {SMALL}",
    "hmc v --chains 2 --warmup 6 --draws 8",
    "hmc v --chains 2 --warmup 6 --draws 8 --seed 1 --name again --shards 4 --spread examples",
    "hmc v --chains 8 --warmup 6 --draws 8 --seed 1 --name grouped --shards 4 --spread chains",
    "merge v --posterior hmc --posterior again",
    "fit-lbbnn v --epochs 2 --batch-size 8 --slab-sd 1",
    "predict v --integrator all --samples 6 --posterior laplace --split test",
    "predict v --samples 6 --posterior refine --posterior hmc --posterior lbbnn --split test",
    "auto s --criterion nll",
    "sbc s --simulations 20 --draws 9 --posterior laplace --truth hmc",
    "sbc s --simulations 20 --draws 9 --posterior sghmc",
    "sbc s --simulations 20 --draws 9 --posterior whole-sghmc",
    "sbc s --simulations 20 --draws 9 --posterior l-mnf",
    "integrals --mean 1,2,0 --variance 1,1,1 --samples 9",
    "integrals --grid-size 2 --samples 9",
)


# Values of options that no line has, and why.
WITHOUT_LINE = {
    ("hmc", "--sampler", "nuts"): "Pyro's own, slow, and not for a pretend device",
    ("extract-features", "--autocast", "bf16"): "torch.autocast asks the driver itself what the device can do",
    ("extract-features", "--autocast", "fp16"): "as bf16",
    **{
        ("extract-features", "--background", name): "of image files, which are decoded on the CPU"
        for name in ("white", "black")
    },
    ("refine", "--scale", "kron"): "what affine does without --scale",
    ("train", "--autocast", "bf16"): "as that of extract-features",
    ("train", "--recipe", "wrn-16-4-cifar"): "large; every setting of it is in a line",
    ("train", "--recipe", "resnet20-cifar"): "as that",
    **{("acquire", "--integrator", name): "predicts as predict does" for name in registry.names("integrators")},
    ("export", "--format", "pt2"): "the graph is made on the CPU, and not by a pretend device's operators",
    **{
        ("report", "--figure-format", form): "files of the page's figures, drawn of numbers"
        for form in choices(ReportOptions, "figure_format")
    },
    ("fit-calibration", "--map", "temperature"): "what fit-temperature does",
    ("fit-lbbnn", "--variance", "exact"): "what lrt and mnf do without --variance",
}
LEFT_OUT = {
    "calibrate": "counts and sorts on the CPU",
    "monitor": "as calibrate",
    "demo": "runs other commands, for a minute",
    "reproduce": "as demo",
}


NETWORK = """
import torch
def make():
    layers = torch.nn.Conv2d(1, 2, 5, stride=4), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(72, 3)
    return torch.nn.Sequential(*layers)
"""


def make_arrays(num_outputs: int) -> dict[str, np.ndarray]:
    """A head and what it nearly says."""
    generator = np.random.default_rng(1)
    weight, bias = (generator.normal(size=size).astype(np.float32) for size in ((num_outputs, 4), num_outputs))
    arrays: dict[str, np.ndarray] = {"head_weight": weight, "head_bias": bias}
    for split, count in (("train", 36), ("val", 20), ("test", 12), ("far", 6)):
        features = generator.normal(size=(count, 4)).astype(np.float32)
        logits = features @ weight.T + bias + generator.normal(size=(count, num_outputs))
        arrays[f"features_{split}"] = features
        arrays[f"labels_{split}"] = (logits[:, 0] > 0).astype(np.int64) if num_outputs == 1 else logits.argmax(1)
    return arrays


def label_sets(classes: np.ndarray) -> np.ndarray:
    """Zeros and ones (N, 3) with one, two or three ones a row, of classes (N,) below 3."""
    return (np.arange(3) <= classes[:, None]).astype(np.uint8)


def make_inputs(folder: Path) -> None:
    """The files that the lines read."""
    arrays = make_arrays(3)
    np.savez(folder / "features.npz", **arrays)
    np.savez(folder / "binary.npz", **make_arrays(1))
    several = {name: label_sets(array) for name, array in arrays.items() if name.startswith("labels")}
    np.savez(folder / "labels.npz", **(arrays | several))
    np.savez(folder / "raw.npz", x=arrays["features_train"], y=arrays["labels_train"])
    np.savez(folder / "pair.npz", x=arrays["features_train"], y=arrays["labels_train"] % 2)
    np.savez(folder / "several.npz", x=arrays["features_train"], y=several["labels_train"])
    images = np.random.default_rng(2).integers(0, 256, (36, 28, 28), dtype=np.uint8)
    np.savez(folder / "images.npz", x=images, y=arrays["labels_train"])
    (folder / "file-net.py").write_text(NETWORK)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name in ("m.pt", "n.pt"):
            torch.save(mlp.build(inputs=4, hidden=(3,), classes=3).state_dict(), folder / name)


def is_of_networks(line: str) -> bool:
    """Whether a line trains a network, or works on one: the long run has these."""
    return line.startswith("train") or " m.pt" in line


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
        for module in (latent_fit, refine, fit_lbbnn, sghmc, swag, vi):
            assert module.on_device is random.on_device  # type: ignore[attr-defined]
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


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.long) for name in ("heads", "networks")])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    lines = [line for line in LINES if is_of_networks(line) == (request.param == "networks")]
    folders = [tmp_path_factory.mktemp(name) for name in ("cpu", "gpu")]
    done = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(export, "_SECONDS", 0.0)  # no time of a pretend device says anything
        monkeypatch.setattr(export, "_MOST_SECONDS", 0.0)
        for folder in folders:
            make_inputs(folder)
        monkeypatch.chdir(folders[0])
        with as_on_a_gpu(monkeypatch):
            plain = [run_line(line, "cpu") for line in lines]
        monkeypatch.chdir(folders[1])
        with pretend_cuda.pretend() as gpu:
            for line in lines:
                before = counts(gpu)
                one = run_line(line, "cuda")
                done.append(replace(one, counts=tuple((counts(gpu) - before).tolist())))
    return Both(*folders, gpu, done, plain)


def captured(work: Callable[[], object], *generators: torch.Generator) -> torch.cuda.CUDAGraph:
    """The graph of some work."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        work()
    return graph


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


FAULTS: dict[str, Callable[[], object]] = {
    "mixes: add with CPU [(3,)]": lambda: on_gpu(3) + torch.ones(3),
    "mixes: index_put_ with CPU [(2,)]": lambda: on_gpu(3).index_put_((torch.arange(2).to("cuda"),), torch.ones(2)),
    "errors: numpy of a CUDA tensor": lambda: on_gpu(3).numpy(),
    "errors: randn on cuda with a generator on cpu": lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
    "capture_problems: sync, _local_scalar_dense": lambda: captured(lambda: on_gpu(3).sum().item()),
    "capture_problems: sync, index by a mask": lambda: captured(lambda: on_gpu(3)[on_gpu(3) > 0]),
    "capture_problems: copy from the CPU": lambda: captured(lambda: on_gpu(3).copy_(torch.ones(3))),
    "capture_problems: unregistered generator, randn": lambda: captured(
        lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda"))
    ),
    "nondeterministic: cumsum": lambda: on_gpu(3).cumsum(0),
    "nondeterministic: index_add_": lambda: on_gpu(3).index_add_(
        0, torch.zeros(2, dtype=torch.int64).to("cuda"), on_gpu(2)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_pretend_device_tells_each_kind_of_fault(fault: str) -> None:
    with pretend_cuda.pretend(registers_lazily=False) as gpu, suppress(TypeError, RuntimeError):
        FAULTS[fault]()
    assert fault in {line.split(" @")[0] for line in gpu.problems()}


def test_the_pretend_device_counts_waits_and_bytes() -> None:
    with pretend_cuda.pretend() as gpu:
        pinned = torch.ones(5).pin_memory()
        x = pinned.to("cuda", non_blocking=True)
        assert (gpu.num_syncs, gpu.uploads.total(), gpu.downloads.total()) == (0, 20, 0)
        x.cpu()
        torch.ones(5).to("cuda")
        torch.linalg.cholesky(torch.eye(2, device="cuda"))
        x[0] = torch.zeros(1)[0]
        assert (gpu.num_syncs, gpu.uploads.total(), gpu.downloads.total()) == (4, 44, 20)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            bool(x.sum() > 0)


def test_a_replay_does_what_the_capture_did_not() -> None:
    with pretend_cuda.pretend(registers_lazily=False) as gpu:
        generator, total = torch.Generator("cuda").manual_seed(0), torch.zeros(2, device="cuda")
        graph = captured(lambda: total.add_(torch.randn(2, device="cuda", generator=generator)), generator)
        assert torch.equal(total.cpu(), torch.zeros(2))
        for _ in range(3):
            graph.replay()
        found = total.cpu()
    plain = torch.Generator().manual_seed(0)
    torch.testing.assert_close(found, sum(torch.randn(2, generator=plain) for _ in range(3)))
    assert (gpu.problems(), gpu.num_captures, gpu.num_replays) == ([], 1, 3)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda value: value + 0 * value.sum().item(), "capture_problems: sync, _local_scalar_dense"),
        (lambda value: value + torch.zeros(value.shape), "mixes: add with CPU"),
    ],
)
def test_a_fault_in_a_training_step_is_told_with_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Callable[[torch.Tensor], Any], told: str
) -> None:
    plain = LastLayerTarget.log_prior
    monkeypatch.setattr(LastLayerTarget, "log_prior", lambda *arguments: fault(plain(*arguments)))
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    with pretend_cuda.pretend() as gpu:
        for line in (EXTRACT, LAPLACE, f"refine s --flow radial --batch-size 8 {SMALL}"):
            run_line(line, "cuda")
    assert any(line.startswith(told) and "< targets/target.py" in line for line in gpu.problems()), gpu.problems()


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        ({"capture_error": RuntimeError("not permitted")}, 0, "one at a time, which is slower"),
        ({"capture_error": torch.OutOfMemoryError("CUDA out of memory")}, 69, "out of memory"),
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        "refine s --flow radial --batch-size 8 --epochs 2",
        "fit-lbbnn s --batch-size 8 --slab-sd 1 --epochs 2",
        "hmc s --chains 2 --warmup 3 --draws 4",
    ],
)
def test_a_capture_that_fails_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, failure: dict[str, Any], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    with pretend_cuda.pretend(**failure):
        for first in (EXTRACT, LAPLACE):
            assert run_line(first, "cuda").code == 0
        done = run_line(line, "cuda")
    assert done.code == code
    assert done.stderr.count(said) == 1, done.stderr


def test_every_command_that_takes_a_device_has_a_line() -> None:
    named = {command.name for command in own_commands() if ComputeOptions in command.groups}
    assert named - {line.split()[0] for line in LINES} == set(LEFT_OUT)


def values_to_cover(command: Command) -> set[tuple[str, str, str]]:
    """Command, option and value, of every option with choices; one value may be the default of a line without the option."""
    own = [group for group in command.groups if group not in (CommonOptions, ComputeOptions)]
    specs = [spec for group in own for spec, _ in map_options(group).values() if spec.name not in ("metric",)]
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
    commands = [
        command for command in own_commands() if ComputeOptions in command.groups and command.name not in LEFT_OUT
    ]
    wanted = set().union(*map(values_to_cover, commands))
    assert wanted - set().union(*map(covered_by, LINES)) == set(WITHOUT_LINE)


def test_every_line_runs_as_on_the_cpu_without_anything_a_gpu_refuses(both: Both) -> None:
    for one, plain in zip(both.done, both.plain, strict=True):
        assert one.code == plain.code == 0, (one, plain)
    assert both.device.problems() == [], "\n".join(both.device.problems())


def test_every_line_computes_on_the_device_and_steps_replay_graphs(both: Both) -> None:
    for one in both.done:
        kernels, captures, replays = one.counts
        assert kernels > 0 or "--from-npz" in one.line, one.line
        is_network = "--layers" in one.line  # whose steps are not captured
        if not is_network and ("--batch-size" in one.line or one.line.startswith("hmc")):
            assert replays >= captures >= 1, one.line


def test_every_artifact_is_the_cpus(both: Both) -> None:
    runs = [folder.relative_to(both.cpu) for folder in both.cpu.glob("*.bnn/[a-z]*")]
    names = [path.relative_to(both.cpu) for run in runs for path in (both.cpu / run).rglob("*") if path.is_file()]
    differing = [str(name) for name in names if not is_same(both.cpu / name, both.gpu / name)]
    assert len(names) > 30
    assert differing == []


def is_same(ours: Path, theirs: Path) -> bool:
    """Whether two artifacts have one digest, or numbers that differ by rounding."""
    if ours.suffix == ".py":  # the module beside a file of tensors
        return ours.read_text() == theirs.read_text()
    headers = [read_header(path) for path in (ours, theirs)]
    return headers[0].content_digest == headers[1].content_digest or is_close(*(header.meta for header in headers))


def is_close(ours: Any, theirs: Any) -> bool:
    """Whether two documents differ by rounding alone."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(is_close(part, theirs[name]) for name, part in ours.items())
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(is_close, ours, theirs))
    if isinstance(ours, float):
        return math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-6)
    return bool(ours == theirs)
