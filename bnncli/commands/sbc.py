"""sbc: check a fit by simulation: draw parameters, simulate labels, fit again, and rank the truth among the draws."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.commands.fit_lbbnn import FitLbbnnOptions, build_start, check_memory, make_plan, warn_of_short_plan
from bnncli.commands.fit_sghmc import BASE, CYCLICAL, RMSPROP
from bnncli.errors import CheckFailed, DataError, DeviceError, NumericError, UsageError
from bnncli.evaluation.convergence import RankLaw
from bnncli.figures import render
from bnncli.figures.chains import draw_ranks
from bnncli.inference import memory
from bnncli.inference.sghmc import SghmcPlan
from bnncli.inference.simulation import (
    LOG_JOINT,
    LOG_LIKELIHOOD,
    FlowRefit,
    GaussianRefit,
    HmcRefit,
    LatentRefit,
    Problem,
    Refit,
    SghmcRefit,
    TrainedRefit,
    prior_draws,
    rank_quantities,
    ranked_quantities,
)
from bnncli.inference.swag import SwagPlan, fit_swag
from bnncli.inference.vi import ViPlan, fit_vi
from bnncli.latent.fit import Scaling
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.options.command import READ, Command, ComputeOptions, InputOptions
from bnncli.options.declaration import CheckedOptions, check_suffix, option
from bnncli.options.shared import INHERIT
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import Progress
from bnncli.session.inputs import (
    TRAIN,
    Split,
    load_fitted,
    load_split,
    open_posterior,
    posterior_source,
    read_recorded_prior,
    require_features,
)
from bnncli.session.out_of_fold import read_fitted_splits
from bnncli.session.predictions import find_named
from bnncli.session.run import Result, Run, Table, source_json
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from torch import Tensor


PRIOR = "prior"


@dataclass(frozen=True)
class SbcOptions(CheckedOptions):
    """Options of sbc."""

    posterior: str = option(
        "laplace",
        "Posterior whose method and options to test, by name or file. It must be over the last layer, from any "
        "fit command.",
        metavar="NAME|FILE",
    )
    truth: str = option(
        PRIOR,
        "Where the true parameters come from: the prior, or a posterior of this run (use hmc). fit-lbbnn "
        "supports only prior.",
        metavar="prior|NAME|FILE",
    )
    simulations: int = option(500, "Number of data sets to simulate and fit.", minimum=20)
    draws: int = option(100, "Number of draws per fit, among which the truth is ranked.", minimum=9, maximum=10_000)
    examples: int = option(500, "Number of random training examples that get simulated labels.", minimum=1)
    level: float = option(
        0.05,
        "Probability of rejecting a correct fit, for all quantities together.",
        minimum=1e-6,
        maximum=0.5,
        is_rare=True,
    )
    strict: bool = option(False, "Exit 3 if the fit is not calibrated.")
    plot: str | None = option(
        None,
        "Plot the rank distributions with their bands as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
    )
    force: bool = option(False, "Let \0plot\0 replace a file that bnncli did not create.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))


COMMAND = Command(
    "Check a fit by simulation-based calibration.",
    "Draws parameters from the prior, simulates labels, refits, and ranks the true values among the draws "
    "(Talts et al., 2018). If the fit is exact, the ranks are uniform. Rejects a correct fit with probability "
    "at most --level. Writes nothing except the plot, if you add --plot.",
    (SbcOptions, InputOptions, ComputeOptions, *READ),
    (
        "bnncli sbc ckpt.pt --posterior hmc",
        "bnncli sbc ckpt.pt --posterior laplace --truth hmc --strict --plot ranks.png",
        "bnncli sbc ckpt.pt --posterior lbbnn --simulations 100",
    ),
    section="Research",
    place=20,
)


_LATENT = "lbbnn"


def execute(run: Run, options: SbcOptions) -> Result:
    """Simulate, fit, rank and judge. Nothing but a figure is written."""
    require_features(run)
    path = find_named(
        run, options.posterior, flag="--posterior", otherwise=run.suggest("fit-laplace", name=options.posterior)
    )
    header, source = posterior_source(run, path, "posterior")
    train = (
        load_split(run, "train")
        if read_fitted_splits(header) == TRAIN
        else load_fitted(run, read_fitted_splits(header))
    )
    _check_can_be_tried(path, header)
    if header.meta["method"] == _LATENT and options.truth != PRIOR:
        raise UsageError(
            "--truth: expected prior, because fit-lbbnn can be tested only on parameters drawn from its prior "
            f"({path.stem}); got {options.truth}"
        )
    sources = [*train.sources, source]
    truth = None
    if options.truth != PRIOR:
        train.check_labeled()
        truth = find_named(run, options.truth, flag="--truth", otherwise=run.suggest("hmc", name=options.truth))
        truth_header, truth_source = posterior_source(run, truth, "truth")
        _check_is_truth(run, truth, truth_header, (path.stem, header))
        sources.append(truth_source)
    if options.plot is not None:
        check_figure_path(
            Path(options.plot),
            "--plot",
            force=options.force,
            others=[run.checkpoint_path, *(one.path for one in sources)],
        )
    _require_room(run, options, train, header)

    ranked = rank_draws(run, options, train, header, truth)
    verdict = judge_ranks(ranked, path.stem, options)
    result = Result(
        extra={
            "posterior": path.stem,
            "truth": options.truth,
            "simulations": options.simulations,
            "draws": options.draws,
            "level": options.level,
            "quantities": [one.to_json() for one in ranked],
            "verdict": {"is_calibrated": verdict.is_calibrated, "sentence": verdict.sentence},
            "inputs": [source_json(one) for one in sources],
            "environment": run.environment(),
        },
        tables=[_table(ranked, options)],
        lines=[verdict.sentence],
        failure=None if verdict.is_calibrated or not options.strict else _failure(verdict.sentence),
    )
    if options.plot is not None:
        result.outputs = _plot(Path(options.plot), ranked, options, path.stem)
        result.action = "computed"
        result.lines.insert(0, f"figure: {options.plot}")
    return result


_OF_GAUSSIAN_PRIORS = ("laplace", "refine", "hmc", "vi", "swag", "sghmc")
METHODS = (*_OF_GAUSSIAN_PRIORS, _LATENT)
_ANOTHER = "name one over the last layer that can be fitted again, such as --posterior laplace or --posterior hmc"
_POINT = "it is a point, with no draws to rank the truth among"
_APART = "its networks were trained separately, and simulated last-layer labels cannot train them again"
_NO_FIT = {  # by method, why not; it may have another name
    "map": _POINT,
    "temperature": _POINT,
    "calibration": _POINT,
    "prune": _POINT,
    "merge": "it merges several hmc fits; test one of them",
    "ensemble": _APART,
    "mola": _APART,
}


def _check_can_be_tried(path: Path, header: Header) -> None:
    """Raise UsageError for a posterior whose fit cannot be repeated from labels and features alone."""
    method = header.meta.get("method")
    if method not in METHODS:
        why = f": {_NO_FIT[method]}" if method in _NO_FIT else ""
        raise UsageError(
            f"--posterior: expected one of {', '.join(METHODS)}; {path.stem} is from {method}{why}",
            hint=_ANOTHER,
        )
    if method == _LATENT:
        _check_latent(path, header)
        return
    if header.meta.get("layers") is not None:
        raise UsageError(
            "--posterior: expected a posterior over the last layer, which can be fitted again from features; "
            f"{path.stem} is over --layers {header.meta['layers']}",
            hint=_ANOTHER,
        )
    if header.meta.get("center") == "checkpoint":
        raise UsageError(
            f"--posterior: {path.stem} is centred on the checkpoint's weights, which simulated labels do not "
            "move; use a posterior at the mode"
        )
    if read_recorded_prior(header) is None:
        raise UsageError(f"--posterior: {path.stem} records no prior")


def _check_latent(path: Path, header: Header) -> None:
    """Raise UsageError for a latent binary network with hidden layers, or with a learnt prior."""
    with convert_lookup_errors(path):
        hidden, params = header.meta["sizes"][1:-1], header.provenance["params"]
        learns_prior = params["estimator"] == "concrete" and params["early_epochs"] > 0
    if hidden:
        raise UsageError(
            "--posterior: expected a posterior over the last layer, which can be fitted again from features; "
            f"{path.stem} has --hidden {','.join(map(str, hidden))}",
            hint=_ANOTHER,
        )
    if learns_prior:
        raise UsageError(
            f"--posterior: expected a posterior with a fixed prior; {path.stem} uses --estimator concrete, which "
            "learns its prior from the labels, so each simulation would have another prior",
            hint="fit one with --early-epochs 0, which keeps the prior, or with another --estimator",
        )


_EXACT = ("hmc", "merge")  # draws of the posterior itself


def _check_is_truth(run: Run, path: Path, truth: Header, posterior: tuple[str, Header]) -> None:
    """Raise UsageError where the parameters have another target. Warn where they are not exact draws from it."""
    name, tested = posterior
    known = tuple(dict.fromkeys((*_OF_GAUSSIAN_PRIORS, *_EXACT)))
    if truth.meta.get("layers") is not None or truth.meta.get("method") not in known:
        raise UsageError(f"--truth: expected prior, or a last-layer posterior from {', '.join(known)}; got {path.stem}")
    if read_recorded_prior(truth) != read_recorded_prior(tested):
        raise UsageError(
            f"--truth: {path.stem} has the prior {read_recorded_prior(truth)}, but the tested posterior has "
            f"{read_recorded_prior(tested)}",
            hint=run.suggest("hmc", base=name, prior_precision=INHERIT, name="truth"),
        )
    if truth.meta.get("method") not in _EXACT:
        run.console.warn(
            f"--truth {path.stem} is an approximation, so even an exact fit may have non-uniform ranks; use hmc"
        )


_WHITENED = ("hmc", "sghmc")  # by roots of their own, whatever the structure of the base


def _require_room(run: Run, options: SbcOptions, train: Split, header: Header) -> None:
    """Raise DeviceError where one fit does not fit in memory. Chains need a root of the covariance of all parameters."""
    structure = "full" if header.meta["method"] in _WHITENED else str(header.meta.get("structure"))
    if structure in memory.structures():
        needed = memory.fit_bytes(structure, train.layout, num_draws=options.draws)
        what = f"a fit of {train.layout.num_params} parameters with a {structure} covariance"
        memory.require(
            needed, run.device_name, what=what, hint="use a posterior with structure kron or diag, or a smaller head"
        )


@dataclass(frozen=True)
class Trial:
    """One fit to check.

    Args:
        problem: problem to simulate labels for.
        thetas: true parameters (M, P), float64.
        refit: repeats the fit.
        of_labels: quantity of theta and the labels to rank, LOG_JOINT or LOG_LIKELIHOOD.
    """

    problem: Problem
    thetas: Tensor
    refit: Refit
    of_labels: str = LOG_JOINT


_CLEAR = 3.0  # standard errors beyond which a shift or a spread is what is wrong


@dataclass(frozen=True)
class RankedQuantity:
    """Ranks of one quantity.

    Args:
        name: for people.
        ranks: (M,), 0..num_draws.
        num_draws: L.
        p_value: p-value of uniform ranks.
    """

    name: str
    ranks: NDArray[np.int64]
    num_draws: int
    p_value: float

    @property
    def mean_rank(self) -> float:
        """Return the mean rank in [0, 1]; 0.5 is expected."""
        return float(self.ranks.mean() / self.num_draws)

    @property
    def spread(self) -> float:
        """Return the variance of the ranks over that of uniform ranks."""
        return float(self.ranks.var() / ((self.num_draws + 1) ** 2 - 1) * 12)

    def coverage(self, share: float) -> float:
        """Return how often the central interval with this fraction of ranks, as nearly as whole ranks allow, has the truth."""
        lowest = round((1 - share) / 2 * (self.num_draws + 1))
        return float(((self.ranks >= lowest) & (self.ranks <= self.num_draws - lowest)).mean())

    @property
    def fault(self) -> str | None:
        """Return how the draws are clearly off, if they are: too low, too high, too narrow or too wide."""
        num = len(self.ranks)
        shift = (self.mean_rank - 0.5) * math.sqrt(12 * num)
        spread = (self.spread - 1) * math.sqrt(
            1.25 * num
        )  # of uniform numbers the variance of (x - mean)^2 is 4/5 of its mean squared
        if max(abs(shift), abs(spread)) < _CLEAR:
            return None
        if abs(shift) > abs(spread):
            return "too low" if shift > 0 else "too high"
        return "too narrow" if spread > 0 else "too wide"

    def to_json(self) -> dict[str, Any]:
        """Return the entry of --json."""
        return {
            "name": self.name,
            "p_value": self.p_value,
            "mean_rank": self.mean_rank,
            "spread": self.spread,
            "coverage_50": self.coverage(0.5),
            "coverage_90": self.coverage(0.9),
            "fault": self.fault,
        }


def rank_draws(run: Run, options: SbcOptions, train: Split, header: Header, truth: Path | None) -> list[RankedQuantity]:
    """Return the quantities with their ranks and p-values."""
    generator = run.stream("sbc/simulations")
    features = train.resident(run.device).float()
    rows = torch.randperm(len(features), generator=generator)[: options.examples].sort().values
    some = features[rows.to(features.device)]
    with _name_in_errors(header):
        if header.meta["method"] == "lbbnn":
            trial = latent_trial(run, header, some, of_all=features, num=options.simulations, generator=generator)
        else:
            observed = None if truth is None else (features, train.labels(run.device))
            prior = read_recorded_prior(header)
            assert prior is not None  # checked
            num, layout = options.simulations, train.layout
            thetas = (
                _draw_from_prior(prior, layout, num, generator)
                if truth is None
                else _draw_truths(truth, num, generator)
            )
            trial = Trial(Problem(some, layout, prior, observed), thetas, choose_refit(header))
        chosen = ranked_quantities(
            trial.problem.layout,
            _read_held_out(run, train, rows),
            run.stream("sbc/quantities"),
            of_labels=trial.of_labels,
        )
        ranks = rank_quantities(
            trial.problem,
            trial.thetas,
            trial.refit,
            ranked=chosen,
            num_draws=options.draws,
            generator=generator,
            progress=run.console,
        )
    law = RankLaw(options.simulations, options.draws)
    return [
        RankedQuantity(quantity.name, one, options.draws, law.p_value(one))
        for quantity, one in zip(chosen, ranks.numpy(), strict=True)
    ]


@contextmanager
def _name_in_errors(header: Header) -> Iterator[None]:
    """Name the posterior in errors of its fit, since the options that help are the posterior's."""
    try:
        yield
    except (DeviceError, NumericError) as error:
        error.message = f"fitting {header.path.stem} to simulated labels: {error.message}"
        error.hint = "fit the posterior with other options" + (f": {error.hint}" if error.hint else "")
        raise


