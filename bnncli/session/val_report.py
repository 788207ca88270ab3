"""Measure a posterior's default predictive on val against the simpler ones it should improve on.

Measurements match `predict`: default integrator, same number of draws, same stream. If passes of a network would take
minutes, only some examples of val are used. A temperature is fitted to val, so its losses leave out each example in
turn. The prior precision (and structure) may also have been chosen on val; that favours the posterior by about 1/N
each, so warnings are slightly too rare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.errors import MissingInput
from bnncli.integrators import Integrator, load_integrator, supports
from bnncli.lazy import torch
from bnncli.names import count_noun, percent
from bnncli.session.inputs import Split, load_split
from bnncli.session.metrics import FitMetrics, ValMetrics, ValScore
from bnncli.session.out_of_fold import OutOfFold
from bnncli.session.predictor import OF_THETA, default_integrator_of, divide_rows, follows_val
from bnncli.session.run import Run, Table
from bnncli.session.splits import describe_shared_rows as rows_in_common
from bnncli.session.states import advise_predict, fresh_posterior
from bnncli.system.workers import Parts

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.evaluation.recommendation import ScoredPredictive

# Activations of all passes while measuring draws of a network's weights: about two minutes on one core.
_MOST_NUMBERS = {"cpu": 2**34, "cuda": 2**39}
_FEWEST_MEASURED = 100  # minimum number of examples
OTHER_INTEGRATORS = ("plug-in", "probit")  # cheap integrators without draws, compared with a default of draws
SIMPLER_PREDICTIVES = {  # simpler predictives to compare a posterior with, in words
    "network": "the network as trained",
    "temperature": "the network at its best temperature",
    "plug-in": "its mean (plug-in)",
    "base": "its base",
}


def has_labeled_val(run: Run) -> bool:
    """Return whether the run has a labelled val split."""
    path = run.folder.features("val")
    return path.is_file() and bool(read_header(path).meta.get("is_labeled"))


def load_labeled_val(run: Run) -> Split | None:
    """Return the run's labelled val split, or None."""
    return load_split(run, "val") if has_labeled_val(run) else None


def require_labeled_val(run: Run, purpose: str) -> Split:
    """Return the val split, and warn if it shares rows with train.

    Args:
        purpose: what the labels are needed for, to end the message.

    Raises:
        MissingInput, DataError: it is missing, unusable or unlabelled.
    """
    path = run.folder.features("val")
    if not path.is_file() and run.folder.splits():
        raise MissingInput(
            f"{run.checkpoint_path} has no val split; {purpose} on labelled data that the network was not trained on",
            hint="extract again with a val split, such as \0hold_out\0 val=test:2000, with \0force\0",
            path=path,
        )
    val = load_split(run, "val").check_labeled()
    for text in rows_in_common(run.folder, ("train", "val")):
        run.console.warn(text)
    return val


# What `measure_on_val` returns, without a labelled val.
UNMEASURED: Mapping[str, None] = {"val": None, "val_excess": None, "recommended_integrator": None}


