"""Step *graphs*: captured steps against the same steps one by one, interrupted fits against whole ones, and what waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_steps.bench import Bench
from gpu_steps.cases import ESTIMATORS
from gpu_steps.device import Gpu
from gpu_steps.heads import examples, head_gaussian, head_target, latent_model
from gpu_steps.ledger import Ledger
from torch import Tensor

from bnncli import registry
from bnncli.errors import Interrupted
from bnncli.flows import choose_space
from bnncli.inference.dynamics import DYNAMICS
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.refine import MIN_ROUND_STEPS, RefineFit, fit_flow
from bnncli.latent.fit import EstimatorSettings, Plan, fit_latent
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace
from bnncli.targets.variants import GRADIENTS, choose_gradient

# Of the largest parameter: a captured step copies its rows where another looks at them, and products of other strides round
# otherwise; Adam makes that 3e-5 in 60 steps of spline layers. A step that is left out is a hundred times as much.
REPLAY = 1e-4
WARM_UP = 3  # steps before a capture
BATCH = 24
NUM_EXAMPLES = 10 * BATCH + 7  # ten whole batches, and one that is not
SYNCS = 0.1  # a step: those of an epoch's or a chunk's end are divided by its steps

Tensors = dict[str, Tensor]
Save = Callable[[Mapping[str, Tensor], bool], None]


class Fit(NamedTuple):
    """A training that can be done again, and continued.

    Args:
        name: of the case.
        run: takes the state to continue from and what saves states; gives all that was learnt.
        epochs: of it, and whole batches of each.
    """

    name: str
    run: Callable[[Mapping[str, Tensor] | None, Save | None], Tensors]
    epochs: int
    num_batches: int

    @property
    def steps(self) -> int:
        """On whole batches."""
        return self.epochs * self.num_batches


def run(bench: Bench) -> None:
    """All flows, batches and spaces; all estimators and repeats; chains of both dynamics in every whitening."""
    gpu, ledger, is_quick = bench.gpu, bench.ledger, bench.is_quick
    fits = [*_flow_fits(gpu.device, is_quick), *_latent_fits(gpu.device, is_quick)]
    for fit in fits:
        ledger.item(f"graph of {fit.name}", _check_replay, gpu, ledger, fit)
        if fit.steps >= 2 * MIN_ROUND_STEPS or (fit.epochs > 1 and "repeats" in fit.name and not is_quick):
            ledger.item(f"resuming {fit.name}", _check_resumed, ledger, fit)
    for dynamics in DYNAMICS[:1] if is_quick else DYNAMICS:
        for place in ["full"] if is_quick else [*registry.names("curvature"), "row space"]:
            ledger.item(f"graph of {dynamics} chains, {place}", _check_chain_graph, gpu, ledger, dynamics, place)
    for gradients in GRADIENTS[1:]:
        what = f"graph of {gradients} gradients"
        ledger.item(what, _check_chain_graph, gpu, ledger, DYNAMICS[0], "full", gradients)
    ledger.item("resuming hmc", _check_hmc, gpu, ledger, is_quick)
    ledger.item("syncs", _check_syncs, gpu, ledger, is_quick)


def _flow_fits(device: torch.device, is_quick: bool) -> Iterator[Fit]:
    whole = head_target(HeadLayout(3, 6), NUM_EXAMPLES, device)
    if is_quick:
        yield _flow_fit("affine", whole, head_gaussian(whole), "whitened", BATCH, "whole head", num_steps=10)
        return
    wide = head_target(HeadLayout(3, 40), 30, device)
    reduced = RowSpace.of(wide.features, wide.layout).target(wide)
    places = [("whole head", whole, BATCH), ("row space", reduced, 7)]
    for where, target, batch in places:
        base = head_gaussian(target)
        for flow in registry.names("flows"):
            for space in registry.load_class("flows", flow).spaces:
                is_own = where == "whole head" and space == choose_space(flow, "auto")
                for size in (batch, target.num_examples):
                    yield _flow_fit(flow, target, base, space, size, where, num_steps=60 if is_own else 10)


def _flow_fit(
    flow: str, target: LastLayerTarget, base: Gaussian, space: str, batch: int, where: str, *, num_steps: int
) -> Fit:
    """Steps on minibatches, or on all data; 60 are two rounds, between which a fit can be interrupted."""
    is_full = batch >= target.num_examples
    num_batches = 1 if is_full else target.num_examples // batch
    epochs = -(-num_steps // num_batches)

    def run(state: Mapping[str, Tensor] | None, save: Save | None) -> Tensors:
        fit: RefineFit = fit_flow(
            target, base, flow=flow, length=2, epochs=epochs, batch_size=batch, num_draws=2, learning_rate=0.02,
            space=space, generator=torch.Generator().manual_seed(0), state=state, save=save,
        )  # fmt: skip
        layers = [layer.to_tensors() for layer in fit.posterior.layers]
        return {
            "history": fit.history,
            **{f"{i}.{key}": part for i, own in enumerate(layers) for key, part in own.items()},
        }

    name = f"{flow}, {where}, {space}, {'all data' if is_full else 'minibatches'}"
    return Fit(name, run, epochs, num_batches)


def _latent_fits(device: torch.device, is_quick: bool) -> Iterator[Fit]:
    data = examples(NUM_EXAMPLES, 6, 3, device)
    for estimator in ESTIMATORS[:1] if is_quick else ESTIMATORS:
        for repeats in (2,) if is_quick else (1, 4):
            yield _latent_fit(estimator, repeats, data)


def _latent_fit(estimator: str, repeats: int, data: tuple[Tensor, Tensor], epochs: int = 3) -> Fit:
    plan = Plan(epochs=epochs, batch_size=BATCH, learning_rate=0.01, settings=EstimatorSettings(estimator))
    features, labels = data

    def run(state: Mapping[str, Tensor] | None, save: Save | None) -> Tensors:
        model = latent_model((features.shape[1], 5, 3), repeats, estimator, labels.device)
        fitted, history = fit_latent(
            model, features, labels, plan, generator=torch.Generator().manual_seed(0), state=state, save=save
        )
        learnt = [*vars(fitted.factors).values(), *fitted.multiplier_parameters()]
        parts = [part.detach() for part in learnt if isinstance(part, Tensor)]
        return {"history": history.bound(), **{str(index): part for index, part in enumerate(parts)}}

    return Fit(f"{estimator}, {repeats} repeats", run, epochs, len(features) // BATCH)


def _check_replay(gpu: Gpu, ledger: Ledger, fit: Fit) -> None:
    """One capture, all steps after the warm-up replayed, and what was learnt without any graph."""
    with gpu.counted() as counts:
        replayed = fit.run(None, None)
    ledger.check(f"captures of {fit.name}", counts.captures, 1, least=1)
    ledger.check(f"replays of {fit.name}", counts.replays, fit.steps, least=fit.steps - WARM_UP - 1)
    with gpu.refusing_captures(), gpu.counted() as without:
        eager = fit.run(None, None)
    ledger.check(f"replays of {fit.name}, captures refused", without.replays, 0)
    apart, is_same = _apart(replayed, eager)
    ledger.check(f"replay against steps one by one, {fit.name}", apart, REPLAY, bits="equal" if is_same else "differ")


def _check_resumed(ledger: Ledger, fit: Fit) -> None:
    """An interrupted fit, continued, is the whole one, bit for bit."""
    kept: Tensors = {}
    whole = fit.run(None, None)

    def save(state: Mapping[str, Tensor], is_last: bool) -> None:
        kept.update({name: part.clone() for name, part in state.items()})
        if not is_last:
            raise Interrupted(15, "as asked")

    try:
        fit.run(None, save)
    except Interrupted:
        done = max(len(part) for name, part in kept.items() if name.startswith("history.") and name != "history.ends")
        ledger.agree(f"interrupted midway, {fit.name}", 0 < done < fit.epochs, f"after {done} of {fit.epochs} epochs")
        ledger.agree(f"resumed = whole, {fit.name}", _apart(fit.run(kept, None), whole)[1], "other bits")
    else:
        ledger.miss(f"resumed = whole, {fit.name}", "it was not interrupted: one round was all")


class _Draws:
    """A store of draws and of resume states in memory; interrupts the run after so many transitions."""

    def __init__(self, interrupt_after: int) -> None:
        self.kept: list[Tensor] = []
        self.state: Tensors | None = None
        self.left = interrupt_after

    def append(self, theta: Tensor) -> None:
        """One draw more."""
        self.kept.append(theta)

    def draws(self) -> Tensor:
        """All of them."""
        return torch.stack(self.kept, dim=1).cpu()

    def restore(self) -> Tensors | None:
        """Where the run was interrupted."""
        return self.state

    def offer(self, tensors: Callable[[], Tensors], *, is_last: bool = False) -> None:
        """Keeps the state when it interrupts."""
        self.left -= 1
        if is_last:
            self.state = {name: part.clone() for name, part in tensors().items()}
        elif self.left == 0:
            raise Interrupted(15, "as asked")


def _check_chain_graph(gpu: Gpu, ledger: Ledger, dynamics: str, place: str, gradients: str = "float32") -> None:
    """One capture, all steps after the first few replayed, and the draws without any graph."""
    name, is_span = f"{dynamics} chains, {place}, {gradients} gradients", place == "row space"
    target = head_target(HeadLayout(3, 40 if is_span else 6), 30 if is_span else NUM_EXAMPLES, gpu.device)
    if is_span:
        target = RowSpace.of(target.features, target.layout).target(target)
    base = head_gaussian(target, "full" if is_span else place)

    def run() -> HmcRun:
        """Without a warm-up, so that all steps are told."""
        return sample_hmc(
            target, mode=base.mean, covariance=base.covariance, generator=torch.Generator().manual_seed(0),
            num_chains=4, num_warmup=0, num_draws=6, dynamics=dynamics,
            coarse=choose_gradient(gradients, target, base.mean),
        )  # fmt: skip

    with gpu.counted() as counts:
        replayed = run()
    steps = int(replayed.n_steps[0].sum())
    ledger.check(f"captures of {name}", counts.captures, 1, least=1)
    ledger.check(f"replays of {name}", counts.replays, steps - WARM_UP, least=steps - WARM_UP)
    with gpu.refusing_captures(), gpu.counted() as without:
        eager = run()
    ledger.check(f"replays of {name}, captures refused", without.replays, 0)
    apart, is_same = _apart({"draws": replayed.draws}, {"draws": eager.draws})
    ledger.check(f"replay against steps one by one, {name}", apart, REPLAY, bits="equal" if is_same else "differ")


def _check_hmc(gpu: Gpu, ledger: Ledger, is_quick: bool) -> None:
    """Interrupted chains, continued, are the whole ones."""
    target = head_target(HeadLayout(3, 6), NUM_EXAMPLES, gpu.device)
    base, warmup, draws = head_gaussian(target), 10, 6 if is_quick else 20

    def run(memory: _Draws) -> Tensor:
        return sample_hmc(
            target, mode=base.mean, covariance=base.covariance, generator=torch.Generator().manual_seed(0),
            num_chains=4, num_warmup=warmup, num_draws=draws, store=memory, resume=memory,
        ).draws  # fmt: skip

    interrupted = _Draws(warmup + draws // 2)
    try:
        run(interrupted)
    except Interrupted:
        ledger.agree("resumed = whole, hmc", torch.equal(run(interrupted), run(_Draws(0))), "other bits")
    else:
        ledger.miss("resumed = whole, hmc", "it was not interrupted")


def _check_syncs(gpu: Gpu, ledger: Ledger, is_quick: bool) -> None:
    """What twice the steps add to the host's waiting: nothing but for chunks and epochs."""
    base = head_gaussian(head_target(HeadLayout(3, 6), NUM_EXAMPLES, gpu.device))
    for flow in ["affine"] if is_quick else registry.names("flows"):
        _check_slope(gpu, ledger, f"refine {flow}", partial(_one_epoch, gpu, flow, base), 20)
    for estimator in ESTIMATORS[:1] if is_quick else ESTIMATORS:
        _check_slope(gpu, ledger, f"fit-lbbnn {estimator}", partial(_latent_epoch, gpu, estimator), 20)
    _check_slope(gpu, ledger, "hmc after its warm-up", partial(_chains, gpu, base), 10)
    refined = _one_epoch(gpu, "affine", base, 1)().posterior
    posteriors: dict[str, Gaussian | Flow] = {"gaussian": base, "flow": refined}
    for name, posterior in posteriors.items():
        with gpu.counted() as counts:
            posterior.sample(8, torch.Generator().manual_seed(0))
        ledger.check(f"syncs of 8 draws of a {name}", counts.syncs, 1)  # the log determinant comes along


