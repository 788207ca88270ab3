"""The predictions that evaluate holds others against, of a posterior of the run or in a file, and the rows of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.artifacts.provenance import Source
from bnncli.data.prediction_files import divide
from bnncli.errors import MissingInput, UsageError
from bnncli.evaluation.metric_rows import Row
from bnncli.evaluation.scores import fidelities
from bnncli.numerics.digests import file_sha256
from bnncli.options.scoring import EvaluateOptions
from bnncli.session.prediction_files import (
    GivenPredictions,
    MatchedForecasts,
    Said,
    check_against,
    open_given,
    rows_against,
)
from bnncli.session.predictions import PredictionGroup, open_groups
from bnncli.session.run import Run
from bnncli.session.score_rows import PredictedSplit, bootstrap_of
from bnncli.system.input_files import open_regular

_USUAL_INTEGRATOR = "mc"


@dataclass(frozen=True)
class FidelityReference:
    """The predictions of the reference, by split.

    Args:
        name: in rows: of the predictions, as hmc.mc, or of the file.
        group: of the reference's own predictions; "" for a file.
        places: where those of each split are, as `open_given` takes them.
        why_not: the reason for other splits.
        sources: of each split.
        opened: what was read, by split; all posteriors share it.
    """

    name: str
    group: str
    places: Mapping[str, str]
    why_not: str
    sources: Mapping[str, Source]
    opened: dict[str, GivenPredictions] = field(default_factory=dict)

    def to_params(self) -> dict[str, Any]:
        """What a metrics file records of it."""
        return {"fidelity": {"reference": self.name, "splits": sorted(self.places)}}

    def rows(self, run: Run, options: EvaluateOptions, group: PredictionGroup, split: PredictedSplit) -> list[Row]:
        """How near the predictions of a split come to the reference's; undefined rows say why."""
        from bnncli.evaluation.fidelity import undefined_fidelity

        if group.name == self.group or split.name not in self.places:
            reason = "this is the reference itself" if group.name == self.group else self.why_not
            return undefined_fidelity(fidelities(), reference=self.name, reason=reason)
        return rows_against(
            self._ours(split),
            self._opened(split.name),
            name=self.name,
            bootstrap=bootstrap_of(run, options),
            tell=run.console.info,
        )

    def check(self, group: PredictionGroup) -> None:
        """Pass where the reference can be held against these predictions. Raises as `rows` does, without its work."""
        for split in map(PredictedSplit, group.splits(is_ood=False).values()):
            if group.name != self.group and split.name in self.places:
                check_against(self._ours(split), self._opened(split.name))

    def _opened(self, name: str) -> GivenPredictions:
        if name not in self.opened:
            self.opened[name] = open_given(self.places[name], Said())
        return self.opened[name]

    def _ours(self, split: PredictedSplit) -> MatchedForecasts:
        file = split.file
        labels = None if file.labels is None else np.asarray(file.labels)
        return MatchedForecasts(split.name, file.probs, labels, file.mutual_info, file.sample_id, file.is_exclusive)


def find_fidelity(run: Run, options: EvaluateOptions, groups: Sequence[PredictionGroup]) -> FidelityReference | None:
    """What \0reference\0 names; None where it is not given.

    Raises:
        MissingInput: neither a posterior of the run nor a file. UsageError: predictions by several integrators.
    """
    place = options.reference
    if place is None:
        return None
    there = {path.stem for path in run.folder.posteriors()} | {
        path.parent.name for path in run.folder.prediction_files()
    }
    if place in there:
        return _of_posterior(run, place)
    path, _ = divide(place)
    if not path.exists():
        raise MissingInput(
            f"--reference: {place!r} is neither a posterior of the run (have: {', '.join(sorted(there))}) nor a file",
            hint=run.suggest("hmc") if place == "hmc" else run.suggest("status"),
        )
    return _of_file(place, path, options, groups)


def why_anew(asked: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """Why scores that were made with these parameters are made anew: they differ in the reference alone; None where they do not."""
    names = {name for name in {*asked, *recorded} if asked.get(name) != recorded.get(name)}
    if "fidelity" not in names or not names <= {"fidelity", "reference"}:
        return None
    then, now = (params.get("fidelity") or {} for params in (recorded, asked))
    with_splits = then.get("reference") == now.get("reference")
    said = [_said(one, with_splits=with_splits) for one in (then, now)]
    return f"created {said[0]}, now {said[1]}"


def _said(recorded: Mapping[str, Any], *, with_splits: bool) -> str:
    """A reference as a metrics file records it, in the words of the option."""
    if not recorded:
        return "without \0reference\0"
    splits = f" for {', '.join(recorded['splits']) or 'no split'}" if with_splits else ""
    return f"with \0reference\0 {recorded['reference']}{splits}"


def draws_name(run: Run, options: EvaluateOptions, usual: str) -> str:
    """The posterior whose draws distances are measured to: the reference where it has draws, else the usual one."""
    for name in (options.reference or usual, (options.reference or usual).partition(".")[0]):
        if run.folder.posterior(name, suffix=".nc").is_file():
            return name
    return usual


def _of_posterior(run: Run, name: str) -> FidelityReference:
    try:
        found = open_groups(run, posteriors=[name])
    except MissingInput as error:
        run.console.warn(f"{name} has no predictions, so nothing is compared with it{error.advice}")
        return FidelityReference(name, name, {}, f"no predictions of {name}{error.advice}", {})
    named = [group for group in found if group.name == name or f"{group.posterior}.{group.variant}" == name]
    chosen = named or [group for group in found if group.variant == _USUAL_INTEGRATOR] or found
    if len(chosen) > 1:
        choices = ", ".join(group.name for group in chosen)
        raise UsageError(f"--reference: {name} is ambiguous; name one of {choices}")
    group = chosen[0]
    headers = group.splits(is_ood=False)
    sources = {split: Source(f"reference.{split}", one.path, one.content_digest) for split, one in headers.items()}
    hint = run.suggest("predict", posterior=group.posterior, integrator=group.integrator)
    places = {split: str(one.path) for split, one in headers.items()}
    return FidelityReference(group.name, group.name, places, f"{group.name} has no predictions; run: {hint}", sources)


def _of_file(place: str, path: Path, options: EvaluateOptions, groups: Sequence[PredictionGroup]) -> FidelityReference:
    """A file is of one split: of those that were asked for, or test."""
    with open_regular(path) as stream:
        digest = f"sha256:{file_sha256(stream)}"
    there = list(dict.fromkeys(name for group in groups for name in group.splits(is_ood=False)))
    splits = options.split or (["test"] if "test" in there else there[:1])
    column = divide(place)[1].get("")
    name = path.name + ("" if column is None else f".{column}")
    source = Source("reference", path, digest, is_artifact=False)
    why = f"{name} is used as the reference for split {', '.join(splits)} (add \0split\0)"
    return FidelityReference(name, "", dict.fromkeys(splits, place), why, dict.fromkeys(splits, source))