def measure_on_val(
    run: Run,
    posterior: Any,
    val: Split,
    *,
    method: str,
    others: Mapping[str, tuple[Any, str]] | None = None,
    prefer: str | None = None,
) -> ValMetrics:
    """Return `val`, `val_excess` and `recommended_integrator` for an artifact's metrics.

    `recommended_integrator` is the method's own (such as mc), or one of OTHER_INTEGRATORS that predicts significantly
    better; predict uses it by default, except for draws of a sampler (see follows_val).

    `val` has nll, standard_error and ece of each predictive: `network`, `temperature` (of the network, held out), the
    posterior by each integrator, `plug-in-temperature` (the centre at its best temperature, held out, as from
    `fit-temperature --base`), and under `method` the default of predict. The two with a temperature are only present
    if val has a best one.

    `val_excess` is the amount by which the default is worse than the network, its best temperature, and `others`.

    Args:
        posterior: over the head, with what its default integrator needs, on the device; or its folds if fitted to val.
        val: labelled.
        method: laplace, refine, ...; determines the method's own integrator.
        others: further posteriors to compare with and their integrators, by name (the base of a flow).
        prefer: integrator to recommend because the posterior was chosen for its predictions.
    """
    from bnncli.evaluation.recommendation import score_predictive

    own = default_integrator_of(method, is_last_layer=val.is_last_layer)
    val = _measurable(run, posterior, val, own)
    assert val.content.labels is not None
    labels = val.content.labels
    whole = posterior.whole if isinstance(posterior, OutOfFold) else posterior
    found, facts = {}, {}
    for name in (own, *(other for other in OTHER_INTEGRATORS if other != own and _supports(other, whole, val))):
        probs, facts[name] = _predict_val(run, posterior, val, name)
        found[name] = score_predictive(name, probs, labels, groups=val.groups)
    recommended = prefer or _best_integrator(found[own], list(found.values())[1:])
    integrator = recommended if follows_val(whole.type) else own
    references, network_facts = network_on_val(run, val)
    for key, (other_posterior, name) in (others or {}).items():
        probs, network_facts[key] = _predict_val(run, other_posterior, val, name)
        references[key] = score_predictive(key, probs, labels, groups=val.groups)
    if _supports("plug-in", whole, val):
        best = _score_at_best_temperature(run, posterior, val, "plug-in-temperature")
        if best is not None:
            found["plug-in-temperature"], facts["plug-in-temperature"] = best
    average = own if integrator == "plug-in" else integrator
    shares = _gain_shares(references, found.get("plug-in"), found[average])
    facts[method] = facts[integrator]
    chosen = replace(found.pop(integrator), name=method)
    if recommended != integrator:
        references[recommended] = found.pop(recommended)
    compared = _comparison(chosen, references, others=found, facts=facts | network_facts, integrator=recommended)
    return {**compared, "val_gain": shares}


def _gain_shares(
    references: Mapping[str, ScoredPredictive], center: ScoredPredictive | None, average: ScoredPredictive
) -> dict[str, Any] | None:
    """Split the NLL gain over the network into one temperature, another head, and averaging over the posterior.

    The shares are mean paired differences in nats per example, with standard errors, and add up to the gain. None
    without a network, and for posteriors without a predictive centre.
    """
    from bnncli.evaluation.recommendation import mean_error

    network = references.get("network")
    if network is None or center is None or average.name == "plug-in":
        return None
    if np.allclose(center.losses, network.losses, rtol=1e-4, atol=1e-6):  # at the checkpoint: no head was refitted
        return None
    scaled = references.get("temperature", network)
    steps = {"temperature": (network, scaled), "head": (scaled, center), "averaging": (center, average)}
    found: dict[str, Any] = {"integrator": average.name}
    for name, (before, after) in steps.items():
        gap = before.losses - after.losses
        found[name] = {"value": float(gap.mean()), "standard_error": mean_error(gap, average.groups)}
    return found


def _best_integrator(own: ScoredPredictive, others: Sequence[ScoredPredictive]) -> str:
    """Return the name of the first predictive, or of the best one that predicts significantly better."""
    from bnncli.evaluation.recommendation import compare_losses

    worse_than = [gap.reference for gap in compare_losses(own, others) if gap.is_worse]
    return min((one for one in others if one.name in worse_than), key=lambda one: one.nll, default=own).name