_NOT_ASKED = Prior(1.0)  # a target has one; the refit has its own, and the log likelihood is ranked, which needs none


def latent_trial(
    run: Run, header: Header, features: Tensor, *, of_all: Tensor, num: int, generator: torch.Generator
) -> Trial:
    """So many truths from the posterior's prior, and its fit to labels simulated at features (n, D); warns of too few steps.

    The prior is that of features standardised as those `of_all` (N, D) are, where the fit's were.

    Raises:
        DeviceError: a fit has no room.
    """
    layout, options = NetworkLayout.from_meta(header.meta), read_options(header, len(features))
    assert layout.head is not None  # checked
    check_memory(options, layout, run.device, num_examples=len(features))
    plan = make_plan(options, len(features))
    with convert_lookup_errors(header.path):
        (slab_sd,) = header.meta["metrics"]["slab_sd"]
    warning = warn_of_short_plan(options, plan, len(features))
    if warning is not None:
        run.console.warn(f"fitting {header.path.stem} to {len(features)} simulated labels: {warning}")
    scaling = Scaling.of(of_all, run.device) if options.standardize else None

    def start(num_targets: int, stream: torch.Generator) -> LatentModel:
        count = num_targets * options.repeats
        return build_start(options, layout, [slab_sd], num_repeats=count, generator=stream, device=run.device)

    prior = SpikeAndSlab.constant(
        layout.num_layers,
        inclusion=options.prior_inclusion,
        slab_mean=options.slab_mean,
        slab_sd=slab_sd,
        bias_sd=options.bias_sd,
    ).to(run.device)
    thetas = prior_draws(layout, prior, num, generator, scaling)
    return Trial(Problem(features, layout.head, _NOT_ASKED), thetas, LatentRefit(start, plan, scaling), LOG_LIKELIHOOD)