def _check_slope(gpu: Gpu, ledger: Ledger, name: str, prepare: Callable[[int], Callable[[], Any]], steps: int) -> None:
    """`prepare(n)` gives work of n times so many steps."""
    found = []
    for times in (1, 2):
        work = prepare(times)
        with gpu.counted() as counts:
            work()
        found.append(counts.syncs)
    ledger.check(f"syncs a step, {name}", (found[1] - found[0]) / steps, SYNCS, in_all=found[0])


def _one_epoch(gpu: Gpu, flow: str, base: Gaussian, times: int) -> Callable[[], RefineFit]:
    """One epoch of 20 times so many whole batches."""
    target = head_target(base.layout, 20 * times * BATCH, gpu.device)
    return lambda: fit_flow(
        target, base, flow=flow, length=2, epochs=1, batch_size=BATCH, num_draws=2, learning_rate=0.02,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def _latent_epoch(gpu: Gpu, estimator: str, times: int) -> Callable[[], Tensors]:
    fit = _latent_fit(estimator, 2, examples(20 * times * BATCH, 6, 3, gpu.device), epochs=1)
    return lambda: fit.run(None, None)


def _chains(gpu: Gpu, base: Gaussian, times: int) -> Callable[[], Any]:
    """Ten times so many transitions after the warm-up."""
    target = head_target(base.layout, NUM_EXAMPLES, gpu.device)
    return lambda: sample_hmc(
        target, mode=base.mean, covariance=base.covariance, generator=torch.Generator().manual_seed(0),
        num_chains=4, num_warmup=10, num_draws=10 * times,
    )  # fmt: skip


def _apart(one: Tensors, other: Tensors) -> tuple[float, bool]:
    """The largest difference, of the largest number of its tensor, and whether all bits are equal."""
    apart = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in _pairs(one, other)]
    return max(apart), all(torch.equal(a, b) for a, b in _pairs(one, other))


def _pairs(one: Tensors, other: Tensors) -> list[tuple[Tensor, Tensor]]:
    assert one.keys() == other.keys()
    return [(one[name].double(), other[name].double()) for name in one]
