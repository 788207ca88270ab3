"""Step *network*: posteriors over all layers of ResNet-20 and WRN-16-4: the CPU's numbers, seconds, laplace-torch beside it.

ResNet-20 is the trained one where --checkpoints has it, WRN-16-4 has random weights and BatchNorm statistics of a few images.
The random columns that Kronecker factors of ten outputs are made of are drawn on the CPU, an example after the other, so that both
devices have the same ones however large their blocks are.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import theirs
import torch
from gpu_steps.bench import Bench
from gpu_steps.lines import Done, run_line
from machine import best_of, timed
from torch import Tensor, nn

from bnncli.artifacts.files import read_header
from bnncli.artifacts.samples import read_samples
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.integrators.probit import probit_probs
from bnncli.models.architectures.mlp import build as mlp
from bnncli.models.architectures.resnet20 import build as resnet20
from bnncli.models.architectures.wide_resnet import build as wide_resnet
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.structures.kron import LayerFactors, build_parts
from bnncli.structures.network_sums import matrices_of
from bnncli.targets.network import NetworkTarget

PRECISION = 100.0
# Of the commands: under 100 chains of ResNet-20 need steps of a thousandth of a standard deviation and hundreds of draws to warm up.
COMMANDS_PRECISION = 10_000
MEAN, SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the channels, that ResNet-20 was trained with
CHANNELS = f"--mean {','.join(map(str, MEAN))} --std {','.join(map(str, SD))}"
EVIDENCE = 1e-4  # of the log marginal likelihood
# Relative, Frobenius, of Kronecker factors and variances of logits, and of gradients. Rounding switches units that are near a kink:
# of 64 rows of WRN-16-4 float32 is 4e-4 from float64 on a CPU (the outputs' factor of block3.layer.0.conv1), of ResNet-20 1e-6.
RELATIVE, GRADIENTS = 1e-3, 1e-3
PROBABILITIES = 1e-4
STANDARD_ERRORS = 4.0
COMPARED = (64, 16)  # train and test rows on both devices: of (256, 64) four CPU cores took 72 s for WRN-16-4
TIMED = (512, 256)  # on the GPU alone
DRAWS, SPREAD = 4, 0.02  # theta whose gradients are compared, and their distance from the network's own
SETTLING = (4, 64)  # batches of images that BatchNorm statistics are made of, and their size
THEIR_BATCH = 64
# On a pretend device: the rule of vmap makes ones and zeros in C++, where their device is not seen.
FALSE_ALARMS = ("native_batch_norm with CPU", "native_batch_norm_backward with CPU")
# Of laplace-torch: of a fit, and of predictions, whose memory grows with the square of the batch (ResNet-20 on a CPU: 0.6 GiB of
# 4 rows, over 23 GiB of 32): the largest that has room.
FIT_BATCH = 64
PREDICTION_BATCHES = (16, 8, 4)


@dataclass(frozen=True)
class Case:
    """A network in evaluation mode on the CPU, its images and what is run on it.

    Args:
        model: words of extract-features that name it.
        train, test: images (N, 32, 32, 3) uint8.
        train_labels, test_labels: (N,).
        rows: of the training split of the run folder.
        lines: run there, after fit-laplace.
    """

    name: str
    model: str
    module: nn.Module
    train: np.ndarray
    test: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray
    rows: int
    lines: tuple[str, ...]

    def on(self, device: torch.device) -> nn.Module:
        """A copy there."""
        return copy.deepcopy(self.module).to(device)

    def target(self, device: torch.device, rows: int, pattern: str = "all") -> NetworkTarget:
        """The log posterior of the parameters that a pattern names, given the first rows."""
        inputs, labels = self.examples(device, rows)
        network = ModuleNetwork(self.on(device).requires_grad_(False))
        layout = ModuleLayout.of(network, pattern, num_outputs=10, input_shape=tuple(inputs.shape[1:]))
        return NetworkTarget(inputs, labels, layout, Prior(PRECISION))

    def examples(self, device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
        """The first training images as the network takes them (N, 3, 32, 32), and labels (N,)."""
        labels = torch.from_numpy(self.train_labels[:rows].astype(np.int64))
        return normalized(self.train[:rows]).to(device), labels.to(device)

    def held(self, device: torch.device, rows: int) -> Tensor:
        """The first test images."""
        return normalized(self.test[:rows]).to(device)


def run(bench: Bench) -> None:
    """Compare and time both networks, then laplace-torch, then the commands, those that take longest last."""
    found: list[Case] = []
    for make in (_mlp, _small_wide_resnet) if bench.is_quick else (_resnet20, _wide_resnet):
        bench.ledger.item(f"the network {make.__name__[1:]}", lambda make=make: found.append(make(bench)))  # type: ignore[misc]
    for name, work in (("on both devices", _compare), ("seconds", _time), ("laplace-torch", _beside_laplace_torch)):
        for case in found:
            bench.ledger.item(f"{case.name}: {name}", work, bench, case)
    for case in found:
        bench.ledger.item(f"{case.name}: commands", _run_commands, bench, case)


# The networks.


def _resnet20(bench: Bench) -> Case:
    images, module = _images(bench, 32), _seeded(resnet20)
    path = None if bench.checkpoints is None else bench.checkpoints / "resnet20-12fca82f.th"
    if path is not None and path.is_file():
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        module.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    else:
        bench.ledger.note("ResNet-20", "no resnet20-12fca82f.th in --checkpoints: random weights")
        _settle(module, images["x_train"])
    lines = (
        "refine FOLDER/run --layers all --subspace 20 --epochs 5 --batch-size 128 --num-draws 2 --elbo-draws 32",
        "hmc FOLDER/run --layers all --chains 4 --warmup 10 --draws 10",
    )
    return _case("ResNet-20", "--model resnet20", module.eval(), images, 256, lines)


def _wide_resnet(bench: Bench) -> Case:
    images, module = _images(bench, 32), _seeded(wide_resnet)
    _settle(module, images["x_train"])
    lines = (
        "refine FOLDER/run --layers all --subspace 20 --epochs 3 --batch-size 32 --num-draws 2 --elbo-draws 8",
        "hmc FOLDER/run --layers all --chains 2 --warmup 10 --draws 10",
    )
    return _case("WRN-16-4", "--model wide-resnet", module.eval(), images, 64, lines)


_QUICK_LINES = (
    "refine FOLDER/run --layers all --subspace 3 --epochs 2 --batch-size 8 --num-draws 2 --elbo-draws 8",
    "hmc FOLDER/run --layers all --chains 2 --warmup 4 --draws 4",
)


def _small_wide_resnet(bench: Bench) -> Case:
    images, module = _images(bench, 8), _seeded(lambda: wide_resnet(depth=10, width=1))
    _settle(module, images["x_train"])
    return _case("WRN-10-1", "--model wide-resnet", module.eval(), images, 16, _QUICK_LINES)


def _mlp(bench: Bench) -> Case:
    images, module = _images(bench, 4), _seeded(lambda: mlp(inputs=48, hidden=(6,)))
    return _case("MLP 48-6-10", "--model mlp", module.eval(), images, 16, _QUICK_LINES)


def _case(
    name: str, model: str, module: nn.Module, images: dict[str, np.ndarray], rows: int, lines: tuple[str, ...]
) -> Case:
    splits = images["x_train"], images["x_test"], images["y_train"], images["y_test"]
    return Case(name, model, module, *splits, rows, lines)


def _images(bench: Bench, side: int) -> dict[str, np.ndarray]:
    """x_train, y_train, x_test, y_test: of cifar10.npz, or random ones of a fixed seed where there is none."""
    path = None if bench.data is None else bench.data / "cifar10.npz"
    if path is not None and path.is_file() and side == 32:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    generator, found = np.random.default_rng(0), {}
    for split, count in (("train", 600), ("test", 300)):
        labels = generator.integers(10, size=count)
        shades = 40 + 18 * labels[:, None, None, None] + generator.normal(0, 40, (count, side, side, 3))
        found |= {f"x_{split}": shades.clip(0, 255).astype(np.uint8), f"y_{split}": labels}
    return found


def normalized(images: np.ndarray) -> Tensor:
    """Images (N, H, W, 3) uint8 as a network takes them, (N, 3, H, W) float32."""
    scaled = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return ((scaled - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(SD).view(3, 1, 1)).contiguous()


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def _settle(module: nn.Module, images: np.ndarray) -> None:
    """Make BatchNorm statistics the averages of a few batches."""
    norms = [one for one in module.modules() if isinstance(one, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the average of all batches
    count, size = SETTLING
    module.train()
    with torch.no_grad():
        for batch in normalized(images[: count * size]).split(size):
            module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


# The Kronecker factors and the linearised predictions, on both devices.


@dataclass(frozen=True)
class Numbers:
    """What a fit comes to, on the CPU.

    Args:
        factors: Kronecker factors by layer, and the diagonal of the rest.
        evidence: the log marginal likelihood as laplace-torch defines it, nats.
        variances: of the logits, (M, K).
        probabilities: of the linearised probit predictive, (M, K).
        gradients: of the log joint at several theta, (S, P).
    """

    factors: dict[str, Tensor]
    evidence: float
    variances: Tensor
    probabilities: Tensor
    gradients: Tensor


def _compare(bench: Bench, case: Case) -> None:
    gpu, ledger = bench.gpu, bench.ledger
    gpu.problems()
    seconds, ours = timed(lambda: _numbers(bench, case, gpu.device), gpu.device)
    _agree_on_device(bench, case.name)
    cpu_seconds, expected = timed(lambda: _numbers(bench, case, torch.device("cpu")), torch.device("cpu"))
    name = f"{case.name}, GPU and CPU"
    ledger.note(f"{name}, {_rows(bench, COMPARED)[0]} rows, with warm-up", f"{seconds:.3g} s and {cpu_seconds:.3g} s",
                gpu=seconds, cpu=cpu_seconds)  # fmt: skip
    ledger.agree(f"{name}, the same layers", ours.factors.keys() == expected.factors.keys())
    errors = {
        layer: _relative(ours.factors[layer], factor) for layer, factor in expected.factors.items() if factor.numel()
    }
    worst = max(errors, key=lambda layer: errors[layer] if math.isfinite(errors[layer]) else math.inf)
    ledger.check(f"{name}, Kronecker factors, relative error of the worst", errors[worst], RELATIVE, layer=worst)
    apart = abs(ours.evidence - expected.evidence) / abs(expected.evidence)
    ledger.check(f"{name}, log marginal likelihood, relative", apart, EVIDENCE, cpu=expected.evidence)
    ledger.check(f"{name}, variances of logits, relative", _relative(ours.variances, expected.variances), RELATIVE)
    ledger.check(
        f"{name}, gradients at {DRAWS} theta, relative", _relative(ours.gradients, expected.gradients), GRADIENTS
    )
    apart = float((ours.probabilities - expected.probabilities).abs().max())
    largest = float(expected.probabilities.max())
    ledger.check(f"{name}, probabilities", apart, PROBABILITIES, largest=largest)


def _agree_on_device(bench: Bench, name: str) -> None:
    """Check that nothing since the last call mixed devices; a real GPU refuses by itself."""
    problems = [text for text in bench.gpu.problems() if not text.startswith(FALSE_ALARMS)]
    bench.ledger.agree(f"{name}: one device", not problems, "; ".join(problems))


def _numbers(bench: Bench, case: Case, device: torch.device) -> Numbers:
    rows, held = _rows(bench, COMPARED)
    target = case.target(device, rows)
    start = target.layout.trained()
    made = LayerFactors.of(target, start)
    bases = made.bases()
    hessian = build_parts("kron", made, bases, {name: basis.values for name, basis in bases.items()})
    factors = {f"{name}, inputs": factor.total for name, factor in made.features.items()}
    factors |= {f"{name}, outputs": factor.total for name, factor in made.outputs.items()} | {"the rest": made.rest}
    fit = fit_gaussian(target, start=start, structure="kron", center="checkpoint", hessian=hessian)
    mean, variance = fit.gaussian.logit_marginals(case.held(device, held))
    noise = torch.randn(DRAWS, target.layout.num_params, generator=torch.Generator().manual_seed(0))
    theta = start + SPREAD * noise.to(device)  # as chains and flows have them, several together
    gradients = case.target(device, held).log_joint_and_grad(theta)[1]
    return Numbers(
        {name: factor.cpu() for name, factor in factors.items()},
        _evidence(target, fit),
        variance.cpu().double(),
        probit_probs(mean, variance).cpu().double(),
        gradients.cpu(),
    )


def _fitted(target: NetworkTarget) -> LaplaceFit:
    return fit_gaussian(target, start=target.layout.trained(), structure="kron", center="checkpoint")


def _evidence(target: NetworkTarget, fit: LaplaceFit) -> float:
    """What laplace-torch calls the log marginal likelihood, the mode taken to be at the network's weights."""
    covariance = fit.gaussian.covariance
    log_joint = float(target.with_prior(fit.gaussian.require_prior()).log_joint(fit.gaussian.mean.unsqueeze(0)))
    return log_joint + 0.5 * covariance.num_params * math.log(2 * math.pi) + covariance.log_det_scale()