def read_options(header: Header, num_examples: int) -> FitLbbnnOptions:
    """Return the recorded options of the fit, with the default epochs for the simulated number of examples."""
    names = {spec.name for spec in fields(FitLbbnnOptions)}
    with convert_lookup_errors(header.path):
        params = header.provenance["params"]
        recorded = FitLbbnnOptions(**{name: value for name, value in params.items() if name in names})
        left_open = replace(recorded, epochs=None)
        was_chosen = recorded.epochs == left_open.resolved(header.meta["num_examples"]).epochs
    return left_open.resolved(num_examples) if was_chosen else recorded


def _draw_from_prior(prior: Prior, layout: HeadLayout, num: int, generator: torch.Generator) -> Tensor:
    """theta (M, P)."""
    normal = torch.randn(num, layout.num_params, generator=generator, dtype=torch.float64)
    return prior.center(layout) + normal / prior.diagonal(layout).sqrt()


def _draw_truths(path: Path, num: int, generator: torch.Generator) -> Tensor:
    """Return theta (M, P) of a posterior, repeating its draws if it has fewer."""
    posterior, _ = open_posterior(path)
    drawn: Tensor = posterior.sample(num, generator).double()
    order = (
        torch.randint(len(drawn), (num,), generator=generator)
        if len(drawn) < num
        else torch.randperm(num, generator=generator)
    )
    return drawn[order]


