"""What the rungs are worth on val, by every integrator, and which of them is recommended."""

from __future__ import annotations

from typing import Any

from bnncli.errors import CheckFailed
from bnncli.evaluation.excess import Scored
from bnncli.evaluation.recommendation import Predictive, Recommendation, recommend
from bnncli.integrators import supports
from bnncli.run.inputs import Split, open_posterior
from bnncli.run.produce import Computed, Request
from bnncli.run.session import Run
from bnncli.run.val_report import predictive_on_val, temperature_on_val
from bnncli.stages.auto.ladder import Rung
from bnncli.storage.headers import Header
from bnncli.storage.metrics import write_metrics

_INTEGRATORS = ("mc", "probit", "mean-field", "plug-in")  # the first whose uncertainty says most


def compute(run: Run, request: Request, rungs: list[Rung], val: Split) -> Computed:
    """The rows of all candidates with the recommended one marked, and the sentence."""
    points, candidates = _scored(run, rungs, val)
    baseline = points.get("temperature") or points.get("network")
    found = recommend(candidates, baseline) if baseline is not None else _without_network(candidates)
    chosen = found.chosen
    names = {
        "temperature": next((rung.posterior for rung in rungs if rung.name == "fit-temperature"), ""),
        "network": "map",
    }
    plain = None if chosen is not None else min(points, key=lambda name: points[name].nll)
    rows = [
        _row(names[name], "plug-in", scored, baseline, is_recommended=name == plain) for name, scored in points.items()
    ]
    rows += [
        _row(one.posterior, one.integrator, one.scored, baseline, is_recommended=one is chosen) for one in candidates
    ]
    sentence = _sentence(found, names[plain] if plain else None, baseline, rivals=len(candidates))

    judged = [(rung.source.content_digest, rung.is_good) for rung in rungs if rung.source and rung.is_good is not None]
    told = {"is_recommended": False, "sentence": sentence, "pays": found.pays, "judged": judged}

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_metrics(
            request.target,
            rows=[*rows, told],
            predictions=[],
            provenance=provenance,
            may_replace=may_replace,
        )

    return Computed(publish, {"rows": rows, "sentence": sentence, "pays": found.pays})


def when_fresh(header: Header) -> Computed:
    """The same of a recommendation that is there already."""
    *rows, told = header.meta["rows"]
    metrics = {"rows": rows, "sentence": told["sentence"], "pays": told["pays"]}
    return Computed(lambda provenance, may_replace: header.content_digest, metrics)


def _scored(run: Run, rungs: list[Rung], val: Split) -> tuple[dict[str, Scored], list[Predictive]]:
    """The network as trained and at its best temperature, held out; and every posterior by every integrator that it supports."""
    points: dict[str, Scored] = {}
    candidates = []
    task = run.console.task("val", len(rungs))
    for place, rung in enumerate(rungs):
        if rung.source is not None:
            posterior = open_posterior(rung.source.path)[0].to(run.device)
            if rung.name == "network":
                points["network"] = predictive_on_val(run, posterior, val, "plug-in", key="network")
            elif rung.name == "fit-temperature":
                found = temperature_on_val(run, val)
                if found is not None:
                    points["temperature"] = found
            else:
                for name in _INTEGRATORS:
                    if supports(name, posterior):
                        scored = predictive_on_val(run, posterior, val, name, key=f"{rung.posterior}.{name}")
                        candidates.append(Predictive(rung.posterior, name, place, bool(rung.is_good), scored))
        task.advance()
    return points, candidates


def _without_network(candidates: list[Predictive]) -> Recommendation:
    """Of a run of features alone: there is no network to do better than, so that each is held against the worst."""
    if not candidates:
        raise CheckFailed("no posterior was fitted, and this run has no network to recommend", code="nothing_fitted")
    worst = max(candidates, key=lambda one: one.scored.nll)
    found = recommend(candidates, worst.scored)
    return Recommendation(found.chosen, False, found.why)


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


def _sentence(found: Recommendation, plain: str | None, baseline: Scored | None, *, rivals: int) -> str:
    chosen = found.chosen
    if chosen is None and not rivals:
        return f"recommended: {plain}, for want of a posterior: {found.why}, so that nothing is known of what Bayes would give"
    if chosen is None:
        return (
            f"recommended: {plain}, {'the network as trained' if plain == 'map' else 'the network at one temperature'}. Bayes does not "
            f"pay here: {found.why}"
        )
    text = f"recommended: {chosen.posterior} by {chosen.integrator} ({found.why})"
    if baseline is None:
        return text
    gain = baseline.nll - chosen.scored.nll
    if found.pays:
        return (
            f"{text}; posteriors predict val better than the network at one temperature (this one by {gain:.4f} nats)"
        )
    return f"{text}; in NLL nothing is better than the network at one temperature beyond chance (this one by {gain:.4f} nats)"
