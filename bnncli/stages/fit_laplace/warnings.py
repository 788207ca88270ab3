"""What fit-laplace warns of: classes without examples, a precision that had to be mended, a predictive that others beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.features import label_counts
from bnncli.options.shared import LayersOptions
from bnncli.parameters.module import LAST
from bnncli.registry import declaring
from bnncli.session.inputs import Split
from bnncli.session.run import Run
from bnncli.session.states import fresh_posterior, to_predict
from bnncli.session.val_report import warn_if_worse

if TYPE_CHECKING:
    from bnncli.inference.mode import Mode
    from bnncli.inference.prior_search import PriorSearch
    from bnncli.inference.prior_variants import FoldSearch
    from bnncli.posteriors.gaussian import Gaussian

JITTER_SHARE = 1e-3  # of the prior precision; what was added to the diagonal changes nothing below it

_MOST_NAMES = 10
_MEMORISED, _MOST_ROWS = 1 / 3, 10_000  # NLL of train, of that of val; rows that tell it
_MEANINGS = {
    "val": "they do not count in the choice of the prior precision or in any score on val",
    "train": "their weights are learned only from examples of other classes, so they are rarely predicted",
}


def warn_of_missing_classes(run: Run, splits: Sequence[Split]) -> None:
    """Say which classes no example of train or val has, and what that means."""
    for split in splits:
        if split.content.labels is None:
            continue
        classes = split.content.classes
        counts = label_counts(split.content.labels, len(classes))
        missing = [str(classes[place]) for place in np.flatnonzero(counts[: len(classes)] == 0)]
        if missing:
            shown = ", ".join(repr(name) for name in missing[:_MOST_NAMES]) + ", ..." * (len(missing) > _MOST_NAMES)
            name = split.content.name
            run.console.warn(
                f"{name} ({len(split.content.labels)} examples) has no examples of {len(missing)} of the "
                f"{len(classes)} classes ({shown}): {_MEANINGS[name]}"
            )


def warn_of_edge(run: Run, found: PriorSearch | FoldSearch) -> None:
    """Say so where a wider search for the prior precision might find a better one."""
    if found.at_edge:
        run.console.warn(
            f"the best prior precision found, {found.best:.4g}, is at the edge of the search range; set it with "
            "--prior-precision"
        )


def warn_of_jitter(run: Run, gaussian: Gaussian) -> None:
    """What was added to a precision that could not be factored acts as a prior; said where it outweighs the real one."""
    jitter = getattr(gaussian.covariance, "jitter", 0.0)
    precision = float(gaussian.require_prior().diagonal(gaussian.layout).min())
    if jitter > JITTER_SHARE * precision:
        run.console.warn(
            f"the posterior precision is not positive definite in float64, so {jitter:.2g} was added to its "
            f"diagonal (prior precision {precision:.2g}). The marginal likelihood and the variances in "
            "directions that only the prior determines are wrong; use a larger --prior-precision or --structure "
            "kron"
        )


def warn_of_shortfall(run: Run, mode: Mode) -> None:
    """Say so where the centre is further from the mode than was asked for."""
    if mode.shortfall is not None:
        run.console.warn(
            f"the centre is {mode.newton_decrement:.2g} posterior standard deviations from the mode (all {len(mode.theta):,} "
            f"parameters together; a draw is about {math.sqrt(len(mode.theta)):.0f} away): {mode.shortfall}"
        )


def tell_of_memorised(run: Run, train: Split, val: Split | None) -> None:
    """Say so where the network has memorised the rows that a last layer is fitted to: they tell little of what it does elsewhere."""
    from bnncli.lazy import torch
    from bnncli.posteriors.point import Point

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


def _is_no_base(metrics: dict[str, Any]) -> bool:
    """Whether refine would refuse it."""
    return "subnetwork_size" in metrics or "solver_steps" in metrics


def warn_of_val(run: Run, path: Path, metrics: dict[str, Any]) -> None:
    """Say so where what predict gives by default is worse on val than what is simpler."""
    if metrics.get("val") is None:
        return
    also, other = [], None if path.stem == "laplace" else path.stem
    if metrics.get("center") == "checkpoint":
        command = run.suggest("fit-laplace", center="mode", force=True, name=other)
        also.append(f"run {command} (not measured yet)")
    elif metrics["structure"] not in declaring("curvature", "is_exact") and not _is_no_base(metrics):
        name = f"refine{LayersOptions(metrics.get('layers', LAST)).layers_suffix}"
        refined = fresh_posterior(run, name, {"flow": "affine", "base": path.stem})
        if refined is None:
            mend = run.suggest("refine", flow="affine", base=other)
            also.append(f"run {mend} (a {metrics['structure']} covariance is rough; not measured yet)")
        else:
            measured = (refined.meta["metrics"].get("val") or {}).get("refine")
            if measured and measured["nll"] < metrics["val"]["laplace"]["nll"]:
                by = to_predict(run, name, measured["integrator"], is_default=True)
                also.append(f"{by} ({measured['nll']:.4f})")
    warn_if_worse(run, path, metrics, method="laplace", also=also)
