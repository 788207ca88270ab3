"""Simulation-based calibration: draw parameters, simulate labels, fit, and rank the truth among the draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from bnncli.inference.dynamics import DrawSubset, WhiteCoordinates
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.mode import find_suitable_mode
from bnncli.inference.refine import fit_flow
from bnncli.inference.sghmc import (
    ChainPlan,
    SghmcPlan,
    num_independent_draws,
    plan_chains,
    preconditioner,
    sample_sghmc,
)
from bnncli.latent.fit import Plan, Scaling, fit_latent
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior, initial_theta
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.progress import SILENT, Progress, Task
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import ManyLabels

if TYPE_CHECKING:
    from torch import Tensor


NUM_CHAINS = 4  # per target
_THINNING = 3  # transitions per kept draw, so that ranks show no autocorrelation
_WARMUP = 60
_ACCEPTANCE = 0.9

Refit: TypeAlias = "Callable[[Sequence[LastLayerTarget], int, torch.Generator, Progress], Tensor]"


@dataclass(frozen=True)
class GaussianRefit:
    """Draws of the Gaussian at each target's mode.

    Args:
        structure: of its covariance.
    """

    structure: str = "full"

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """Return (M, L, P) float64 for M targets and L draws."""
        fitted = self.gaussians(targets, generator, progress)
        return torch.stack([one.sample(num_draws, generator).double() for one in fitted])

    def gaussians(
        self, targets: Sequence[LastLayerTarget], generator: torch.Generator, progress: Progress = SILENT
    ) -> list[Gaussian]:
        """Return the Gaussian at the mode of each target, without drawing."""
        start = torch.zeros(targets[0].layout.num_params, dtype=torch.float64)
        task = progress.task("modes", len(targets))
        found = []
        for target in targets:
            found.append(fit_gaussian(target, start=start, structure=self.structure).gaussian)
            task.advance()
        return found


@dataclass(frozen=True)
class HmcRefit:
    """Draws by Hamiltonian Monte Carlo, the chains of all targets as one batch.

    Args:
        num_chains: per target.
        num_warmup: transitions before the first draw.
        dynamics: split or leapfrog.
    """

    num_chains: int = NUM_CHAINS
    num_warmup: int = _WARMUP
    dynamics: str = "split"

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """Return (M, L, P) float64 for M targets and L thinned draws."""
        gaussians = GaussianRefit().gaussians(targets, generator, progress)
        num_params = targets[0].layout.num_params
        identity = torch.eye(num_params, dtype=torch.float64, device=targets[0].device)
        roots = torch.stack([one.covariance.unwhiten(identity).mT for one in gaussians])
        many = ManyLabels(targets, torch.stack([one.mean for one in gaussians]), roots.to(targets[0].dtype))
        each = -(-num_draws // self.num_chains)
        z = sample_hmc(
            many,
            mode=torch.zeros(num_params, dtype=torch.float64),
            covariance=Diag(torch.ones(num_params, dtype=torch.float64)),
            generator=generator,
            num_chains=self.num_chains * len(targets),
            num_warmup=self.num_warmup,
            num_draws=_THINNING * each,
            target_accept=_ACCEPTANCE,
            dynamics=self.dynamics,
            progress=progress,
        ).draws[:, _THINNING - 1 :: _THINNING]
        return many.by_target(z)[:, :num_draws]


@dataclass(frozen=True)
class FlowRefit:
    """Draws of a flow on the Gaussian at each target's mode.

    Args:
        structure: of the Gaussian.
        options: keyword arguments of fit_flow.
    """

    structure: str = "full"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """Return (M, L, P) float64 for M targets and L draws."""
        gaussians = GaussianRefit(self.structure).gaussians(targets, generator, progress)
        found = []
        for target, base in zip(targets, gaussians, strict=True):
            flow = fit_flow(target, base, generator=generator, progress=progress, **self.options).posterior
            found.append(flow.sample(num_draws, generator).double())
        return torch.stack(found)


@dataclass(frozen=True)
class TrainedRefit:
    """Draws of Gaussians trained from zero, one after the other.

    Args:
        fit: returns a Gaussian, given a target, a start (P,), a generator and a progress report.
    """

    fit: Callable[[LastLayerTarget, Tensor, torch.Generator, Progress], Gaussian]

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """Return (M, L, P) float64 for M targets and L draws."""
        fitted = self._gaussians(targets, generator, progress)
        return torch.stack([one.sample(num_draws, generator).double() for one in fitted])

    def gaussians(
        self, targets: Sequence[LastLayerTarget], generator: torch.Generator, progress: Progress = SILENT
    ) -> list[Gaussian]:
        """Return the trained Gaussian of each target."""
        return list(self._gaussians(targets, generator, progress))

    def _gaussians(
        self, targets: Sequence[LastLayerTarget], generator: torch.Generator, progress: Progress
    ) -> Iterator[Gaussian]:
        """Yield one Gaussian at a time, so that its draws can be made before the next is trained."""
        start = torch.zeros(targets[0].layout.num_params, dtype=torch.float64, device=targets[0].device)
        for target in targets:
            yield self.fit(target, start, generator, progress)


@dataclass(frozen=True)
class LatentRefit:
    """Draws of a latent binary network trained on each target's examples; the targets' priors are ignored.

    Args:
        start: returns initial networks for a number of targets, equally many for each, on their device.
        plan: of the training; batches hold at most the examples of a target.
        scaling: of the features; None for unscaled.
    """

    start: Callable[[int, torch.Generator], LatentModel]
    plan: Plan
    scaling: Scaling | None = None

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """Return (M, L, P) float64 for M targets and L draws, for unscaled features; excluded weights are 0.

        The networks of a target take turns.

        Raises:
            NumericError: the bound of an epoch is not finite.
        """
        count, labels = len(targets), torch.stack([one.labels for one in targets], dim=1)
        start = self.start(count, generator)
        model, _ = fit_latent(
            start,
            targets[0].features,
            labels.repeat(1, start.num_repeats // count, *[1] * (labels.ndim - 2)),
            self.plan,
            generator=generator,
            scaling=self.scaling,
            progress=progress,
        )
        return (
            _draws(model, count * num_draws, generator, self.scaling).unflatten(0, (num_draws, count)).transpose(0, 1)
        )


def prior_draws(
    layout: NetworkLayout, prior: SpikeAndSlab, num: int, generator: torch.Generator, scaling: Scaling | None = None
) -> Tensor:
    """Draw theta (S, P) float64 from the prior over scaled features, for unscaled features; excluded weights are 0."""
    # as exact as the prior's factors
    exact = None if scaling is None else Scaling(*(part.double() for part in scaling))
    return _draws(LatentModel.of_prior(layout, prior), num, generator, exact)


def _draws(model: LatentModel, num: int, generator: torch.Generator, scaling: Scaling | None) -> Tensor:
    shift, scale = (None, None) if scaling is None else scaling
    return LatentBinary(model, shift=shift, scale=scale).sample(num, generator).double()


_MAX_SEED = 2**31


@dataclass(frozen=True)
class SghmcRefit:
    """Draws by chains with the length, temperature and batch size of a fit.

    Chains start at the target's mode, where a network trained on its labels is, or at an initialisation. Each chain
    keeps only nearly independent draws (num_apart), spread over those the fit keeps; if the fit's number of chains
    gives too few, there are more chains. All use the same minibatches.

    Args:
        plan: the fit's; its learning rate applies only if given, its batch size only if targets have more examples.
        num_chains: the fit's.
        is_given: whether the learning rate was given; else it is chosen for each target, as for the fit.
        from_initialisation: start chains at an initialisation.
        base: returns the Gaussian of each target whose covariance preconditions, or None.
    """

    plan: SghmcPlan
    num_chains: int
    is_given: bool = False
    from_initialisation: bool = False
    base: GaussianRefit | TrainedRefit | None = None

    def __call__(
        self,
        targets: Sequence[LastLayerTarget],
        num_draws: int,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Tensor:
        """Return (M, L, P) float64 for M targets and L draws. Raises NumericError if chains diverge."""
        bases = None if self.base is None else self.base.gaussians(targets, generator, progress)
        most = max(self.num_chains, num_draws)
        starts = self._starts(targets, bases, most, generator)
        chosen = [
            self._planned(target, start[0], None if bases is None else bases[index], generator)
            for index, (target, start) in enumerate(zip(targets, starts, strict=True))
        ]
        plan, (num_chains, each, in_turn) = chosen[0].plan, self._enough(targets, chosen, num_draws)
        rates = torch.tensor([one.plan.learning_rate for one in chosen], dtype=torch.float64, device=starts.device)
        scales = (rates / rates[0]).sqrt()
        roots = scales.view(-1, 1, 1) * _roots(starts, bases)
        many = ManyLabels(targets, starts[:, 0], roots.to(targets[0].dtype))
        z = torch.linalg.solve(roots, (starts[:, :num_chains] - starts[:, :1]).mT).mT.transpose(0, 1).flatten(0, 1)
        square = None
        if plan.is_preconditioned:
            squares = [one.square for one in chosen if one.square is not None]
            square = (torch.stack(squares) * scales.square().unsqueeze(1)).repeat(num_chains, 1)
        store = DrawSubset(_kept_places(plan, len(z), each, in_turn, generator))
        drawn = sample_sghmc(many, plan, start=z, generator=generator, square=square, store=store, progress=progress)
        return many.by_target(drawn.draws)[:, :num_draws]

    def _starts(
        self, targets: Sequence[LastLayerTarget], bases: list[Gaussian] | None, most: int, generator: torch.Generator
    ) -> Tensor:
        """Return the starts of each target's chains, (M, C, P) float64, for as many as may be needed."""
        layout, device = targets[0].layout, targets[0].device
        if self.from_initialisation:
            seed = int(torch.randint(_MAX_SEED, (1,), generator=generator))
            found = initial_theta(layout, most * len(targets), seed).to(device)
            return found.unflatten(0, (len(targets), most))
        if bases is not None and isinstance(self.base, GaussianRefit):
            modes = [one.mean for one in bases]
        else:
            zeros = torch.zeros(layout.num_params, dtype=torch.float64, device=device)
            modes = [find_suitable_mode(one, zeros).theta for one in targets]
        return torch.stack(modes).unsqueeze(1).expand(-1, most, -1)

    def _planned(
        self, target: LastLayerTarget, start: Tensor, base: Gaussian | None, generator: torch.Generator
    ) -> ChainPlan:
        """Return the plan for one target."""
        batch_size = min(self.plan.batch_size, target.num_examples)
        return plan_chains(
            target,
            lambda rate: replace(self.plan, learning_rate=rate, batch_size=batch_size),
            places=[start] if base is None else [start, base.mean],
            learning_rate=self.plan.learning_rate if self.is_given else None,
            whitening=None if base is None else WhiteCoordinates.of(base, target.device, target.dtype),
            squares=generator,
            generator=generator,
        )

    def _enough(
        self, targets: Sequence[LastLayerTarget], chosen: Sequence[ChainPlan], num_draws: int
    ) -> tuple[int, int, int]:
        """Return the number of chains, of draws per cycle, and every how many cycles one is used."""
        apart = [
            num_independent_draws(one.plan, self._softest(target, one), target.num_examples)
            for target, one in zip(targets, chosen, strict=True)
        ]
        in_turn = max(one for _, one in apart)
        used, most = self.plan.num_cycles // in_turn, min(self.plan.num_draws, *(one for one, _ in apart))
        num_chains = max(self.num_chains, -(-num_draws // (used * most)))
        return num_chains, -(-num_draws // (used * num_chains)), in_turn

    def _softest(self, target: LastLayerTarget, chosen: ChainPlan) -> float:
        """Return a lower bound on the curvature of -log joint under G near the mode; 0 if nothing better is known.

        It is 1 in the coordinates of a Gaussian with the full curvature, and the prior's precision in those of theta.
        """
        if self.base is not None:
            return float(isinstance(self.base, GaussianRefit) and self.base.structure == "full")
        precision = target.prior.diagonal(target.layout, device=target.device)
        return float((precision if chosen.square is None else precision * preconditioner(chosen.square)).min())


def _roots(starts: Tensor, bases: list[Gaussian] | None) -> Tensor:
    """Return L of each target's coordinates, (M, P, P) float64, or (1, P, P) for theta itself, for starts (M, C, P)."""
    identity = torch.eye(starts.shape[2], dtype=torch.float64, device=starts.device)
    return (
        identity.unsqueeze(0) if bases is None else torch.stack([one.covariance.unwhiten(identity).mT for one in bases])
    )


def _kept_places(plan: SghmcPlan, num_chains: int, each: int, in_turn: int, generator: torch.Generator) -> Tensor:
    """Return which of the plan's draws each chain keeps, (T', C): evenly spaced per used cycle, from a random start.

    Each kept draw is then distributed as a random one of the plan's draws, which within cycles differ by position.
    """
    used = plan.num_cycles // in_turn
    start = torch.rand(used, 1, num_chains, generator=generator, dtype=torch.float64)
    within = ((start + torch.arange(each).view(1, -1, 1)) * (plan.num_draws / each)).long()
    cycles = torch.arange(1, used + 1) * in_turn - 1
    return (within.clamp(max=plan.num_draws - 1) + plan.num_draws * cycles.view(-1, 1, 1)).flatten(0, 1)


LOG_JOINT, LOG_LIKELIHOOD = "log joint", "log likelihood"
_OF_LABELS = {LOG_JOINT: LastLayerTarget.log_joint, LOG_LIKELIHOOD: LastLayerTarget.log_likelihood}
_DRAWN_BYTES = 2**27  # for draws and factors of all simulations fitted together
_FLOAT = 8
_MOST_AT_ONCE = 100  # simulations; sets how often progress is reported


@dataclass(frozen=True)
class Problem:
    """The problem for which labels are simulated.

    Args:
        features: (N, D) on the device.
        layout: of the head.
        prior: of the fitted target; ignored if the refit has its own prior and no log joint is ranked.
        observed: features (M, D) and labels (M,) or (M, C) included in every fit; None if theta is drawn from the
            prior.
    """

    features: Tensor
    layout: HeadLayout
    prior: Prior
    observed: tuple[Tensor, Tensor] | None = None

    @cached_property
    def _every(self) -> Tensor:
        """Features of all examples in a fit."""
        return self.features if self.observed is None else torch.cat([self.observed[0], self.features])

    def targets(self, theta: Tensor, generator: torch.Generator) -> list[LastLayerTarget]:
        """Simulate labels under each theta (M, P) and return their targets."""
        found = []
        for one in theta:
            labels = simulate_labels(self.layout, self.features, one, generator)
            if self.observed is not None:
                labels = torch.cat([self.observed[1].to(labels), labels])
            found.append(LastLayerTarget(self._every, labels, self.layout, self.prior))
        return found


@dataclass(frozen=True)
class RankedNumber:
    """A quantity to rank: a linear function of theta, or the log joint or log likelihood of theta and labels.

    Args:
        name: for people; LOG_JOINT or LOG_LIKELIHOOD without a direction.
        direction: (P,), the quantity is theta . direction; None if it depends on the labels.
    """

    name: str
    direction: Tensor | None = None


def ranked_quantities(
    layout: HeadLayout,
    held_out: Tensor,
    generator: torch.Generator,
    *,
    of_labels: str = LOG_JOINT,
    num_params: int = 4,
    num_logits: int = 4,
) -> list[RankedNumber]:
    """Return the quantities: log joint or log likelihood, held-out logits, and a few random weights and biases.

    Args:
        held_out: (R, D), inputs whose logits are ranked; for several classes, relative to their mean.
        of_labels: LOG_JOINT, or LOG_LIKELIHOOD, which needs no prior density.
        num_params: number of weights and biases.
        num_logits: number of logits, each of one output at one input from held_out.
    """
    found = [RankedNumber(of_labels)]
    order = torch.randperm(layout.num_params, generator=generator).tolist()
    chosen = order[: max(0, num_params - int(layout.has_bias))]
    if layout.has_bias:
        first = layout.num_params - layout.num_outputs
        chosen.append(first + int(torch.randint(layout.num_outputs, (1,), generator=generator)))
    for place in dict.fromkeys(chosen):
        direction = torch.zeros(layout.num_params, dtype=torch.float64)
        direction[place] = 1.0
        found.append(RankedNumber(_name_of(place, layout), direction))
    for row in torch.randperm(len(held_out), generator=generator)[:num_logits].tolist():
        output = int(torch.randint(layout.num_outputs, (1,), generator=generator))
        found.append(RankedNumber(f"logit {output} of held-out input {row}", _logit(layout, held_out[row], output)))
    return found


def rank_quantities(
    problem: Problem,
    thetas: Tensor,
    refit: Refit,
    *,
    ranked: Sequence[RankedNumber],
    num_draws: int,
    generator: torch.Generator,
    progress: Progress = SILENT,
) -> Tensor:
    """Return ranks (Q, M), 0..L, of each quantity at the simulating theta (M, P) among L draws of the fit.

    Ties are broken at random.
    """
    ranks = torch.empty(len(ranked), len(thetas), dtype=torch.int64)
    task = progress.task("simulations", len(thetas))
    for rows in _blocks(len(thetas), problem.layout.num_params, num_draws):
        theta = thetas[rows].double().to(problem.features.device)
        targets = problem.targets(theta, generator)
        draws = refit(targets, num_draws, generator, _Within(task, progress)).to(theta)
        every = torch.cat([theta.unsqueeze(1), draws], dim=1)  # (m, 1 + L, P)
        for place, quantity in enumerate(ranked):
            values = _values(quantity, every, targets).cpu()
            below = (values[:, 1:] < values[:, :1]).sum(dim=1)
            equal = (values[:, 1:] == values[:, :1]).sum(dim=1)
            share = torch.rand(len(equal), generator=generator, dtype=torch.float64)
            ranks[place, rows] = below + (share * (equal + 1)).long()
        task.advance(len(targets))
    return ranks


@dataclass(frozen=True)
class _Within:
    """Reports the progress of fits as the current step of the task over all simulations."""

    outer: Task
    progress: Progress

    def task(self, name: str, total: int) -> _Step:
        return _Step(self.outer, name, total)

    def warn(self, text: str) -> None:
        self.progress.warn(text)


@dataclass
class _Step:
    outer: Task
    name: str
    total: int
    done: int = 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.done += amount
        self.outer.advance(0, f"{self.name} {self.done}/{self.total or '?'}")


def simulate_labels(layout: HeadLayout, features: Tensor, theta: Tensor, generator: torch.Generator) -> Tensor:
    """Simulate labels (N,) int64, or (N, C) uint8 for multi-label, given theta (P,) at features (N, D)."""
    likelihood: Likelihood = layout.likelihood
    logits = layout.logits(features.double(), theta.double().unsqueeze(0))[0]
    probabilities = likelihood.class_probabilities(logits, dim=1)
    if not likelihood.is_exclusive:
        unit = torch.rand(probabilities.shape, generator=generator, dtype=torch.float64)
        return (unit.to(probabilities.device) < probabilities).to(torch.uint8)
    unit = torch.rand(probabilities.shape, generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(unit)).to(probabilities.device)
    return (likelihood.log_class_probabilities(logits, dim=1) + gumbel).argmax(dim=1)


def _name_of(place: int, layout: HeadLayout) -> str:
    """Return a readable name of an entry of theta."""
    size = layout.num_outputs * layout.num_features
    if place >= size:
        return f"bias {place - size}"
    return f"weight {place // layout.num_features}, {place % layout.num_features}"


def _values(quantity: RankedNumber, theta: Tensor, targets: Sequence[LastLayerTarget]) -> Tensor:
    """Return a quantity at theta (m, S, P) of each target, (m, S) float64."""
    if quantity.direction is not None:
        return theta @ quantity.direction.to(theta)
    of_labels = _OF_LABELS[quantity.name]
    return torch.stack([of_labels(target, one) for target, one in zip(targets, theta, strict=True)])


def _logit(layout: HeadLayout, features: Tensor, output: int) -> Tensor:
    """Return the direction (P,) of one output's logit at features (D,), less the mean over outputs if shift invariant."""
    likelihood = layout.likelihood
    weights = torch.zeros(layout.num_outputs, dtype=torch.float64)
    weights[output] = 1.0
    if likelihood.is_shift_invariant:
        weights -= 1 / layout.num_outputs
    weight = weights.unsqueeze(1) * features.double().cpu()
    return layout.join(weight, weights if layout.has_bias else None)


def _blocks(num: int, num_params: int, num_draws: int) -> Iterator[slice]:
    """Yield blocks of simulations to fit together, limited by the memory of their draws and factors."""
    each = _FLOAT * num_params * (num_params + 4 * num_draws)
    size = max(1, min(_MOST_AT_ONCE, _DRAWN_BYTES // each))
    for start in range(0, num, size):
        yield slice(start, min(start + size, num))