_OF_FLOWS = ("length", "epochs", "batch_size", "learning_rate", "num_draws", "patience")


def choose_refit(header: Header) -> Refit:
    """Return a function that repeats a posterior's fit with its own options.

    Raises:
        DataError: the base that preconditioned it is gone or was replaced.
    """
    meta, params = header.meta, header.provenance.get("params", {})
    if meta["method"] == "hmc":
        return HmcRefit(dynamics=str(params.get("dynamics", "split")))
    if meta["method"] == "sghmc":
        return _sghmc(header)
    if meta["method"] != "refine":
        return _gaussian(meta)
    given: dict[str, Any] = {name: params[name] for name in _OF_FLOWS}
    given |= {"flow": meta["flow"], "space": meta["space"], "settings": meta["settings"]}
    return FlowRefit(str(meta.get("structure", "full")), given)


def _sghmc(header: Header) -> SghmcRefit:
    """Repeat the posterior's chains. Full batches there are full batches here."""
    metrics = header.meta["metrics"]
    cycles, batch_size = metrics["cycles"], metrics["batch_size"]
    plan = SghmcPlan(
        metrics["epochs"],
        cycles,
        metrics["draws"] // cycles,
        metrics["exploring_epochs"],
        batch_size if batch_size < header.meta["num_examples"] else sys.maxsize,
        metrics["learning_rate"],
        metrics["momentum_decay"],
        metrics["temperature"],
        is_cyclical=metrics["sampler"] == CYCLICAL,
        is_preconditioned=metrics["preconditioner"] == RMSPROP,
    )
    return SghmcRefit(
        plan,
        metrics["chains"],
        is_given=metrics["learning_rate_by"] == "given",
        from_initialisation=metrics["start"] == "init",
        base=_gaussian(read_base_header(header).meta) if metrics["preconditioner"] == BASE else None,
    )