def _measurable(run: Run, posterior: Any, val: Split, name: str) -> Split:
    """Return val, or a random subset if passes through the network would take minutes."""
    integrator = load_integrator(name)
    if val.is_last_layer or integrator.needs not in OF_THETA:
        return val
    num_draws, num_rows = _num_draws(posterior, integrator) or 1, len(val.stored)
    most = _MOST_NUMBERS.get(run.device.type, _MOST_NUMBERS["cuda"]) // (num_draws * val.layout.widest)
    if num_rows <= max(most, _FEWEST_MEASURED):
        return val
    rows = torch.randperm(num_rows, generator=run.stream("val/measured"))[: max(most, _FEWEST_MEASURED)]
    run.console.info(
        f"measuring val scores on {len(rows)} of the {num_rows} val examples, drawn at random, because each "
        f"takes {num_draws} passes of the network"
    )
    return val.take(rows.sort().values)


def measure_probs_on_val(
    run: Run,
    probs: NDArray,
    val: Split,
    *,
    method: str,
    integrator: str,
    num_draws: int | None,
    losses: NDArray[np.float64] | None = None,
) -> ValMetrics:
    """Return measure_on_val for given predictions, compared with the network as trained and at its best temperature.

    Args:
        probs: (N, C) of val's examples.
        val: labelled, features with the network's head.
        integrator, num_draws: that produced the predictions.
        losses: (N,), held out, if part of the predictions was fitted to val.
    """
    from bnncli.evaluation.recommendation import score_predictive

    assert val.content.labels is not None
    found = score_predictive(method, probs, val.content.labels, losses=losses, groups=val.groups)
    references, facts = network_on_val(run, val)
    facts[method] = {"integrator": integrator, "samples": num_draws}
    return _comparison(found, references, others={}, facts=facts, integrator=integrator)


def network_on_val(run: Run, val: Split) -> tuple[dict[str, ScoredPredictive], dict[str, dict[str, Any]]]:
    """Return scores and further facts of the network as trained and, if it exists, at its best temperature (held out)."""
    from bnncli.posteriors.point import Point

    head = val.head()
    if head is None:
        return {}, {}
    network = Point(head.to(run.device), val.layout)
    found = {"network": predictive_on_val(run, network, val, "plug-in", key="network")}
    best = _score_at_best_temperature(run, network, val, "temperature")
    if best is None:
        return found, {}
    return found | {"temperature": best[0]}, {"temperature": best[1]}


def _comparison(
    chosen: ScoredPredictive,
    references: Mapping[str, ScoredPredictive],
    *,
    others: Mapping[str, ScoredPredictive],
    facts: Mapping[str, Mapping[str, Any]],
    integrator: str,
) -> ValMetrics:
    """Return the result of measure_on_val from scores; `others` are reported without comparison."""
    from bnncli.evaluation.recommendation import FALSE_ALARM, compare_losses

    gaps = compare_losses(chosen, list(references.values()))
    told = {**references, **others, chosen.name: chosen}
    compared: Any = {
        "val": {key: {**one.to_json(), **facts.get(key, {})} for key, one in told.items()},
        "val_excess": {gap.reference: gap.to_json() for gap in gaps},
        "val_false_alarm": FALSE_ALARM,
        "val_num_examples": len(chosen.losses),
        "recommended_integrator": integrator,
    }
    return cast(ValMetrics, compared)


def _supports(name: str, posterior: Any, val: Split) -> bool:
    """Return whether predict allows an integrator for a posterior; draws of a network have no mean that is a network."""
    return supports(name, posterior) and (val.is_last_layer or posterior.type != "samples")


def val_scores(metrics: FitMetrics) -> dict[str, ValScore]:
    """Return the scores on val by predictive; empty without labelled val."""
    return metrics.get("val") or {}


def find_better_predictives(metrics: FitMetrics) -> list[str]:
    """Return the predictives better than the posterior's default on val, best first."""
    gaps = metrics.get("val_excess") or {}
    return sorted((name for name, gap in gaps.items() if gap["is_worse"]), key=lambda name: -gaps[name]["value"])


