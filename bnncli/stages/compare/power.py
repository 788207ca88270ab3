"""The power of the tests of a comparison: what limits it, and what to run for sharper ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bnncli.evaluation.paired import Sample
from bnncli.evaluation.standings import Standing, fewest_replicates
from bnncli.options.compare import CompareOptions
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import Run
from bnncli.stages.compare.tables import Comparison

_MOST_DRAWS = 10_000  # suggested: where more would be needed the posteriors hardly differ but for the draws
_ROUNDING = (
    1e-7  # of a score: the draws of a single network differ by as much in float32, and more of them change nothing
)


def power_warnings(
    run: Run, options: CompareOptions, comparison: Comparison, groups: Sequence[PredictionGroup]
) -> list[str]:
    """Warnings, a line each.

    Args:
        groups: of each posterior, for the first checkpoint.
    """
    if comparison.num_checkpoints > 3:
        return []
    if comparison.num_checkpoints > 1:
        return [
            f"with {comparison.num_checkpoints} checkpoints the paired t test detects only differences that "
            "hardly vary between them"
        ]
    others = len(comparison.names) - 1
    fewest = fewest_replicates(others, alpha=options.alpha, has_baseline=comparison.baseline is not None)
    found = []
    if options.bootstrap < fewest:
        found.append(
            f"--bootstrap {options.bootstrap} is too few replicates for {others} comparisons at --alpha "
            f"{options.alpha:g}: nothing can be significant; use at least {fewest}"
        )
    for place, group in enumerate(groups):
        ratios = {
            column.form: ratio
            for column, standings in zip(comparison.columns, comparison.standings, strict=True)
            if (ratio := _ratio(place, [entry.samples for entry in column.entries], standings)) > 1
        }
        if ratios:
            found.append(_too_few_draws(run, group, comparison.names[place].draws, ratios))
    return found


def _ratio(place: int, samples: Sequence[Sample | None], standings: Sequence[Standing]) -> float:
    """The square of a posterior's integration error over the sampling variance of its difference from the reference.

    Of the reference itself, which is compared with all: the smallest over them. 0 where there is nothing to compare.
    """
    own = samples[place]
    reference = [
        s for s, standing in zip(samples, standings, strict=True) if s is not None and standing.against is None
    ]
    if own is None or len(reference) != 1 or own.integration_variance < _ROUNDING**2:
        return 0.0
    ratios = []
    for sample, standing in zip(samples, standings, strict=True):
        if standing.against is None or standing.against.standard_error is None or sample is None:
            continue
        sampling = standing.against.standard_error**2 - sample.integration_variance - reference[0].integration_variance
        ratio = own.integration_variance / sampling if sampling > 0 else math.inf
        if sample is own:
            return ratio
        ratios.append(ratio)
    return min(ratios, default=0.0)


def _too_few_draws(run: Run, group: PredictionGroup, draws: int | None, ratios: dict[str, float]) -> str:
    """The warning that a posterior's draws limit its comparison, and how many would make its error half of the examples'."""
    header = group.headers[0]
    text = (
        f"{group.name}: the integration error of its {draws} draws exceeds the sampling error of its difference "
        f"in {', '.join(ratios)}"
    )
    if draws is None or header.meta["samples"] is None:
        return f"{text}; only more draws from the posterior itself would help"
    needed = draws * min(4 * max(ratios.values()), _MOST_DRAWS)
    wanted = max(2 * draws, min(_MOST_DRAWS, _rounded_up(needed)))
    command = run.suggest(
        "predict",
        posterior=group.posterior,
        integrator=group.integrator,
        samples=wanted,
        qmc=bool(header.meta.get("settings", {}).get("qmc")),
        name=group.name if group.name != f"{group.posterior}.{group.variant}" else None,
        force=True,
    )
    return f"{text}; for a sharper test, run: {command}"


def _rounded_up(number: float) -> int:
    """To one significant digit."""
    unit = 10 ** math.floor(math.log10(number))
    return math.ceil(number / unit) * unit