def read_base_header(header: Header) -> Header:
    """Return the header of the Gaussian whose covariance preconditions a posterior's chains.

    Raises:
        DataError: its file is gone or was replaced.
    """
    entry = next(one for one in header.inputs if one["role"] == "base")
    path = header.input_path(entry)
    found = read_header(path) if path.is_file() else None
    if found is None or found.content_digest != entry["content_digest"]:
        raise DataError(
            f"\0posterior\0: {header.path.stem} is preconditioned by {path.stem}, which must be fitted again "
            f"too; expected it at {path}, found {'nothing' if found is None else 'another file'}",
            hint="run fit-sghmc again, or with \0preconditioner\0 none",
            path=path,
        )
    return found


def _vi(metrics: dict[str, Any]) -> Callable[..., Gaussian]:
    """Repeat the posterior's mean-field variational inference, without early stopping."""

    def fit(target: LastLayerTarget, start: Tensor, generator: torch.Generator, progress: Progress) -> Gaussian:
        plan = ViPlan(
            metrics["epochs"],
            min(metrics["batch_size"], target.num_examples),
            **{name: metrics[name] for name in ("learning_rate", "num_draws", "estimator", "optimizer", "kl_weight")},
        )
        return fit_vi(target, plan, start=start, generator=generator, progress=progress).gaussian

    return fit