def warn_if_worse(run: Run, path: Path, metrics: FitMetrics, *, method: str, also: Sequence[str] = ()) -> None:
    """Warn if predict's default is worse on val than something simpler, with remedies.

    For a whole network, also warn if it may be worse and val cannot tell: the remedies cost far less.

    Args:
        path: of the artifact.
        metrics: of the artifact, with those of measure_on_val if there was a val split.
        method: as for measure_on_val.
        also: further remedies, each as "run ..." or "use ...".
    """
    worse = find_better_predictives(metrics)
    if worse:
        run.console.warn(_warning(run, metrics, worse, name=path.stem, method=method, also=also))
    elif (reference := _find_worst_gap(metrics)) is not None:
        own = val_scores(metrics)[method]
        run.console.info(
            f"{path.stem} has a higher NLL on val than a simpler choice: {own['nll']:.4f} "
            f"({own['integrator']}{_draws(own)}), against {_describe_gap(metrics, reference)}; the difference is not "
            f"significant with {metrics['val_num_examples']} examples"
        )


def _find_worst_gap(metrics: FitMetrics) -> str | None:
    """Return the predictive that beats a network posterior by the most; None if no gap is worth a warning."""
    from bnncli.evaluation.recommendation import WORSE_SHARE

    is_of_network = (metrics.get("cost") or {}).get("through") == "network"
    gaps = (metrics.get("val_excess") or {}) if is_of_network else {}
    most = max(gaps, key=lambda name: float(gaps[name]["value"]), default=None)
    if most is None or gaps[most]["value"] <= WORSE_SHARE * val_scores(metrics)[most]["nll"]:
        return None
    return most


def _warning(
    run: Run, metrics: FitMetrics, worse: Sequence[str], *, name: str, method: str, also: Sequence[str]
) -> str:
    own = val_scores(metrics)[method]
    found = [_describe_gap(metrics, reference) for reference in worse]
    share = f"{100 * metrics['val_false_alarm']:g}%"
    return (
        f"{name} predicts val worse than simpler choices: NLL {own['nll']:.4f}, ECE {percent(own['ece'])} "
        f"({own['integrator']}{_draws(own)}), against {'; '.join(found)} ({metrics['val_num_examples']} "
        f"examples, paired; false alarms at most {share}). "
        f"{_sentence([*_remedies(run, metrics, worse, name=name, own=own['nll']), *also])}"
    )


def _sentence(remedies: Sequence[str]) -> str:
    """Return the remedies as one sentence of alternatives."""
    text = ", or ".join(remedies)
    return f"{text[:1].upper()}{text[1:]}"


