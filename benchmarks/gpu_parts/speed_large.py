"""Times on wide heads: a binary one's full Hessian, one of a thousand classes, and ImageNet's, resident and streamed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from machine import Work, best_of, covariance_work, curvature_work, gradient_work
from torch import Tensor

from bnncli.curvature import ggn
from bnncli.inference.prior_precision import search
from bnncli.numerics.seeds import stream
from bnncli.targets.coarse_gradient import CoarseGradient
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.theta.head import HeadLayout
from bnncli.theta.prior import Prior
from gpu_parts.floors import BUS, product_rates

if TYPE_CHECKING:
    from gpu_parts.speed import Clock

CHAINS = 16  # of hmc, whose gradients come all at once
CANDIDATES, PRODUCTS = 18, 30  # of a search with Kronecker factors, and products with the Hessian for each mode
STREAMED = 1.3  # times the resident pass
PRIOR_PRECISION = 100.0


def measure_wide(clock: Clock, num_examples: int, num_features: int, num_outputs: int) -> None:
    """The full Hessian of many features and few outputs."""
    target = _target(clock.device, num_examples, HeadLayout(num_outputs, num_features))
    theta = torch.zeros(target.layout.num_params, dtype=torch.float64, device=clock.device)
    work = curvature_work("full", num_examples, target.layout)
    name = f"full Hessian, N {num_examples}, D {num_features}, {num_outputs} outputs"
    clock.job(name, work, lambda: ggn(target, theta, "full"), most=0.05)


def measure_resnet(clock: Clock, num_examples: int, num_features: int, num_outputs: int) -> None:
    """One gradient of all chains, one product with the Hessian, and the search for the prior with Kronecker factors."""
    layout = HeadLayout(num_outputs, num_features)
    name = f"N {num_examples}, D {num_features}, K {num_outputs}"

    def gradient() -> None:
        target = _target(clock.device, num_examples, layout)
        theta = _theta(CHAINS, layout, clock.device)
        work = gradient_work(num_examples, layout, draws=CHAINS)
        clock.job(f"gradient of {CHAINS} chains, {name}", work, lambda: target.log_joint_and_grad(theta), most=0.17)
        _time_coarse(clock, target, theta, f"{CHAINS} chains, {name}")

    def product() -> None:
        target = _target(clock.device, num_examples, layout)
        multiply = target.hessian_operator(_theta(1, layout, clock.device)[0])
        vector = _theta(1, layout, clock.device)
        work = _product_work(num_examples, layout)
        clock.job(f"product with the Hessian, {name}", work, lambda: multiply(vector), most=0.01)

    def searching() -> None:
        target = _target(clock.device, num_examples, layout)
        val = _target(clock.device, max(50, num_examples // 10), layout)
        each = (
            gradient_work(num_examples, layout, is_double=True)
            .times(3)
            .plus(_product_work(num_examples, layout).times(PRODUCTS))
        )
        factors = curvature_work("kron", num_examples, layout).plus(covariance_work("kron", layout))
        start = torch.zeros(layout.num_params, dtype=torch.float64, device=clock.device)
        clock.job(
            f"search of the prior, kron, {name}", each.plus(factors).times(CANDIDATES),
            lambda: search(
                target, start=start, generator=stream(0, "bench/search"), structure="kron", bounds=(1.0, 1e4),
                held_out=target.held_out(val.features, val.labels),
            ), most=15.0, repeats=1,
        )  # fmt: skip

    for job in (gradient, product, searching):
        clock.ledger.item(f"ResNet head, {job.__name__}", job)


def measure_imagenet(clock: Clock, num_examples: int, num_features: int, num_outputs: int) -> None:
    """One gradient and one product, and a pass over features in the CPU's memory against one over resident ones."""
    layout = HeadLayout(num_outputs, num_features)
    name = f"N {num_examples}, D {num_features}, K {num_outputs}"
    resident = _target(clock.device, num_examples, layout)
    theta = _theta(CHAINS, layout, clock.device)
    one = gradient_work(num_examples, layout)
    clock.job(f"gradient, {name}", one, lambda: resident.log_joint_and_grad(theta[:1]), most=None, repeats=2)
    _time_product(clock, resident, theta, name)
    passes = {}
    for where in ("resident", "streamed"):
        features = resident.features if where == "resident" else resident.features.cpu()
        target = LastLayerTarget(features, resident.labels, layout, resident.prior)
        run = partial(target.log_joint_and_grad, theta)
        passes[where], _ = best_of(run, clock.device, repeats=1 if clock.is_quick else 2)
        work = gradient_work(num_examples, layout, draws=CHAINS)
        clock.tell(f"gradient of {CHAINS} chains, {where}, {name}", passes[where], work, most=None)
    bus = features.nbytes / BUS
    ratio = passes["streamed"] / passes["resident"]
    if clock.limits_hold:
        clock.ledger.check("streamed pass, of the resident one", ratio, STREAMED, bus_seconds=bus)
    else:
        clock.ledger.note("streamed pass, of the resident one", f"{ratio:.3g}", bus_seconds=bus)


def _time_coarse(clock: Clock, target: LastLayerTarget, theta: Tensor, name: str) -> None:
    """The gradients of `hmc --gradients`, each beside a floor at the rate of its own products."""
    for precision, rate in product_rates(clock.device, clock.rates, is_quick=clock.is_quick).items():
        coarse = CoarseGradient.about(target, torch.zeros_like(theta[0], dtype=torch.float64), precision)
        work = gradient_work(target.num_examples, target.layout, draws=len(theta))
        rated = work._replace(flops32=work.flops32 * clock.rates.flops32 / rate)
        clock.job(f"{precision} gradient of {name}", rated, partial(coarse, theta), most=None)


def _time_product(clock: Clock, target: LastLayerTarget, theta: Tensor, name: str) -> None:
    """The probabilities that it keeps go with it."""
    multiply = target.hessian_operator(theta[0])
    work = _product_work(target.num_examples, target.layout)
    clock.job(f"product with the Hessian, {name}", work, lambda: multiply(theta[:1]), most=None, repeats=2)


def _product_work(num_examples: int, layout: HeadLayout) -> Work:
    """Logits of the vector, and its weighted sums; the probabilities are kept."""
    once = gradient_work(num_examples, layout)
    return Work(flops32=once.flops32, bytes=once.bytes + 4.0 * num_examples * layout.num_outputs)


def _theta(count: int, layout: HeadLayout, device: torch.device) -> Tensor:
    """(S, P) float64."""
    generator = torch.Generator(device).manual_seed(0)
    return 0.01 * torch.randn(count, layout.num_params, generator=generator, dtype=torch.float64, device=device)


def _target(device: torch.device, num_examples: int, layout: HeadLayout) -> LastLayerTarget:
    """Rectified normal features and the labels of a random head, made on the device a block at a time."""
    generator = torch.Generator(device).manual_seed(0)
    features = torch.empty(num_examples, layout.num_features, device=device)
    labels = torch.empty(num_examples, dtype=torch.int64, device=device)
    weight = 3 * torch.randn(layout.num_features, layout.num_classes, generator=generator, device=device)
    weight /= layout.num_features**0.5
    for begin in range(0, num_examples, 2**14):
        rows = slice(begin, min(begin + 2**14, num_examples))
        block = features[rows].normal_(generator=generator).relu_()
        logits = block @ weight
        noise = torch.rand(logits.shape, generator=generator, device=device).clamp_(min=1e-9).log_().neg_().log_()
        labels[rows] = (logits - noise).argmax(dim=1)
    return LastLayerTarget(features, labels, layout, Prior(PRIOR_PRECISION))
