"""sbc: a fit of the run tried on labels simulated from known parameters; a verdict on whether its posteriors are what they claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import CheckFailed, UsageError
from bnncli.inference import memory
from bnncli.names import percent
from bnncli.options.command import READ, Command, ComputeOptions, InputOptions
from bnncli.options.sbc import PRIOR, SbcOptions
from bnncli.options.shared import INHERIT
from bnncli.session.inputs import Split, load_split, posterior_source, recorded_prior
from bnncli.session.out_of_fold import TRAIN, fit_on, load_fitted, require_features
from bnncli.session.predictions import find_named
from bnncli.session.run import Result, Run, Table, source_json
from bnncli.stages.sbc.judged import RankedQuantity, p_text, verdict_of

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
_OF_GAUSSIAN_PRIORS = ("laplace", "refine", "hmc", "vi", "swag", "sghmc")
_EXACT = ("hmc", "merge")  # draws of the posterior itself
METHODS = (*_OF_GAUSSIAN_PRIORS, _LATENT)
_ANOTHER = "name one over the last layer that can be fitted again, such as --posterior laplace or --posterior hmc"
_WHITENED = ("hmc", "sghmc")  # by roots of their own, whatever the structure of the base
_POINT = "it is a point, with no draws to rank the truth among"
_APART = "its networks were trained separately, and simulated last-layer labels cannot train them again"
_NO_FIT = {  # by method, why not; it may have another name
    "map": _POINT,
    "temperature": _POINT,
    "prune": _POINT,
    "merge": "it merges several hmc fits; test one of them",
    "ensemble": _APART,
    "mola": _APART,
}


def run(run: Run, options: SbcOptions) -> Result:
    """Simulate, fit, rank and judge; nothing is written but a figure."""
    require_features(run)
    path = find_named(
        run, options.posterior, flag="--posterior", otherwise=run.suggest("fit-laplace", name=options.posterior)
    )
    header, source = posterior_source(run, path, "posterior")
    train = load_split(run, "train") if fit_on(header) == TRAIN else load_fitted(run, fit_on(header))
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
    from bnncli.stages.sbc import work  # slow to import

    ranked = work.ranked(run, options, train, header, truth)
    verdict = verdict_of(ranked, path.stem, options)
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


def _check_can_be_tried(path: Path, header: Header) -> None:
    """Raise UsageError for a posterior whose fit cannot be made anew from labels and features alone."""
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
    if recorded_prior(header) is None:
        raise UsageError(f"--posterior: {path.stem} records no prior")


def _check_latent(path: Path, header: Header) -> None:
    """Raise UsageError for a latent binary network with hidden layers, or whose prior is not what it was told."""
    with interpreting(path):
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


def _require_room(run: Run, options: SbcOptions, train: Split, header: Header) -> None:
    """Pass where one fit has room. Raises DeviceError otherwise; chains move in coordinates with a root of all parameters."""
    structure = "full" if header.meta["method"] in _WHITENED else str(header.meta.get("structure"))
    if structure in memory.structures():
        needed = memory.fit_bytes(structure, train.layout, num_draws=options.draws)
        what = f"a fit of {train.layout.num_params} parameters with a {structure} covariance"
        memory.require(
            needed, run.device_name, what=what, hint="use a posterior with structure kron or diag, or a smaller head"
        )


def _check_is_truth(run: Run, path: Path, truth: Header, posterior: tuple[str, Header]) -> None:
    """Raise UsageError where the parameters are of another target; warn where they are no exact draws of it."""
    name, tested = posterior
    known = tuple(dict.fromkeys((*_OF_GAUSSIAN_PRIORS, *_EXACT)))
    if truth.meta.get("layers") is not None or truth.meta.get("method") not in known:
        raise UsageError(f"--truth: expected prior, or a last-layer posterior from {', '.join(known)}; got {path.stem}")
    if recorded_prior(truth) != recorded_prior(tested):
        raise UsageError(
            f"--truth: {path.stem} has the prior {recorded_prior(truth)}, but the tested posterior has "
            f"{recorded_prior(tested)}",
            hint=run.suggest("hmc", base=name, prior_precision=INHERIT, name="truth"),
        )
    if truth.meta.get("method") not in _EXACT:
        run.console.warn(
            f"--truth {path.stem} is an approximation, so even an exact fit may have non-uniform ranks; use hmc"
        )


def _table(ranked: list[RankedQuantity], options: SbcOptions) -> Table:
    cells = [
        [
            one.name,
            p_text(one.p_value),
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


def _plot(path: Path, ranked: list[RankedQuantity], options: SbcOptions, name: str) -> list[dict[str, Any]]:
    """The figure, published; as the result's outputs."""
    from bnncli.evaluation.rank_uniformity import RankLaw
    from bnncli.figures import render
    from bnncli.figures.chains import draw_ranks

    law = RankLaw(options.simulations, options.draws)
    figure = draw_ranks(
        {one.name: one.ranks for one in ranked},
        law,
        level=options.level / len(ranked),
        title=f"{name}, {options.simulations} simulations",
    )
    digest = write_figure(path, render(figure, path.suffix[1:].lower()))
    return [{"role": "sbc.plot", "path": str(path), "content_digest": digest}]


def _failure(sentence: str) -> CheckFailed:
    return CheckFailed(f"--strict: {sentence}", code="not_calibrated")
