"""What compare compares: the predictions that all checkpoints have, their scores, and how each stands among the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.evaluation.detectors import of_predictions
from bnncli.evaluation.standings import standings
from bnncli.options.compare import CompareOptions
from bnncli.options.scoring import Quantity
from bnncli.session.posteriors import TotalCost, total_cost
from bnncli.session.predictions import PredictionGroup, open_groups
from bnncli.session.recommendation import recommended
from bnncli.session.run import Run
from bnncli.session.score_rows import num_draws
from bnncli.stages.compare.measure import OF_TWO_SPLITS, Column, measure
from bnncli.stages.compare.tables import Comparison, Name

Groups = dict[str, list[PredictionGroup]]  # by name, one for each checkpoint


def compared_groups(runs: Sequence[Run], options: CompareOptions, *, leave_out: Collection[Path] = ()) -> Groups:
    """The predictions to compare, which every checkpoint has.

    Args:
        leave_out: files that are not looked at.

    Raises:
        MissingInput, DataError: there are none, or none of the baseline.
        UsageError: the baseline may mean several.
    """
    named: dict[str, Any] = {"posteriors": options.posterior, "integrators": options.integrator}
    beside = [] if options.baseline is None else [options.baseline]
    found = [open_groups(one, **named, layers=options.layers, beside=beside, leave_out=leave_out) for one in runs]
    groups = _shared(runs, found, options.split)
    if options.by == "cost":
        groups = dict(sorted(groups.items(), key=lambda entry: _cost(entry[1]).rank))
    _ = _baseline(runs[0], options, [own[0] for own in groups.values()])
    _check_same_examples(runs, options, groups)
    return groups


def compared(runs: Sequence[Run], options: CompareOptions, groups: Groups) -> Comparison:
    """Their scores and standings. Raises UsageError or DataError for a score that was asked for and is not there."""
    columns = measure(runs[0], options, groups)
    firsts = [own[0] for own in groups.values()]
    _check_wanted(options, columns, firsts)
    found = _compare(options, groups, columns, _baseline(runs[0], options, firsts))
    return replace(found, recommendation=_recommendation(runs[0])) if len(runs) == 1 else found


def _recommendation(run: Run) -> str | None:
    """What auto recommends of the run; None where it has not, or its recommendation cannot be used."""
    try:
        found = recommended(run)
    except DataError as error:
        run.console.warn(f"{error.message}{error.advice}")
        return None
    return None if found is None else found.sentence


def _shared(
    runs: Sequence[Run], found: Sequence[Sequence[PredictionGroup]], split: str
) -> dict[str, list[PredictionGroup]]:
    """The groups that every run has with predictions of the split, by name, one for each run."""
    labels = {(group.name, group.posterior, group.variant): None for groups in found for group in groups}
    shared: dict[str, list[PredictionGroup]] = {}
    left_out: dict[str, list[str]] = {}  # by the checkpoints that lack them
    maker = runs[0]
    for label in labels:
        own = [
            next(
                (g for g in groups if (g.name, g.posterior, g.variant) == label and split in g.splits(is_ood=False)),
                None,
            )
            for groups in found
        ]
        lacking = [one for one, group in zip(runs, own, strict=True) if group is None]
        if lacking:
            left_out.setdefault(", ".join(str(one.checkpoint_path) for one in lacking), []).append(label[0])
            maker = lacking[0]
            continue
        shared.setdefault(label[0], []).extend(group for group in own if group is not None)
    if shared or len(runs) > 1:
        for where, names in left_out.items():
            runs[0].console.warn(f"skipping {', '.join(names)}: no predictions for split {split!r} of {where}")
    if not shared:
        inside, outside = (
            list(dict.fromkeys(name for groups in found for group in groups for name in group.splits(is_ood=is_ood)))
            for is_ood in (False, True)
        )
        raise MissingInput(
            f"--split: no posterior has predictions of an in-distribution split {split!r}"
            + (" for every checkpoint" if len(runs) > 1 else "")
            + f" (have: {', '.join(inside) or 'none'})",
            hint=None if split in outside else maker.suggest("predict", split=split),
        )
    return shared


def _baseline(run: Run, options: CompareOptions, groups: list[PredictionGroup]) -> int | None:
    """The place of the posterior that --baseline names. Raises MissingInput or UsageError where there is not one."""
    name = options.baseline
    if name is None:
        return None
    labels = [group.name for group in groups]
    found = [place for place, group in enumerate(groups) if group.is_named([name], [])]
    if not found:
        raise MissingInput(
            f"--baseline: posterior {name!r} is not compared here (have: {', '.join(labels)})",
            hint=run.suggest("predict", posterior=name.partition(".")[0]),
        )
    if len(found) > 1:
        raise UsageError(f"--baseline: {name} is ambiguous; name one of {', '.join(labels[place] for place in found)}")
    if len(labels) == 1:
        raise UsageError(f"--baseline: there is no other posterior to compare {labels[0]} with")
    return found[0]


def _check_same_examples(
    runs: Sequence[Run], options: CompareOptions, groups: dict[str, list[PredictionGroup]]
) -> None:
    """Raise DataError unless all posteriors of a checkpoint predict the same examples; warn where checkpoints differ."""
    identities: dict[str, set[Any]] = {}
    for place in range(len(next(iter(groups.values())))):
        first: dict[str, tuple[str, Any]] = {}
        for label, own in groups.items():
            chosen = own[place].splits(is_ood=True) | {options.split: own[place].splits(is_ood=False)[options.split]}
            for name, header in chosen.items():
                identity = (header.meta.get("order_digest"), header.meta["num_examples"])
                other, expected = first.setdefault(name, (label, identity))
                identities.setdefault(name, set()).add(identity)
                if identity != expected:
                    raise DataError(
                        f"{header.path}: split {name!r} holds different examples for {label} and for {other}, so "
                        "their scores cannot be paired",
                        code="different_examples",
                        hint=runs[0].suggest("predict", force=True) if len(runs) == 1 else None,
                        path=header.path,
                    )
    for name, found in identities.items():
        if len(found) > 1:
            runs[0].console.warn(f"split {name!r} does not hold the same examples for all checkpoints")


def _check_wanted(options: CompareOptions, columns: Sequence[Column], groups: Sequence[PredictionGroup]) -> None:
    """Raise when a score that was asked for by name is not there, or undefined for every posterior."""
    for text, wanted in zip(options.metric, options.scores, strict=False):
        own = [column for column in columns if column.answers(wanted)]
        if not own:
            raise UsageError(f"--metric {text}: no posterior has this score{_in_its_place(wanted, columns, groups)}")
        if all(entry.samples is None for column in own for entry in column.entries):
            reason = own[0].entries[0].undefined
            raise DataError(
                f"--metric {text} is undefined on split {options.split!r}: {reason}", code="undefined_metric"
            )


def _in_its_place(wanted: Quantity, columns: Sequence[Column], groups: Sequence[PredictionGroup]) -> str:
    """What could have been meant, in brackets: the columns of the metric, or the splits and scores of a detection."""
    there = [column.form for column in columns if column.row["name"] == wanted.metric]
    if there:
        return f" (have: {', '.join(there)})"
    if wanted.metric not in OF_TWO_SPLITS:
        return ""
    splits = dict.fromkeys(name for group in groups for name in group.splits(is_ood=True))
    return f" (out-of-distribution splits: {', '.join(splits) or 'none'}; scores: {', '.join(of_predictions())})"


def _compare(
    options: CompareOptions, groups: dict[str, list[PredictionGroup]], columns: Sequence[Column], baseline: int | None
) -> Comparison:
    judged = [
        standings(
            [entry.samples for entry in column.entries],
            higher_is_better=column.row["higher_is_better"],
            alpha=options.alpha,
            baseline=baseline,
        )
        for column in columns
    ]
    firsts = [own[0] for own in groups.values()]
    return Comparison(
        names=[_name(own, options.split) for own in groups.values()],
        columns=list(columns),
        standings=judged,
        split=options.split,
        num_examples=firsts[0].splits(is_ood=False)[options.split].meta["num_examples"],
        num_checkpoints=len(next(iter(groups.values()))),
        replicates=options.bootstrap,
        alpha=options.alpha,
        baseline=baseline,
        shows_cost=options.by == "cost",
    )


def _cost(groups: Sequence[PredictionGroup]) -> TotalCost:
    """What the posterior of the first checkpoint cost; unknown where its file is gone, or another by now."""
    path = groups[0].posterior_path
    digests = {entry["content_digest"] for entry in groups[0].headers[0].inputs if entry["role"] == "posterior"}
    header = read_header(path) if path is not None and path.is_file() else None
    return total_cost(header if header is not None and header.content_digest in digests else None)


def _name(groups: Sequence[PredictionGroup], split: str) -> Name:
    """What the predictions of one posterior, for each checkpoint, are called."""
    draws = {num_draws(group, group.splits(is_ood=False)[split]) for group in groups}
    own = groups[0]
    return Name(
        own.name, own.posterior, own.integrator, own.variant, draws.pop() if len(draws) == 1 else None, _cost(groups)
    )
