"""Fit a Laplace approximation over the last layer: the mode, the structure, the search for the prior precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli import registry
from bnncli.commands.fit_laplace.shared import (
    Laplace,
    fit_meta,
    fit_metrics,
    warn_of_edge,
    warn_of_jitter,
    warn_of_missing_classes,
)
from bnncli.errors import DataError, UsageError
from bnncli.evaluation.temperature import LabelledLogits, fit_temperature
from bnncli.inference import memory, structure_choice
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.memory import NUM_DRAWS
from bnncli.inference.mode import find_suitable_mode
from bnncli.inference.prior_criterion import LeftOutExamples
from bnncli.inference.prior_search import (
    BOUNDS,
    PLUG_IN,
    SAMPLED,
    PlugInChoice,
    PriorSearch,
    SearchRows,
    choose_structure,
    first_near_the_best,
    is_short_search,
    search,
    search_rows,
    search_size,
)
from bnncli.inference.prior_variants import Fold, FoldSearch, search_folds, stratified_folds
from bnncli.inference.row_space import RowLift, lift_fit
from bnncli.inference.structure_choice import NUM_FOLDS, QUICK_SECONDS, SEARCH_FITS, SEARCH_MODES, fit_seconds
from bnncli.lazy import torch
from bnncli.names import format_duration
from bnncli.parameters.layouts import HeadLayout, MatrixLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.point import Point
from bnncli.progress import Progress
from bnncli.session import revisions as _revisions
from bnncli.session.costs import Cost
from bnncli.session.fits import FitInputs, FitOutput, Fitting
from bnncli.session.inputs import VAL, Split
from bnncli.session.out_of_fold import GaussianFolds, select_fitted_rows
from bnncli.session.row_spaces import row_space, span_to_fit
from bnncli.session.run import Run
from bnncli.system.devices import estimate_speed
from bnncli.system.memory import budget, bytes_text
from bnncli.targets.last_layer import HeldOutFeatures, LastLayerTarget
from bnncli.targets.target import counting_passes

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.commands.fit_laplace import FitLaplaceOptions
    from bnncli.posteriors.gaussian import Gaussian
    from bnncli.targets.row_space import RowSpace


def check_last_layer(inputs: FitInputs, options: FitLaplaceOptions) -> None:
    """Refuse options that the run's head cannot take, and warn of few examples and missing classes."""
    train, val = inputs.train, inputs.val
    if options.own_bias_precision is not None and not train.layout.has_bias:
        raise UsageError("--bias-precision: the head has no bias")
    if options.own_center == "checkpoint" and train.content.head_weight is None:
        raise UsageError("--center checkpoint: this run has only features, no network; use --center mode")
    if options.prior_mean == "checkpoint" and train.content.head_weight is None:
        raise UsageError("--prior-mean checkpoint: this run has only features, no network; use --prior-mean zero")
    if inputs.num_examples < train.layout.num_features:
        inputs.run.console.warn(
            f"there are fewer training examples ({inputs.num_examples}) than features "
            f"({train.layout.num_features}), so the prior determines most of the posterior"
        )
    warn_of_missing_classes(inputs.run, [train] if val is None or VAL in options.fit_on else [train, val])


