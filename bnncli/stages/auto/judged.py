"""What the rungs are worth on val, by every integrator, and which of them is recommended."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bnncli.errors import CheckFailed
from bnncli.evaluation.excess import Scored
from bnncli.evaluation.layer_gain import LEVEL
from bnncli.evaluation.recommendation import PLAIN, Predictive, Quality, recommend, sentence
from bnncli.integrators import supports
from bnncli.run.inputs import Split, open_posterior
from bnncli.run.predictor import TrainData
from bnncli.run.produce import Computed, Request
from bnncli.run.recommendation import SplitProbabilities, detection, qualities
from bnncli.run.session import Run
from bnncli.run.val_report import predicted_on, predictive_on_val, temperature_on_val
from bnncli.stages.auto.ladder import Rung
from bnncli.storage.headers import Header
from bnncli.storage.metrics import write_metrics

_INTEGRATORS = ("mc", "probit", "mean-field", "plug-in")  # the first whose uncertainty says most
_SHOWN = ("sentence", "pays", "qualities", "about")


def compute(
    run: Run, request: Request, rungs: list[Rung], val: Split, outside: list[Split], *, keep_accuracy: bool
) -> Computed:
    """The rows of all candidates with the recommended one marked, its qualities, and the sentence."""
    points, candidates = _scored(run, rungs, val)
    name = min(points, key=lambda key: points[key].nll, default="")
    baseline, words = points.get(name), PLAIN.get(name, "")
    if baseline is None and not candidates:
        raise CheckFailed("no posterior was fitted, and this run has no network to recommend", code="nothing_fitted")
    paired = _Paired(run, rungs, [val, *outside], name, None if baseline is None else baseline.losses)
    found = recommend(
        candidates, baseline, words=words, keep_accuracy=keep_accuracy, detects_better=paired.detects_better
    )
    names = {
        "temperature": next((rung.posterior for rung in rungs if rung.name == "fit-temperature"), ""),
        "network": "map",
    }
    rows = [
        _row(names[key], "plug-in", scored, baseline, is_recommended=found.chosen is None and key == name)
        for key, scored in points.items()
    ]
    rows += [
        _row(one.posterior, one.integrator, one.scored, baseline, is_recommended=one is found.chosen)
        for one in candidates
    ]
    text = sentence(found, baseline, names.get(name, ""), words)
    beside = [] if found.contender is None or baseline is None else paired.qualities(found.contender)
    about = None if found.contender is None else str(found.contender)
    judged = [(rung.source.content_digest, rung.is_good) for rung in rungs if rung.source and rung.is_good is not None]
    told = {"is_recommended": False, "sentence": text, "pays": found.pays, "judged": judged}
    told |= {"qualities": [one.to_json() for one in beside], "about": [about, words]}

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_metrics(
            request.target,
            rows=[*rows, told],
            predictions=[],
            provenance=provenance,
            may_replace=may_replace,
        )

    return Computed(publish, {"rows": rows, **{key: told[key] for key in _SHOWN}})


def when_fresh(header: Header) -> Computed:
    """The same of a recommendation that is there already."""
    *rows, told = header.meta["rows"]
    metrics = {"rows": rows, **{key: told[key] for key in _SHOWN}}
    return Computed(lambda provenance, may_replace: header.content_digest, metrics)


def _scored(run: Run, rungs: list[Rung], val: Split) -> tuple[dict[str, Scored], list[Predictive]]:
    """The network as trained and at its best temperature, held out; and every posterior by every integrator that it supports."""
    points: dict[str, Scored] = {}
    candidates = []
    task = run.console.task("val", len(rungs))
    for rung in rungs:
        if rung.source is not None:
            posterior = _judged_on(run, rung.source.path, val)
            if rung.name == "network":
                points["network"] = predictive_on_val(run, posterior, val, "plug-in", key="network")
            elif rung.name == "fit-temperature":
                found = temperature_on_val(run, val)
                if found is not None:
                    points["temperature"] = found
            else:
                whole = getattr(posterior, "whole", posterior)
                for name in ("mc",) if rung.name == "stack" else _INTEGRATORS:  # the mean of a stack is another head
                    if supports(name, whole):
                        scored = predictive_on_val(run, posterior, val, name, key=f"{rung.posterior}.{name}")
                        candidates.append(Predictive(rung.posterior, name, scored))
        task.advance()
    return points, candidates


def _judged_on(run: Run, path: Path, split: Split) -> Any:
    """A posterior on the device, or what stands for it on rows that it was fitted to."""
    posterior, header = open_posterior(path)
    return TrainData(run).judged_on(header, posterior.to(run.device), split)


class _Paired:
    """Predictions of single candidates beside the baseline's, on val and on the out-of-distribution splits."""

    def __init__(self, run: Run, rungs: list[Rung], splits: list[Split], baseline: str, losses: NDArray | None) -> None:
        self.run, self.splits, self.losses = run, splits, losses  # val first
        self.files = {rung.posterior: rung.source.path for rung in rungs if rung.source is not None}
        step = {"temperature": "fit-temperature"}.get(baseline, baseline)
        self.base = next((rung.posterior for rung in rungs if rung.name == step), None)

    @cached_property
    def of_base(self) -> list[SplitProbabilities]:
        """The baseline's predictions of val and the others."""
        assert self.base is not None
        val, *others = self._predicted(self.base, "plug-in")
        return [replace(val, losses=self.losses), *others]

    def _predicted(self, posterior: str, integrator: str) -> list[SplitProbabilities]:
        found = []
        for split in self.splits:
            probs = predicted_on(self.run, _judged_on(self.run, self.files[posterior], split), split, integrator)
            found.append(SplitProbabilities(split.content.name, probs, split.content.labels))
        return found

    def qualities(self, one: Predictive) -> list[Quality]:
        """Those of a candidate."""
        (own, *others), (base, *beside) = self._predicted(one.posterior, one.integrator), self.of_base
        return qualities(own, base, list(zip(others, beside, strict=True)), seed=self.run.compute.seed)

    def detects_better(self, one: Predictive, num_tried: int) -> bool:
        """Whether it tells val from any other split better, and from none worse."""
        if len(self.splits) < 2:
            return False
        (own, *others), (base, *beside) = self._predicted(one.posterior, one.integrator), self.of_base
        pairs = zip(others, beside, strict=True)
        level = 1 - (1 - LEVEL) / (num_tried * len(others))
        found = [
            quality.finding
            for pair in pairs
            for quality in detection(own, base, pair, seed=self.run.compute.seed, level=level)
        ]
        return "better" in found and "worse" not in found


def _row(
    posterior: str, integrator: str, scored: Scored, baseline: Scored | None, *, is_recommended: bool
) -> dict[str, Any]:
    gain = None
    if baseline is not None and scored is not baseline:
        gap = baseline.losses - scored.losses
        gain = {
            "value": float(gap.mean()),
            "standard_error": float(gap.std(ddof=1) / len(gap) ** 0.5) if len(gap) > 1 else None,
        }
    return {
        "posterior": posterior,
        "integrator": integrator,
        "split": "val",
        **scored.to_json(),
        "gain": gain,
        "is_recommended": is_recommended,
    }
