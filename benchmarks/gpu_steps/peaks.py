"""Step *peaks*: peaks of the GPU's memory against the estimates by which commands decide whether they have room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_steps.bench import Bench
from gpu_steps.device import Gpu
from gpu_steps.heads import examples, head_gaussian, head_target, latent_model
from gpu_steps.ledger import Ledger

from bnncli.flows._affine_sizes import num_elements
from bnncli.flows.affine import Affine
from bnncli.inference import memory
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.inference.row_space import RowLift, lift_fit
from bnncli.latent.factors import num_params
from bnncli.latent.fit import EstimatorSettings, Plan, fit_latent
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.system.memory import bytes_text
from bnncli.targets.row_space import RowSpace

PEAK = (0.5, 1.1)  # of the estimate
LIBRARIES = 100 << 20  # bytes: cuBLAS keeps 32 MiB for each stream that it works on, a capture's among them
EXAMPLES = 400

# Sizes at which the matrices outweigh libraries' workspaces; the quick ones only run.
FITS = {"full": (10, 600), "block": (40, 1200), "kron": (60, 4000), "diag": (100, 20_000)}
CHAINS = ((10, 200), 4000)  # the head, and how many
SPAN = (3, 30_000)
FLOWS = [(10, 3000, "kron"), (300, 400, "kron")]
NETWORKS = [
    ((784, 4000, 4000, 10), 1, 100, "lrt"),
    ((784, 4000, 4000, 10), 1, 100, "concrete"),
    ((84, 10), 200, 1000, "mnf"),
]
QUICK_FITS = {"full": (3, 6)}


def run(bench: Bench) -> None:
    """Fits of every structure, chains, a fit in the span of few examples, flows, latent binary networks."""
    gpu, ledger = bench.gpu, bench.ledger
    is_quick = bench.is_quick or gpu.is_pretend  # a pretend GPU has no peaks: that the work runs is all
    for structure, sizes in (QUICK_FITS if is_quick else FITS).items():
        ledger.item(f"peak of a {structure} fit", _check_fit, gpu, ledger, structure, HeadLayout(*sizes))
    sizes, num_chains = ((3, 6), 4) if is_quick else CHAINS
    ledger.item("peak of hmc", _check_chains, gpu, ledger, HeadLayout(*sizes), num_chains)
    ledger.item("peak of a fit in a span", _check_span, gpu, ledger, HeadLayout(*((3, 600) if is_quick else SPAN)))
    for outputs, features, scale in [(3, 6, "kron")] if is_quick else FLOWS:
        layout = HeadLayout(outputs, features)
        ledger.item(f"peak of refine, {layout}", _check_flow, gpu, ledger, layout, scale)
    for network in [((6, 5, 3), 1, 10, "lrt")] if is_quick else NETWORKS:
        ledger.item(f"peak of fit-lbbnn, {network}", _check_network, gpu, ledger, *network)


def _check(gpu: Gpu, ledger: Ledger, what: str, expected: int, work: Callable[[], Any]) -> None:
    """The peak of the work, of the bytes that were expected."""
    peak = gpu.peak(work)
    if peak is None:
        ledger.note(f"peak of {what}", "not to be seen on a pretend GPU", expected=expected)
    else:
        most = PEAK[1] + LIBRARIES / expected
        ledger.check(f"peak of {what}, of its estimate", peak / expected, most, least=PEAK[0],
                     peak=bytes_text(peak), estimate=bytes_text(expected))  # fmt: skip


def _check_fit(gpu: Gpu, ledger: Ledger, structure: str, layout: HeadLayout) -> None:
    target = head_target(layout, EXAMPLES, gpu.device)
    what = f"a {structure} fit of {layout.num_params} parameters"
    _check(gpu, ledger, what, memory.fit_bytes(structure, layout), lambda: head_gaussian(target, structure))


def _check_chains(gpu: Gpu, ledger: Ledger, layout: HeadLayout, num_chains: int) -> None:
    target = head_target(layout, EXAMPLES, gpu.device)

    def work() -> Any:
        base = head_gaussian(target)
        return sample_hmc(
            target, mode=base.mean, covariance=base.covariance, generator=torch.Generator().manual_seed(0),
            num_chains=num_chains, num_warmup=1, num_draws=1,
        )  # fmt: skip

    expected = memory.sampling_bytes("full", layout, num_chains=num_chains)
    _check(gpu, ledger, f"{num_chains} chains of {layout.num_params} parameters", expected, work)


def _check_span(gpu: Gpu, ledger: Ledger, layout: HeadLayout) -> None:
    target = head_target(layout, EXAMPLES, gpu.device)

    def work() -> Any:
        rows = RowSpace.of(target.features, layout)
        start = torch.zeros(rows.reduced.num_params, dtype=torch.float64, device=gpu.device)
        return lift_fit(fit_gaussian(rows.target(target), start=start, structure="full"), RowLift(rows, target.prior))

    reduced = HeadLayout(layout.num_outputs, min(EXAMPLES, layout.num_features))
    expected = memory.fit_bytes("full", reduced, whole=layout)
    _check(gpu, ledger, f"a fit in the span of {EXAMPLES} examples, {layout.num_params} parameters", expected, work)


def _check_flow(gpu: Gpu, ledger: Ledger, layout: HeadLayout, scale: str) -> None:
    target = head_target(layout, EXAMPLES, gpu.device)
    base = head_gaussian(target, "diag")
    num_layer_params = Affine.recipe.length * num_elements(layout, scale)
    expected = memory.training_bytes(layout, num_layer_params=num_layer_params, num_draws=Affine.recipe.num_draws)

    def work() -> Any:
        generator = torch.Generator().manual_seed(0)
        return fit_flow(target, base, generator=generator, flow="affine", epochs=6, settings={"scale": scale})

    _check(gpu, ledger, f"affine {scale} layers on {layout.num_params} parameters", expected, work)


def _check_network(
    gpu: Gpu, ledger: Ledger, sizes: tuple[int, ...], repeats: int, batch_size: int, estimator: str
) -> None:
    layout = NetworkLayout(sizes)
    features, labels = examples(5 * batch_size, sizes[0], sizes[-1], gpu.device)
    flows = sum(num_params(inputs) for inputs in sizes[:-1]) if estimator == "mnf" else 0
    plan = Plan(epochs=2, batch_size=batch_size, learning_rate=1e-3, settings=EstimatorSettings(estimator))

    def work() -> Any:
        model = latent_model(sizes, repeats, estimator, gpu.device)
        return fit_latent(model, features, labels, plan, generator=torch.Generator().manual_seed(0))

    expected = memory.latent_bytes(layout, num_repeats=repeats, batch_size=batch_size, num_flow_params=flows)
    _check(gpu, ledger, f"{repeats} {estimator} networks of {layout.num_params} parameters", expected, work)