def _relative(one: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference, of the expected one's."""
    return float((one - expected).norm() / expected.norm())


def _rows(bench: Bench, rows: tuple[int, int]) -> tuple[int, int]:
    return (12, 5) if bench.is_quick else rows


# Seconds on the GPU, and laplace-torch's.


def _time(bench: Bench, case: Case) -> None:
    """A fit and its parts, and linearised predictions."""
    rows, held = _rows(bench, TIMED)
    target, inputs = case.target(bench.gpu.device, rows), case.held(bench.gpu.device, held)
    start = target.layout.trained()
    name = f"{case.name}, {target.layout.num_params:,} parameters"
    _note_seconds(bench, f"{name}, Kronecker factors of {rows} rows", lambda: LayerFactors.of(target, start))
    _note_seconds(bench, f"{name}, factors and eigenvectors", lambda: ggn(target, start, "kron"))
    fit = _note_seconds(bench, f"{name}, kron fit of {rows} rows", lambda: _fitted(target))
    _note_seconds(bench, f"{name}, probit of {held} rows", lambda: _probit(fit, inputs))
    for what, work in (("fit", lambda: _fitted(target)), ("probit", lambda: _probit(fit, inputs))):
        with bench.gpu.counted() as counts:
            work()
        peak = bench.gpu.peak(work)
        text = f"the host waits {counts.syncs} times" + ("" if peak is None else f", {peak / 2**20:.0f} MiB")
        bench.ledger.note(f"{name}, {what}", text, syncs=counts.syncs, peak=peak)


def _probit(fit: LaplaceFit, inputs: Tensor) -> Tensor:
    return probit_probs(*fit.gaussian.logit_marginals(inputs))


def _note_seconds(bench: Bench, what: str, work: Callable[[], Any]) -> Any:
    seconds, result = best_of(work, bench.gpu.device, repeats=1 if bench.is_quick else 2)
    bench.ledger.note(f"{what}, seconds", f"{seconds:.3g}", seconds=seconds)
    return result


def _beside_laplace_torch(bench: Bench, case: Case) -> None:
    """Fit and predict the same rows over the weights of linear layers and convolutions, all that its Kronecker factors know."""
    problem = theirs.laplace_torch_problem()
    if problem or bench.gpu.is_pretend:
        bench.ledger.note(
            f"{case.name}, laplace-torch", "left out: " + (problem or "it is not tried on a pretend device")
        )
        return
    device, (rows, held) = bench.gpu.device, _rows(bench, TIMED)
    every = case.target(device, 1).layout
    named = {part.name for matrix in matrices_of(every) for part in matrix.parts}
    target, inputs = case.target(device, rows, "+".join(sorted(named))), case.held(device, held)
    module = case.on(device)
    for name, value in module.named_parameters():
        value.requires_grad_(name in named)
    name = f"{case.name}, {target.layout.num_params:,} weights"
    fit, their = _both(
        bench, f"{name}, kron fit of {rows} rows", lambda: _fitted(target), lambda: _their_fit(module, target)
    )
    evidences = _evidence(target, fit), float(their.log_marginal_likelihood())
    bench.ledger.note(f"{name}, log marginal likelihood", f"ours {evidences[0]:.6g}, laplace-torch {evidences[1]:.6g}",
                      ours=evidences[0], theirs=evidences[1])  # fmt: skip
    for size in PREDICTION_BATCHES:
        what = f"{name}, probit of {held} rows, theirs in batches of {size}"
        try:
            one, other = _both(
                bench, what, lambda: _probit(fit, inputs), lambda size=size: _their_probit(their, inputs, size)
            )  # type: ignore[misc]
        except torch.OutOfMemoryError as error:
            bench.ledger.note(what, f"out of memory: {' '.join(str(error).split())[:120]}")
            continue
        apart = float((one.double() - other.double()).abs().max())
        bench.ledger.note(f"{name}, largest difference of a probability", f"{apart:.3g}", apart=apart)
        return


def _both(bench: Bench, what: str, ours: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of both, whose seconds and their ratio are noted."""
    (seconds, one), (their_seconds, two) = (best_of(work, bench.gpu.device, repeats=2) for work in (ours, other))
    ratio = their_seconds / seconds
    text = f"ours {seconds:.3g} s, laplace-torch {their_seconds:.3g} s, {ratio:.3g} times as long"
    bench.ledger.note(what, text, ours=seconds, theirs=their_seconds, ratio=ratio)
    return one, two


def _their_fit(module: nn.Module, target: NetworkTarget) -> Any:
    """By laplace-torch with its default backend: whole batches by index, the fastest loader there is."""
    from laplace import Laplace
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    data = TensorDataset(target.inputs, target.labels)
    loader = DataLoader(
        data, sampler=BatchSampler(SequentialSampler(data), FIT_BATCH, drop_last=False), batch_size=None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = Laplace(
            module, "classification", subset_of_weights="all", hessian_structure="kron", prior_precision=PRECISION
        )
        fit.fit(loader)
    return fit


def _their_probit(fit: Any, inputs: Tensor, size: int) -> Tensor:
    parts = [fit(rows, pred_type="glm", link_approx="probit").detach() for rows in inputs.split(size)]
    return torch.cat(parts)


# The commands.


def _run_commands(bench: Bench, case: Case) -> None:
    """Fit, refine and sample over all layers in a run folder."""
    folder = bench.folder / case.name.replace(" ", "-")
    folder.mkdir()
    torch.save(case.module.state_dict(), folder / "run")
    rows, held = case.rows, case.rows // 2
    splits = {"x_train": case.train[:rows], "y_train": case.train_labels[:rows],
              "x_val": case.test[:held], "y_val": case.test_labels[:held]}  # fmt: skip
    np.savez(folder / "images.npz", **splits)  # type: ignore[arg-type]
    data = " ".join(f"--data {name}=npz:FOLDER/images.npz:x_{name},y_{name}" for name in ("train", "val"))
    fit = f"fit-laplace FOLDER/run --layers all --structure kron --prior-precision {COMMANDS_PRECISION}"
    for line in (f"extract-features FOLDER/run {case.model} {CHANNELS} {data}", fit):
        _done(bench, case, line, folder)
    refine, sample = case.lines
    bench.ledger.item(f"{case.name}: refine", _refine, bench, case, refine, folder)
    bench.ledger.item(f"{case.name}: hmc", _sample, bench, case, sample, folder)


def _done(bench: Bench, case: Case, line: str, folder: Path) -> Done:
    """Run a line on the GPU. Raises RuntimeError where it fails."""
    gpu, name = bench.gpu, f"{case.name}, {line.split()[0]}"
    gpu.problems()
    done = run_line(line, folder, gpu.name)
    if done.code != 0:
        raise RuntimeError(f"{line}: {done.failure}")
    _agree_on_device(bench, name)
    bench.ledger.note(f"{name}, seconds", f"{done.seconds:.3g}", seconds=done.seconds, line=line)
    return done


def _refine(bench: Bench, case: Case, line: str, folder: Path) -> None:
    done = _done(bench, case, line, folder)
    (path,) = (folder / path for path in done.digests)
    metrics = read_header(path).meta["metrics"]
    gain, after = metrics["elbo_gain"], metrics["elbo_after"]
    errors = gain["value"] / max(1e-12, gain["standard_error"])
    bench.ledger.check(f"{case.name}, refine, gain of the ELBO in standard errors", errors, math.inf,
                       least=-STANDARD_ERRORS, gain=gain["value"], after=after["value"])  # fmt: skip


def _sample(bench: Bench, case: Case, line: str, folder: Path) -> None:
    done = _done(bench, case, line, folder)
    (path,) = (folder / path for path in done.digests)
    samples = read_samples(path)
    assert samples.theta is not None
    values = {"draws": samples.theta, "log joints": samples.stats["lp"]}
    for name, numbers in values.items():
        is_finite = bool(np.isfinite(numbers).all())
        bench.ledger.agree(f"{case.name}, hmc, {name} {numbers.shape} are finite", is_finite)
    metrics = read_header(path).meta["metrics"]
    known = {name: metrics[name] for name in ("acceptance_rate", "divergences", "step_size", "mean_steps")}
    bench.ledger.note(f"{case.name}, hmc", ", ".join(f"{name} {value:.3g}" for name, value in known.items()), **known)