@dataclass(frozen=True)
class LastLayerLaplace(Laplace):
    """A fit over the last layer."""

    @cached_property
    def span(self) -> HeadLayout | None:
        """Return the layout within the span of the features; None to fit all of theta.

        With fewer examples than features, the mode lies in that span. A checkpoint's head need not.
        """
        if self.options.own_center != "mode":
            return None
        return span_to_fit(self.inputs.run, self.inputs.train, structure=self.options.structure, num_draws=NUM_DRAWS)

    @property
    def layout(self) -> HeadLayout:
        """Return the layout of the fitted parameters, which may lie in the span of the features."""
        return self.span or self.inputs.train.layout

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the further sizes that the memory of a fit depends on."""
        return {"num_draws": NUM_DRAWS, "whole": self.inputs.train.layout if self.span else None}

    @cached_property
    def structure(self) -> str:
        """Choose the structure to fit first, and warn where auto takes a rough one."""
        run, wanted = self.inputs.run, self.options.structure
        if wanted != "auto":
            return wanted
        chosen = structure_choice.automatic_structure(
            self.layout, budget(run.device_name), device=run.device_name, **self.sizes
        )
        if chosen != memory.structures()[0]:
            is_search, num_examples = self.criterion != "number", self.inputs.num_examples
            text = _cost_text(run, chosen, self.layout, num_examples, is_search=is_search, sizes=self.sizes)
            run.console.warn(text)
        return chosen

    @property
    def algo_rev(self) -> int:
        """Return the revision of the algorithm."""
        return _revisions.of_laplace(in_span=self.span is not None)

    def estimate_memory(self) -> None:
        """Check the memory.

        Raises:
            DeviceError: it is short. The message names the largest structure that fits.
        """
        run = self.inputs.run
        if VAL in self.options.fit_on:
            _require_folds(run, self.inputs.train)
        memory.require_fit(self.structure, self.layout, run.device_name, **self.sizes)

    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""
        layout = self.inputs.train.layout
        folds = 8 * NUM_FOLDS * layout.num_params if VAL in self.options.fit_on else 0
        return folds + memory.stored_bytes(self.structure, self.layout, whole=self.sizes["whole"])

    def fit(self, fitting: Fitting) -> FitOutput:
        """Fit the Gaussian and measure it on val."""
        return fit_last_layer(self, fitting.train, fitting.val)


def _require_folds(run: Run, fitted: Split) -> None:
    """Raise DeviceError where memory cannot hold one copy per fold of the features that the search reads."""
    num_examples, num_features = fitted.content.features.shape
    layout = fitted.layout
    searched = search_size(
        num_examples, num_params=layout.num_params, num_outputs=layout.num_outputs, device=run.device
    )
    memory.require(
        4 * NUM_FOLDS * searched * num_features,
        run.device_name,
        what=f"{NUM_FOLDS} folds of {searched:,} rows of {num_features:,} features",
        hint="use \0fit_on\0 val, or hold out fewer rows",
    )


def _cost_text(
    run: Run, chosen: str, layout: MatrixLayout, num_examples: int, *, is_search: bool, sizes: Mapping[str, Any]
) -> str:
    """Describe what `chosen` and the structures closer to the posterior cost, and which of them do not fit in memory."""
    available, speed = budget(run.device_name), estimate_speed(run.device)
    closer = memory.structures()[: memory.structures().index(chosen)]
    needed = {name: memory.fit_bytes(name, layout, **sizes) for name in (*closer, chosen)}
    fitting = [name for name in closer if needed[name] <= available]
    too_large = [name for name in closer if name not in fitting]
    searched = search_size(
        num_examples, num_params=layout.num_params, num_outputs=layout.num_outputs, device=run.device
    )

    def cost(name: str) -> str:
        seconds = fit_seconds(name, layout, num_examples=num_examples, speed=speed)
        if is_search:
            counts = {"num_fits": SEARCH_FITS - 1, "num_modes": SEARCH_MODES - 1}
            seconds += fit_seconds(name, layout, num_examples=searched, speed=speed, **counts)
        return f"about {bytes_text(needed[name])} and {format_duration(seconds)}"

    text = f"using {chosen} for {layout.num_params:,} parameters ({cost(chosen)})"
    if fitting:
        text += "; closer to the posterior: " + ", ".join(f"--structure {name} ({cost(name)})" for name in fitting)
    if too_large:
        needs = ", ".join(f"{name} needs {bytes_text(needed[name])}" for name in too_large)
        text += f"; {needs}, but only {bytes_text(available)} can be used"
    return text


class _Fitted(NamedTuple):
    """A fit with its search.

    Args:
        fit: to all rows.
        found: search for the prior precision, if any.
        counts: metrics with the number of examples that the search read, for splits that it read only in part.
        compared: val NLL of the structures compared, if any.
        modes: (folds, P) float64, without each fold, if the fit has folds.
    """

    fit: LaplaceFit
    found: PriorSearch | FoldSearch | None
    counts: dict[str, int]
    compared: dict[str, float] | None = None
    modes: Tensor | None = None


def fit_last_layer(method: LastLayerLaplace, train: Split, val: Split | None, *, only_draws: bool = False) -> FitOutput:
    """Fit the Gaussian, search for its prior precision where none is given, and measure it on val.

    Args:
        only_draws: True to choose a precision that suits draws even where the mode alone would predict better.
    """
    run, options, criterion, structure = method.inputs.run, method.options, method.criterion, method.structure
    start = train.start().to(run.device)
    # A search replaces the precision of the weights by its candidates.
    weight_precision = float(options.prior_precision) if criterion == "number" else 1.0
    if VAL not in options.fit_on:
        _note_memorised(run, train, val)
    folds = _assign_folds(run, val) if val is not None and VAL in options.fit_on else None
    priors = _priors(run, options, Prior(weight_precision, options.own_bias_precision), train, val, folds)
    target = whole_target = train.target(priors[0], run.device)
    held_out = None
    if criterion == "val" and val is not None and folds is None:
        held_out = target.held_out(val.features(run.device), val.labels(run.device))
    rows = None if method.span is None else row_space(target)
    lift = None if rows is None else RowLift(rows, target.prior)
    if rows is not None:
        target, start = rows.target(target), rows.reduce(start)
    with counting_passes() as tally:
        if folds is None:
            fitted = _fit_on_train(
                run,
                options,
                criterion,
                structure,
                target,
                start=start,
                lift=lift,
                held_out=held_out,
                val=val,
                only_draws=only_draws,
            )
        else:
            own = priors[1:] if rows is None else [rows.prior(prior) for prior in priors[1:]]
            fitted = _fit_with_folds(
                run, criterion, structure, target, folds=folds, priors=own, start=start, in_span=rows is not None
            )
    found = fitted.found
    if found is not None:
        warn_of_edge(run, found)
    # A mode in the span is lifted to all parameters; outside the span the posterior is the prior.
    fit = fitted.fit if lift is None else lift_fit(fitted.fit, lift)
    warn_of_jitter(run, fit.gaussian)
    by_fold = None if folds is None else _gather_folds(fit.gaussian, fitted, folds, priors[1:], whole_target, rows)
    metrics = fit_metrics(run, fit, found, criterion, train, val, posterior=by_fold)
    fold_meta = {} if by_fold is None else {"fit_on": options.fit_on, "num_folds": len(by_fold)}
    metrics |= fold_meta
    metrics |= {"center": options.own_center, "structure_nll": fitted.compared, **fitted.counts}
    if found is not None and found.structure != structure and options.structure != "auto":
        metrics["prior_precision_structure"] = found.structure
    metrics |= Cost.of_fit(tally.passes, is_last_layer=True).to_metrics()
    tensors, meta = fit.gaussian.to_tensors()
    # float32 holds all digits that float32 products gave the Hessian, in half the file.
    tensors |= {name: part.float() for name, part in fit.hessian.items() if name not in tensors}
    meta |= {**fit_meta(options, criterion, fit.gaussian, found), **fold_meta}
    if by_fold is not None:
        tensors |= by_fold.to_tensors()
    return FitOutput(tensors, meta, metrics, train)


def _gather_folds(
    gaussian: Gaussian,
    fitted: _Fitted,
    folds: Tensor,
    priors: Sequence[Prior],
    target: LastLayerTarget,
    rows: RowSpace | None,
) -> GaussianFolds:
    """Return the Gaussians without each fold.

    Args:
        gaussian: of all rows.
        priors: prior of each fold.
        target: log posterior of all of theta given all rows.
        rows: the span that the modes lie in, if any.
    """
    modes, prior = fitted.modes, gaussian.require_prior()
    assert modes is not None
    if rows is not None:
        pairs = zip(modes, priors, strict=True)
        modes = torch.stack([rows.lift_about(mode, own_prior.to(target.device)) for mode, own_prior in pairs])
    num_fitted = target.num_examples
    return GaussianFolds.of(gaussian, modes, folds, num_fitted=num_fitted, target=lambda: target.with_prior(prior))


_MEMORISED = 1 / 3  # ratio of the NLL on train to that on val


_MOST_ROWS = 10_000  # of each split, to estimate the two


def _note_memorised(run: Run, train: Split, val: Split | None) -> None:
    """Note where the network has memorised the rows to fit, which then say little about its errors elsewhere."""
    head = train.head()
    if head is None or val is None or val.content.labels is None or min(len(train.stored), len(val.stored)) < 2:
        return
    point, found = Point(head.to(run.device), train.layout), []
    for split in (train, val):
        order = torch.randperm(len(split.stored), generator=run.stream("fit-laplace/memorised"))
        some = split.take(order[:_MOST_ROWS].sort().values)
        losses = train.layout.likelihood.losses(some.logits(point, run.device), some.labels(run.device), 1.0)
        found.append((float(losses.mean()), float(losses.std()) / math.sqrt(len(losses))))
    (own, own_error), (other, other_error) = found
    if own < _MEMORISED * other and other - own > 3 * math.hypot(own_error, other_error):
        run.console.info(
            f"the network has memorised train (NLL {own:.3g} on train, {other:.3g} on val); fit to rows that it "
            "has not seen, with --fit-on train+val or with --fit-on val --prior-mean checkpoint"
        )


def _assign_folds(run: Run, val: Split) -> Tensor:
    """Return the fold of each row of val, (N,) uint8. Raises DataError where val has fewer than two rows or groups."""
    labels, groups = val.labels(torch.device("cpu")), val.groups
    count, what = (len(labels), "rows") if groups is None else (len(groups), "groups")
    if count < 2:
        raise DataError(
            f"--fit-on: cross-validation needs at least 2 {what} of val; got {count}",
            hint="hold out more, or use --fit-on train",
        )
    return stratified_folds(labels, min(NUM_FOLDS, count), run.stream("fit-laplace/folds"), groups=groups)


def _priors(
    run: Run, options: FitLaplaceOptions, prior: Prior, train: Split, val: Split | None, folds: Tensor | None
) -> list[Prior]:
    """Return the prior of the fit to all rows, then of the fit to each fold, with their means."""
    left_out = [] if folds is None else [folds == place for place in range(int(folds.max()) + 1)]
    if options.prior_mean == "zero":
        return [prior] * (1 + len(left_out))
    return [prior.with_mean(scale * train.start(), scale) for scale in _compute_mean_scales(run, val, left_out)]


def _compute_mean_scales(run: Run, val: Split | None, left_out: Sequence[Tensor]) -> list[float]:
    """Return one over the best temperature of the network's logits on val, then the same without each set of rows.

    Args:
        left_out: masks (N,) of the rows to leave out.

    Returns:
        1 + len(left_out) scales; a single 1 without labelled val.
    """
    if val is None or val.content.labels is None:
        return [1.0]
    point = Point(val.start().to(run.device), val.layout)
    logits, labels = val.logits(point, run.device), val.labels(run.device)
    scales = []
    for rows in (torch.zeros(len(labels), dtype=torch.bool), *left_out):
        kept = ~rows.to(run.device)
        fit = fit_temperature(LabelledLogits(logits[kept], labels[kept], val.layout.likelihood))
        scales.append(1.0 if fit.unbounded is not None else 1 / fit.temperature)
        if fit.unbounded is not None and len(scales) == 1:
            why = f"no optimal temperature exists on val ({fit.unbounded})"
            run.console.warn(f"{why}: the prior's mean is the checkpoint's last layer unchanged")
    return scales


class SearchExamples(NamedTuple):
    """The examples that a search for the prior precision reads.

    Args:
        target: log posterior on the training examples it reads.
        held_out: held-out examples it reads.
        counts: metrics with the number of examples, for splits that it reads only in part.
        share: fraction of the training examples that `target` has.
        is_large: True where modes are so slow that precisions far from the checkpoint's own are skipped.
    """

    target: LastLayerTarget
    held_out: HeldOutFeatures | None
    counts: dict[str, int]
    share: float = 1.0
    is_large: bool = False


_NEAR = 10**0.5  # factor around one structure's best precision to search for another's, before searching everywhere


@dataclass(frozen=True)
class _Searcher:
    """Searches for the prior precision of a target, with any structure.

    Args:
        target: log posterior of all examples.
        lift: map from the span of the features to all of theta, if the fit is in the span.
        examples: what a search reads of the target and of val.
    """

    run: Run
    criterion: str
    center: str
    target: LastLayerTarget
    lift: RowLift | None
    examples: SearchExamples

    def search(
        self,
        searched: str,
        *,
        fitted: str | None = None,
        start: Tensor,
        generator: torch.Generator,
        bounds: tuple[float, float] = BOUNDS,
    ) -> PriorSearch:
        """Search with one structure; fit another, or all examples, at the precision that was found.

        Args:
            searched, fitted: the structures; by default the same.
        """
        with counting_passes(self.examples.share):
            found = search(
                self.examples.target,
                start=start,
                generator=generator,
                structure=searched,
                center=self.center,
                criterion=self.criterion,
                held_out=self.examples.held_out,
                bounds=bounds,
                is_large=self.examples.is_large,
                lift=None if self.criterion == "loo" else self.lift,
                progress=self.run.console,
            )
        fitted = fitted or searched
        if searched == fitted and self.examples.share == 1:
            return found
        return replace(found, fit=_refit(found, self.target, fitted, self.center, start, self.run.console))

    def search_near(
        self, structure: str, *, start: Tensor, generator: torch.Generator, around: float | None
    ) -> PriorSearch:
        """Search near the precision `around` if given, and everywhere if the best one is not inside that range."""
        if around is not None:
            bounds = max(BOUNDS[0], around / _NEAR), min(BOUNDS[1], around * _NEAR)
            near = self.search(structure, start=start, generator=generator.clone_state(), bounds=bounds)
            if not near.at_edge:
                return near
        return self.search(structure, start=start, generator=generator)


def _fit_on_train(
    run: Run,
    options: FitLaplaceOptions,
    criterion: str,
    closest: str,
    target: LastLayerTarget,
    *,
    start: Tensor,
    lift: RowLift | None,
    held_out: HeldOutFeatures | None,
    val: Split | None,
    only_draws: bool,
) -> _Fitted:
    """Fit to the training split, at the given prior precision or at the one that `criterion` chooses.

    Args:
        closest: the structure to fit, closest to the posterior; val may choose a simpler one.
    """
    center = options.own_center
    if criterion == "number":
        fit = fit_gaussian(target, structure=closest, center=center, start=start, progress=run.console)
        return _Fitted(fit, None, {})
    if criterion == "loo":
        examples = SearchExamples(target, LeftOutExamples.of(target, run.stream("fit-laplace/loo")), {})
    elif lift is None:
        examples = _examples_to_search(run, target, held_out, val, center=center)
    else:
        examples = SearchExamples(target, held_out, {})
    searcher = _Searcher(run, criterion, center, target, lift, examples)

    fitted, searched = closest, closest
    if (
        criterion == "val" and lift is None
    ):  # a search fits ten Gaussians or more: quicker ones, where that saves enough
        if options.structure == "auto":
            num_examples = examples.target.num_examples
            fitted = rough_structure_to_search(run, closest, target.layout, num_examples=num_examples)
        searched = _structure_to_search(run, fitted, target.layout)
    found = searcher.search(searched, fitted=fitted, start=start, generator=run.stream("fit-laplace/val"))

    compared: dict[str, float] | None = None
    plug_in = None if only_draws else found.plug_in
    is_free = options.structure == "auto" and criterion == "val"
    found = _prefer_plug_in(found, plug_in, target, closest if is_free else None, center, run.console)
    if is_free and found.integrator == SAMPLED:
        found, compared = _choose_structure_by_val(searcher, found, closest=closest)
        found = _prefer_plug_in(found, plug_in, target, closest, center, run.console)
    return _Fitted(found.fit, found, examples.counts, compared)


def _examples_to_search(
    run: Run, target: LastLayerTarget, held_out: HeldOutFeatures | None, val: Split | None, *, center: str
) -> SearchExamples:
    """Return the examples that a search reads, and note where it reads only a part. Without held_out it reads all."""
    everything = SearchExamples(target, held_out, {})
    if held_out is None or val is None:
        return everything
    sizes = {"train": target.num_examples, "val": len(val.stored)}
    rows = search_rows(
        sizes["train"],
        sizes["val"],
        num_params=target.layout.num_params,
        num_outputs=target.layout.num_outputs,
        device=target.device,
        generator=run.stream("fit-laplace/search"),
    )
    if center != "mode":  # no modes are searched for, and the one Hessian is that of all examples
        rows = replace(rows, train=None)
    counts = _count_rows(rows)
    if not counts:
        is_large = center == "mode" and is_short_search(
            sizes["train"], num_params=target.layout.num_params, device=target.device
        )
        if is_large:
            run.console.info(
                "searching for the prior precision around the checkpoint's own, until the predictions get worse"
            )
        return everything._replace(is_large=is_large)
    part = " and ".join(f"{count:,} of {sizes[name]:,} examples of {name}" for name, count in counts.items())
    run.console.info(f"searching for the prior precision with {part}; the final fit uses all")
    return SearchExamples(
        target if rows.train is None else target.some(rows.train),
        held_out if rows.val is None else target.held_out(val.stored[rows.val], val.labels(rows.val.device)[rows.val]),
        _count_metrics(counts),
        1.0 if rows.train is None else len(rows.train) / target.num_examples,
        is_large=True,
    )


def _count_rows(rows: SearchRows) -> dict[str, int]:
    parts = {"train": rows.train, "val": rows.val}
    return {name: len(part) for name, part in parts.items() if part is not None}


def _count_metrics(counts: dict[str, int]) -> dict[str, int]:
    return {f"prior_precision_{name}_examples": count for name, count in counts.items()}


def _refit(
    found: PriorSearch, target: LastLayerTarget, structure: str, center: str, start: Tensor, progress: Progress
) -> LaplaceFit:
    """Fit another structure, or all examples, at the precision that was found."""
    gaussian = found.fit.gaussian
    target = target.with_prior(gaussian.require_prior())
    if (
        center == "mode"
    ):  # the mode of a part of the examples may be farther from the mode of all than the checkpoint is
        both = torch.stack([gaussian.mean.double(), start.to(gaussian.mean.device).double()])
        start = both[target.log_joint(both).argmax()]
    return fit_gaussian(target, structure=structure, center=center, start=start, progress=progress)


_DEARER = (
    8  # search with a rougher structure first where the structure to fit would take more than this many times as long
)


def rough_structure_to_search(run: Run, structure: str, layout: MatrixLayout, *, num_examples: int) -> str:
    """Return the structure to search with first where val also chooses the structure: the quickest, if that saves enough time.

    A search fits ten Gaussians or more. Twice 16 full covariances of 2,570 parameters took 30 s, Kronecker factors 2 s.
    """
    quick = structure_choice.automatic_structures(layout, budget(run.device), device=run.device, num_draws=NUM_DRAWS)
    if structure not in quick:
        return structure
    speed = estimate_speed(run.device)
    counts = {"num_fits": SEARCH_FITS, "num_modes": SEARCH_MODES}
    seconds = {
        name: fit_seconds(name, layout, num_examples=num_examples, speed=speed, **counts)
        for name in quick[quick.index(structure) :]
        if name != "diag"  # whose draws predict so badly that it may prefer a precision of its own
    }
    rough = min(seconds, key=lambda name: seconds[name])
    is_dear = seconds[structure] > QUICK_SECONDS and seconds[structure] > _DEARER * seconds[rough]
    return rough if is_dear else structure


def _structure_to_search(run: Run, structure: str, layout: MatrixLayout) -> str:
    """Return the structure to search with: the one to fit or, where that is too slow for auto to take, a quicker one.

    A search fits ten Gaussians or more. With a quicker structure, the requested one is fitted once, at the precision found.
    """
    quick = structure_choice.automatic_structures(layout, budget(run.device), device=run.device, num_draws=NUM_DRAWS)
    if structure in quick or not quick or structure not in memory.structures()[: memory.structures().index(quick[0])]:
        return structure
    run.console.info(
        f"searching for the prior precision with {quick[0]}: ten {structure} covariances of "
        f"{layout.num_params:,} parameters would take long"
    )
    return quick[0]


def _prefer_plug_in(
    found: PriorSearch,
    plug_in: PlugInChoice | None,
    target: LastLayerTarget,
    structure: str | None,
    center: str,
    progress: Progress,
) -> PriorSearch:
    """Replace a search by the precision whose mode alone predicts val best, where draws predict worse at every precision.

    Args:
        structure: structure to fit at that precision; None for the search's own.
    """
    if plug_in is None:
        return found
    gaussian = found.fit.gaussian
    sampled = found.judge.losses(target.with_prior(gaussian.require_prior()), gaussian.mean, gaussian.covariance)
    if first_near_the_best({SAMPLED: sampled, PLUG_IN: found.judge.plug_in_losses(plug_in.theta)}) == SAMPLED:
        return found
    own = target.with_prior(target.prior.with_weight_precision(plug_in.precision))
    structure = structure or gaussian.covariance.structure
    fit = fit_gaussian(own, structure=structure, center=center, start=plug_in.theta, progress=progress)
    return replace(
        found, best=plug_in.precision, curve=plug_in.curve, at_edge=plug_in.at_edge, fit=fit, integrator=PLUG_IN
    )


def _choose_structure_by_val(
    searcher: _Searcher, found: PriorSearch, *, closest: str
) -> tuple[PriorSearch, dict[str, float] | None]:
    """Choose among the quick structures by their NLL on val. Where the exact one is quick, take it without comparing.

    Args:
        found: search with the closest structure or a rougher one.
        closest: the structure closest to the posterior.

    Returns:
        The search with the chosen structure, and the val NLL of each structure compared; None where none were.
    """
    run, target = searcher.run, searcher.target
    layout, whole = target.layout, None if searcher.lift is None else searcher.lift.layout
    gaussian = found.fit.gaussian
    first = gaussian.covariance.structure
    quick = structure_choice.automatic_structures(
        layout, budget(run.device), device=run.device, num_draws=NUM_DRAWS, whole=whole
    )
    if whole is not None:  # a diagonal in the basis of the span, for example, is not diagonal in theta
        quick = [name for name in quick if registry.read_declared("curvature", name, "is_same_in_span")]
    others = quick[quick.index(closest) :] if closest in quick else []
    if others and closest in registry.list_declaring("curvature", "is_exact"):
        if first != closest:
            generator = run.stream("fit-laplace/val")
            found = searcher.search_near(closest, start=gaussian.mean, generator=generator, around=found.best)
        return found, None
    if len(others) < 2:
        return found, None
    choice = choose_structure(target.with_prior(gaussian.require_prior()), found.fit, others, judge=found.judge)
    if choice.structure != first:
        is_closer = others.index(choice.structure) < others.index(first)
        again = searcher.search_near(
            choice.structure,
            start=gaussian.mean,
            generator=run.stream("fit-laplace/val"),
            around=found.best if is_closer else None,
        )
        if is_closer or dict(again.curve)[again.best] < dict(found.curve)[found.best]:
            found = again
    return found, choice.nll


# A search over folds fits some eighty Gaussians. Its precision hardly depends on their structure, the modes not at all.
_MOST_EXACT = 1000  # parameters, up to which it uses exact structures


def _fit_with_folds(
    run: Run,
    criterion: str,
    structure: str,
    target: LastLayerTarget,
    *,
    folds: Tensor,
    priors: Sequence[Prior],
    start: Tensor,
    in_span: bool,
) -> _Fitted:
    """Fit all rows of the target, whose last rows are val's, and find the mode without each fold.

    Args:
        folds: (N,), the fold of each row of val.
        priors: prior of each fold; the target's precision of the weights replaces theirs.
    """
    rows = SearchRows(None, None) if in_span else _rows_to_search(run, target, len(folds))
    counts = _count_rows(rows)
    found: FoldSearch | PriorSearch | None = None
    if criterion == "val":
        is_large = not in_span and (
            bool(counts)
            or is_short_search(target.num_examples, num_params=target.layout.num_params, device=target.device)
        )
        found = search_folds(
            [_build_fold(target, folds, place, prior, rows) for place, prior in enumerate(priors)],
            start=start,
            generator=run.stream("fit-laplace/val"),
            structure="kron"
            if target.layout.num_params > _MOST_EXACT and structure in ("full", "block")
            else structure,
            is_large=is_large,
            progress=run.console,
        )
        start = torch.stack([fit.gaussian.mean for fit in found.fits]).mean(dim=0)
    elif criterion == "marglik":
        found = search(
            target,
            start=start,
            generator=run.stream("fit-laplace/val"),
            structure=structure,
            criterion=criterion,
            progress=run.console,
        )
    if found is not None:
        target = target.with_prior(target.prior.with_weight_precision(found.best))
    fit = fit_gaussian(target, structure=structure, start=start, progress=run.console)
    if isinstance(found, FoldSearch) and not counts:
        modes = [one.gaussian.mean for one in found.fits]
    else:
        precision = target.prior.weight_precision
        modes = []
        for place, prior in enumerate(priors):
            fold = _build_fold(
                target, folds, place, prior.with_weight_precision(precision), SearchRows(None, None)
            ).target
            modes.append(find_suitable_mode(fold, fit.gaussian.mean, progress=run.console).theta)
    return _Fitted(fit, found, _count_metrics(counts), modes=torch.stack(modes))


def _rows_to_search(run: Run, target: LastLayerTarget, num_val: int) -> SearchRows:
    """Return the rows of the target and of val that a search reads, and note where it reads only a part."""
    layout = target.layout
    found = search_rows(
        target.num_examples,
        num_val,
        num_params=layout.num_params,
        num_outputs=layout.num_outputs,
        device=target.device,
        generator=run.stream("fit-laplace/search"),
    )
    if found.train is not None:
        text = f"{len(found.train):,} of {target.num_examples:,} examples"
        run.console.info(f"searching for the prior precision with {text}; the final fits use all")
    return found


def _build_fold(target: LastLayerTarget, folds: Tensor, place: int, prior: Prior, rows: SearchRows) -> Fold:
    """Return the target without the rows of one fold, restricted to the rows that the search reads."""
    first = target.num_examples - len(folds)
    own = (folds == place).nonzero()[:, 0]
    fitted = select_fitted_rows(folds, place, target.num_examples)
    if rows.train is not None:
        fitted = fitted[torch.isin(fitted, rows.train)]
    judged = own if rows.val is None else own[torch.isin(own, rows.val)]
    index = (first + judged).to(target.device)
    held_out = target.held_out(target.rows(index), target.labels[index])
    return Fold(target.some(fitted).with_prior(prior), held_out, len(judged))