def val_line(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return NLL and ECE of each predictive as a line, best first."""
    found = []
    for key, entry in sorted(entries.items(), key=lambda item: float(item[1]["nll"])):
        by = f" at {entry['temperature']:.3g}" if "temperature" in entry else ""
        by = f" ({entry['integrator']}{_draws(entry)})" if "integrator" in entry else by
        found.append(f"{key}{by} {entry['nll']:.4f}, {percent(entry['ece'])}")
    return "; ".join(found)


def _draws(entry: Mapping[str, Any]) -> str:
    return f", {count_noun(entry['samples'], 'draw')}" if entry.get("samples") else ""


def val_lines(metrics: FitMetrics, *, where: str = "") -> list[str]:
    """Return lines on a posterior's val performance: NLL and ECE, sources of the gain, and predict's integrator.

    Args:
        where: what the numbers were measured on, if not the plain val split.
    """
    entries = metrics.get("val")
    if entries is None:
        return []
    lines = [f"val NLL and ECE{where}: {val_line(entries)}"]
    gain = metrics.get("val_gain")
    if gain is None:
        return lines
    lines.append(f"gain on val: {gain_text(gain)}")
    if metrics["recommended_integrator"] == "plug-in" and "plug-in" not in entries:
        lines.append("predict uses plug-in by default, because averaging makes the predictions on val worse")
    return lines


_STEPS = {"temperature": "one temperature", "head": "refitted head", "averaging": "averaging"}


def gain_text(gain: Mapping[str, Any]) -> str:
    """Return the shares of the gain over the network as text, nats per example with standard errors."""
    shares = ", ".join(f"{_format_with_error(gain[step])} from {words}" for step, words in _STEPS.items())
    return f"{shares} ({gain['integrator']})"


def gain_table(headers: Mapping[str, Header]) -> list[Table]:
    """Return a table of the recorded gains on val by posterior name; empty without any."""
    gains = {name: header.meta.get("metrics", {}).get("val_gain") for name, header in headers.items()}
    rows = [
        [name, *(_format_with_error(gain[step]) for step in _STEPS), gain["integrator"]]
        for name, gain in gains.items()
        if gain
    ]
    note = "decrease in val NLL with each step, in order, in nats per example"
    if any(" +- " in cell for row in rows for cell in row):
        note += "; +- standard error, paired"
    return [Table(["gain on val of", *_STEPS.values(), "integrator"], rows, notes=[note])] if rows else []


def _format_with_error(share: Mapping[str, Any]) -> str:
    error = share["standard_error"]
    return f"{share['value']:+.4f}" + ("" if error is None else f" +- {error:.4f}")


def _describe_gap(metrics: FitMetrics, reference: str) -> str:
    entry, gap = val_scores(metrics)[reference], (metrics["val_excess"] or {})[reference]
    words = SIMPLER_PREDICTIVES.get(reference, reference)
    if "temperature" in entry:
        words += f", {entry['temperature']:.3g}"
    error = "" if gap["standard_error"] is None else f" +- {gap['standard_error']:.4f}"
    return f"{entry['nll']:.4f}, {percent(entry['ece'])} for {words} (worse by {gap['value']:.4f}{error})"


def _remedies(run: Run, metrics: FitMetrics, worse: Sequence[str], *, name: str, own: float) -> list[str]:
    """Return what was measured to predict better, with NLL: commands to run, or their existing results."""
    entries = val_scores(metrics)
    found, integrator = [], metrics["recommended_integrator"]
    if integrator is not None and integrator in worse:
        found.append(f"{advise_predict(run, name, integrator, is_default=False)} ({entries[integrator]['nll']:.4f})")
    scaled = {key: entries[key]["nll"] for key in ("temperature", "plug-in-temperature") if key in entries}
    best = min(scaled, key=lambda key: scaled[key], default=None)
    if best is not None and scaled[best] < own:
        base = name if best == "plug-in-temperature" else None
        found.append(f"{_advise_scaling(run, base)} ({scaled[best]:.4f})")
    if "network" in worse:
        found.append(f"{advise_predict(run, 'map', 'plug-in', is_default=True)} ({entries['network']['nll']:.4f})")
    return found


def _advise_scaling(run: Run, base: str | None) -> str:
    """Return how to use the best temperature for a posterior's centre or the network."""
    for made in ("temperature", f"{base}-temperature"):
        if fresh_posterior(run, made, {"base": base}) is not None:
            return advise_predict(run, made, "plug-in", is_default=True)
    is_taken = base is not None and run.folder.posterior("temperature").is_file()
    return f"run {run.suggest('fit-temperature', base=base, name=f'{base}-temperature' if is_taken else None)}"


def predictive_on_val(run: Run, posterior: Any, val: Split, integrator: str, *, key: str) -> ScoredPredictive:
    """Score a posterior by an integrator on val under a name, as predict would."""
    from bnncli.evaluation.recommendation import score_predictive

    assert val.content.labels is not None
    probs = _predict_val(run, posterior, val, integrator)[0]
    return score_predictive(key, probs, val.content.labels, groups=val.groups)


def predict_split_probs(run: Run, posterior: Any, split: Split, integrator: str) -> NDArray:
    """Return class probabilities (N, C) of a split, labelled or not, by predict's defaults."""
    return _predict_val(run, posterior, split, integrator)[0]


def temperature_on_val(run: Run, val: Split) -> ScoredPredictive | None:
    """Score the network on val at val's best temperature by held-out losses; None if val sets no lower bound."""
    from bnncli.posteriors.point import Point

    head = val.head()
    if head is None:
        return None
    best = _score_at_best_temperature(run, Point(head.to(run.device), val.layout), val, "temperature")
    return None if best is None else best[0]


def _predict_val(run: Run, posterior: Any, val: Split, name: str) -> tuple[NDArray, dict[str, Any]]:
    """Return probabilities (N, C) as predict gives them, and the integrator's details."""
    if isinstance(posterior, OutOfFold):
        probs = np.empty((len(val.stored), posterior.whole.layout.num_classes), dtype=np.float32)
        how: dict[str, Any] = {}
        for one, index in posterior.parts():
            probs[index.numpy()], how = _predict_val(run, one, val.take(index), name)
        return probs, how
    integrator = load_integrator(name)
    size = _num_draws(posterior, integrator)
    ready = integrator.prepare(posterior, num_samples=size, generator=run.stream("predict/draws"))
    rows = divide_rows(len(val.stored), posterior.layout)
    parts, found = Parts(len(rows)), [np.empty((0, posterior.layout.num_classes), dtype=np.float32)]
    for features in (block for place in parts.own for block in val.feature_blocks(run.device, rows[place])):
        generator = run.stream("predict/draws")
        found.append(ready.predict(posterior, features, num_samples=size, generator=generator).probs.cpu().numpy())
    probs = parts.of_all(np.concatenate(found), [part.stop - part.start for part in rows])
    return probs, {"integrator": name, "samples": size}


def _num_draws(posterior: Any, integrator: Integrator) -> int | None:
    """Return the default number of draws for predict: all stored ones, if any; None without draws."""
    is_last_layer = posterior.layout.network is None
    size = integrator.default_for(posterior.layout.num_params, is_last_layer=is_last_layer)
    if size is None or posterior.type == "samples":
        return None if size is None else int(posterior.draws[..., 0].numel())
    return int(getattr(posterior, "num_stored", getattr(posterior, "default_samples", size)))


def logits_on_val(run: Run, posterior: Any, val: Split) -> Tensor:
    """Return logits (N, K) at the centre of a posterior or of its folds, on the device."""
    from bnncli.posteriors.point import Point

    if isinstance(posterior, OutOfFold):
        parts = [(index, logits_on_val(run, one, val.take(index))) for one, index in posterior.parts()]
        order = torch.cat([index for index, _ in parts]).argsort()
        return torch.cat([logits for _, logits in parts])[order.to(run.device)]
    return val.logits(Point(posterior.center, posterior.layout), run.device)


def _score_at_best_temperature(
    run: Run, posterior: Any, val: Split, key: str
) -> tuple[ScoredPredictive, dict[str, Any]] | None:
    """Score a posterior's centre at val's best temperature by held-out losses.

    None if val sets no lower bound, because every label has the largest logit: its losses of 0 say nothing about
    other data.
    """
    from bnncli.evaluation.recommendation import score_predictive
    from bnncli.evaluation.temperature import LabelledLogits, fit_temperature, held_out_losses

    assert val.content.labels is not None
    likelihood, logits = val.layout.likelihood, logits_on_val(run, posterior, val)
    data = LabelledLogits(logits, val.labels(run.device), likelihood)
    fit = fit_temperature(data)
    if fit.unbounded == "separable":
        return None
    losses = held_out_losses(data, fit).cpu().numpy()
    scaled = (block.double() / fit.temperature for _, block, _ in data.blocks())
    probs = torch.cat([likelihood.class_probabilities(block, dim=1).float().cpu() for block in scaled]).numpy()
    scored = score_predictive(key, probs, val.content.labels, losses=losses, groups=val.groups)
    return scored, {"temperature": fit.temperature}
