"""Step *wide*: full covariances of wide heads: 25,700 parameters at once, 64,100 by rows, and a binary head's Hessian."""

from __future__ import annotations

import torch
from gpu_steps.bench import Bench, Clock
from gpu_steps.heads import made_target
from machine import covariance_work, curvature_work
from torch import Tensor

from bnncli.inference.mode import covariance_at
from bnncli.parameters.layouts import HeadLayout
from bnncli.structures import ggn
from bnncli.structures.full import Full, from_rows
from bnncli.system.memory import bytes_text

NUM_EXAMPLES = 50_000
WHOLE, BY_ROWS = HeadLayout(100, 256), HeadLayout(100, 640)  # 25,700 and 64,100 parameters
BINARY = (60_000, 2048)
PROBES = 4
INVERSE = 1e-4  # error of L L^T (H + Lambda) z, of z: products with H have float32 digits


def run(bench: Bench) -> None:
    """Make the covariances, and hold each against its precision."""
    clock = bench.clock()
    small = bench.is_quick
    for outputs in (1, 2):
        bench.ledger.item(
            f"binary Hessian, {outputs} outputs", _time_hessian, clock, HeadLayout(outputs, 20 if small else BINARY[1])
        )
    bench.ledger.item("full covariance", _time_whole, clock, HeadLayout(4, 20) if small else WHOLE)
    bench.ledger.item("full covariance by rows", _time_rows, clock, HeadLayout(4, 40) if small else BY_ROWS)


def _time_hessian(clock: Clock, layout: HeadLayout) -> None:
    count = 200 if clock.bench.is_quick else BINARY[0]
    target = made_target(clock.device, count, layout)
    theta = _zeros(layout, clock.device)
    name = f"full Hessian, N {count}, D {layout.num_features}, {layout.num_outputs} outputs"
    clock.job(name, curvature_work("full", count, layout), lambda: ggn(target, theta, "full"), most=0.05)


def _time_whole(clock: Clock, layout: HeadLayout) -> None:
    """What fit-laplace --structure full does at the mode: the Hessian, then its inverse's root."""
    count = 300 if clock.bench.is_quick else NUM_EXAMPLES
    target, theta = made_target(clock.device, count, layout), _zeros(layout, clock.device)
    work = curvature_work("full", count, layout).plus(covariance_work("full", layout))
    name = f"full covariance of {layout.num_params} parameters, N {count}"
    found = clock.job(name, work, lambda: covariance_at(target, theta, "full"), most=3.0, repeats=2)
    precision = found.hessian["hessian.full"]
    vectors = _probes(layout, clock.device)
    products = vectors @ precision + target.prior.diagonal(layout, device=clock.device) * vectors
    _check_inverse(clock, found.covariance, products, vectors, layout)


def _time_rows(clock: Clock, layout: HeadLayout) -> None:
    """The Hessian is never whole: the root is made panel by panel from its rows."""
    count = 300 if clock.bench.is_quick else NUM_EXAMPLES
    target, theta = made_target(clock.device, count, layout), _zeros(layout, clock.device)
    work = curvature_work("full", count, layout).plus(covariance_work("full", layout))
    diagonal = target.prior.diagonal(layout, device=clock.device).double()
    kept: list[Full] = []

    def make() -> None:
        kept.clear()
        rows = target.curvature("full").rows(target, theta)  # type: ignore[attr-defined]
        kept.append(from_rows(rows, diagonal, mean=float(diagonal.mean())))

    name = f"full covariance by rows of {layout.num_params} parameters, N {count}"
    if clock.bench.gpu.is_pretend:
        clock.job(name, work, make, most=None, repeats=1)
    else:
        torch.cuda.reset_peak_memory_stats(clock.device)
        clock.job(name, work, make, most=None, repeats=1)
        peak = torch.cuda.max_memory_allocated(clock.device)
        matrix = 8 * layout.num_params**2
        clock.judge(f"peak of {name}, of the matrix's {bytes_text(matrix)}", peak / matrix, None)
    vectors = _probes(layout, clock.device)
    _check_inverse(clock, kept[0], target.hessian_vector_product(theta, vectors), vectors, layout)


def _check_inverse(clock: Clock, covariance: Full, products: Tensor, vectors: Tensor, layout: HeadLayout) -> None:
    """L L^T (H + Lambda) z is z; products by float32 sums where the Hessian was never whole."""
    back = covariance.unwhiten(covariance.pull_back(products))
    error = float((back - vectors).norm() / vectors.norm())
    clock.bench.ledger.check(f"covariance times precision, {layout.num_params} parameters, error", error, INVERSE)


def _probes(layout: HeadLayout, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PROBES, layout.num_params, generator=generator, dtype=torch.float64).to(device)


def _zeros(layout: HeadLayout, device: torch.device) -> Tensor:
    return torch.zeros(layout.num_params, dtype=torch.float64, device=device)
