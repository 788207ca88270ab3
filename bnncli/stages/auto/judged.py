"""What the rungs are worth on val, by every integrator, and which of them is recommended."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bnncli.artifacts.files import read_header, write_metrics
from bnncli.artifacts.headers import Header
from bnncli.decisions.outliers import fit_outliers
from bnncli.errors import CheckFailed
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.detection import detection_rows
from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.evaluation.excess import Scored
from bnncli.evaluation.layer_gain import LEVEL
from bnncli.evaluation.recommendation import (
    FALSE_ALARM,
    PLAIN,
    Detected,
    Predictive,
    Quality,
    detection_sentence,
    recommend,
    sentence,
)
from bnncli.evaluation.scores import detection_forms
from bnncli.integrators import supports
from bnncli.session.inputs import Split
from bnncli.session.predictor import Predictor, TrainData
from bnncli.session.produce import Computed, Request
from bnncli.session.recommendation import SplitProbabilities, qualities
from bnncli.session.run import Run
from bnncli.session.val_report import predicted_on, predictive_on_val, temperature_on_val
from bnncli.stages.auto.ladder import ENSEMBLE, Rung

_INTEGRATORS = ("mc", "probit", "mean-field", "plug-in")  # the first whose uncertainty says most
_SHOWN = ("sentence", "pays", "qualities", "about", "detection", "outside")


class Scores:
    """What the rungs are worth on val, each looked at once: the network as trained and at its best temperature, held out, and every
    posterior by every integrator that it supports.

    Attributes:
        points: of the network, by network and temperature.
        candidates: of the posteriors, in the order of the ladder.
    """

    def __init__(self, run: Run, val: Split, *, trust_code: bool) -> None:
        self.run, self.val, self.train = run, val, TrainData(run, trust_code)
        self.points: dict[str, Scored] = {}
        self.candidates: list[Predictive] = []
        self._added: set[str] = set()
        self._networks: dict[
            Path, tuple[Any, Split]
        ] = {}  # of more than the last layer, whose inputs are read for them
        self._detected: list[Detected] | None = None

    def add(self, rung: Rung) -> None:
        """Score a rung that has a posterior."""
        if rung.source is None or rung.posterior in self._added:
            return
        self._added.add(rung.posterior)
        if rung.name == "fit-temperature":
            found = temperature_on_val(self.run, self.val)
            if found is not None:
                self.points["temperature"] = found
            return
        posterior, val = self.judged_on(rung.source.path)
        if rung.name == "network":
            self.points["network"] = predictive_on_val(self.run, posterior, val, "plug-in", key="network")
            return
        whole, is_stack = getattr(posterior, "whole", posterior), rung.name == "stack"
        for name in ("mc",) if is_stack else _INTEGRATORS:  # the mean of a stack is another head
            if supports(name, whole):
                scored = predictive_on_val(self.run, posterior, val, name, key=f"{rung.posterior}.{name}")
                self.candidates.append(Predictive(rung.posterior, name, scored, has_network=is_stack))

    def judged_on(self, path: Path) -> tuple[Any, Split]:
        """A posterior on the device, or what stands for it on rows that it was fitted to; and val as it sees it."""
        if path in self._networks:
            return self._networks[path]
        header = read_header(path)
        posterior = Predictor(self.run, path, header, self.train).posterior
        found = self.train.judged_on(header, posterior, self.val), self.train.seen_by(header, self.val)
        if header.meta.get("layers") is not None:
            self._networks[path] = found
        return found

    def detect(self, outside: list[Split]) -> list[Detected]:
        """What the combined score of the features detects of each out-of-distribution split; nothing where val is too small for it."""
        if self._detected is None:
            self._detected = _detected(self.run, self.train, self.val, outside)
        return self._detected


def compute(
    request: Request, rungs: list[Rung], scores: Scores, outside: list[Split], *, keep_accuracy: bool
) -> Computed:
    """The rows of all candidates with the recommended one marked, its qualities, what is detected out of distribution, and the sentences."""
    task = scores.run.console.task("val", len(rungs))
    for rung in rungs:
        scores.add(rung)
        task.advance()
    ensembles = {rung.posterior for rung in rungs if rung.name == ENSEMBLE}
    points = scores.points
    candidates = sorted(
        scores.candidates, key=lambda one: one.posterior in ensembles
    )  # several networks are no simple choice
    name = min(points, key=lambda key: points[key].nll, default="")
    baseline, words = points.get(name), PLAIN.get(name, "")
    if baseline is None and not candidates:
        raise CheckFailed("no posterior was fitted, and this run has no network to recommend", code="nothing_fitted")
    paired = _Paired(scores, rungs, name, None if baseline is None else baseline.losses)
    found = recommend(candidates, baseline, words=words, keep_accuracy=keep_accuracy)
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
    detected = scores.detect(outside)
    told |= {"detection": [asdict(one) for one in detected], "outside": detection_sentence(detected)}

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


class _Paired:
    """Predictions of single candidates beside the baseline's, on val."""

    def __init__(self, scores: Scores, rungs: list[Rung], baseline: str, losses: NDArray | None) -> None:
        self.scores, self.losses = scores, losses
        self.files = {rung.posterior: rung.source.path for rung in rungs if rung.source is not None}
        step = {"temperature": "fit-temperature"}.get(baseline, baseline)
        self.base = next((rung.posterior for rung in rungs if rung.name == step), None)

    def qualities(self, one: Predictive) -> list[Quality]:
        """Those of a candidate."""
        assert self.base is not None
        own, base = self._predicted(one.posterior, one.integrator), self._predicted(self.base, "plug-in")
        return qualities(own, replace(base, losses=self.losses), seed=self.scores.run.compute.seed)

    def _predicted(self, posterior: str, integrator: str) -> SplitProbabilities:
        judged, val = self.scores.judged_on(self.files[posterior])
        probs = predicted_on(self.scores.run, judged, val, integrator)
        return SplitProbabilities(val.content.name, probs, val.content.labels)


def _detected(run: Run, train: TrainData, val: Split, outside: list[Split]) -> list[Detected]:
    found = []
    own = train.combined_scores(val)
    if own is None:
        return []
    threshold, bootstrap = fit_outliers(own, FALSE_ALARM), Bootstrap(level=LEVEL, seed=run.compute.seed)
    for split in outside:
        far, name = train.combined_scores(split), split.content.name
        if far is None or not len(far):
            continue
        forms = {"auroc": detection_forms()["auroc"]}
        inside, other = ({DEFAULT_SCORE: scores} for scores in (own, far))
        (row,) = detection_rows(inside, other, forms, split="val", ood=name, bootstrap=bootstrap)
        ends = row["interval"] or {"low": None, "high": None}
        caught = float(threshold.is_outlier(far).mean())
        found.append(Detected(name, DEFAULT_SCORE, row["value"], ends["low"], ends["high"], caught))
    return found


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