def _swag(metrics: dict[str, Any]) -> Callable[..., Gaussian]:
    """Repeat the posterior's SWAG, at its learning rate."""

    def fit(target: LastLayerTarget, start: Tensor, generator: torch.Generator, progress: Progress) -> Gaussian:
        plan = SwagPlan(
            warmup=metrics["warmup"],
            epochs=metrics["iterates"],
            batch_size=min(metrics["batch_size"], target.num_examples),
            **{name: metrics[name] for name in ("rank", "learning_rate", "momentum", "scale")},
        )
        return fit_swag(target, plan, start=start, generator=generator, progress=progress).gaussian

    return fit


_TRAINED = {"vi": _vi, "swag": _swag}


def _gaussian(meta: dict[str, Any]) -> GaussianRefit | TrainedRefit:
    """Return the refit of a Gaussian with this header."""
    if meta["method"] in _TRAINED:
        return TrainedRefit(_TRAINED[meta["method"]](meta["metrics"]))
    return GaussianRefit(str(meta.get("structure", "full")))


def _read_held_out(run: Run, train: Split, rows: Tensor) -> Tensor:
    """Return features (R, D) of examples without simulated labels: of val, else of train."""
    if run.folder.features("val").is_file():
        return load_split(run, "val").features(torch.device("cpu"))
    features = train.features(torch.device("cpu"))
    others = torch.ones(len(features), dtype=torch.bool)
    others[rows] = False
    return features[others] if bool(others.any()) else features


class SbcVerdict(NamedTuple):
    """Verdict on the ranks, as a word and a sentence."""

    is_calibrated: bool
    sentence: str


def judge_ranks(ranked: list[RankedQuantity], name: str, options: SbcOptions) -> SbcVerdict:
    """Judge the ranks. Uniform ranks of all quantities fail with probability at most `level` (Bonferroni)."""
    odd = [one for one in ranked if one.p_value <= options.level / len(ranked)]
    if not odd:
        return SbcVerdict(
            True,
            f"the fit of {name} is calibrated, as far as {options.simulations} simulations show: the ranks of "
            f"all {len(ranked)} quantities are uniform",
        )
    told = ", ".join(
        f"{one.name} ({one.fault or 'uneven'}, p {format_p_value(one.p_value)})"
        for one in sorted(odd, key=lambda one: one.p_value)[:4]
    )
    more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    return SbcVerdict(
        False,
        f"the fit of {name} is not calibrated: the ranks of {len(odd)} of {len(ranked)} quantities are not "
        f"uniform: {told}{more}",
    )


def _table(ranked: list[RankedQuantity], options: SbcOptions) -> Table:
    cells = [
        [
            one.name,
            format_p_value(one.p_value),
            f"{one.mean_rank:.3f}",
            f"{one.spread:.2f}",
            percent(one.coverage(0.5)),
            percent(one.coverage(0.9)),
        ]
        for one in ranked
    ]
    note = (
        f"{options.simulations} simulations; p of uniform ranks, significant below {options.level / len(ranked):.3g}; mean rank: 0.5 if "
        "unbiased; spread: above 1 if the draws are too narrow; 50%, 90%: coverage of these intervals"
    )
    return Table(["quantity", "p", "mean rank", "spread", "50%", "90%"], cells, notes=[note])


_LEAST = 1e-12  # of a p-value: below it the sum over paths is rounding


def format_p_value(value: float) -> str:
    """Format a p-value."""
    return f"below {_LEAST:g}" if value < _LEAST else f"{value:.2g}"


def _failure(sentence: str) -> CheckFailed:
    return CheckFailed(f"--strict: {sentence}", code="not_calibrated")


def _plot(path: Path, ranked: list[RankedQuantity], options: SbcOptions, name: str) -> list[dict[str, Any]]:
    """Draw and publish the figure, and return its output entries."""

    law = RankLaw(options.simulations, options.draws)
    figure = draw_ranks(
        {one.name: one.ranks for one in ranked},
        law,
        level=options.level / len(ranked),
        title=f"{name}, {options.simulations} simulations",
    )
    digest = write_figure(path, render(figure, path.suffix[1:].lower()))
    return [{"role": "sbc.plot", "path": str(path), "content_digest": digest}]
