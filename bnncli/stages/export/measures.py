"""What export measures of a file before it is published: how near it is to predict, what fewer draws lose, how long it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.data.splits import Inputs
from bnncli.decisions.prediction_sets import SetRule
from bnncli.errors import NumericError
from bnncli.evaluation.excess import score
from bnncli.export.steps import Values
from bnncli.integrators import Prediction, Ready
from bnncli.lazy import torch
from bnncli.options.export import ExportOptions
from bnncli.session.inputs import Split
from bnncli.session.predictor import IntegratorChoice, Predictor
from bnncli.session.run import Run
from bnncli.stages.export.decided import agreement
from bnncli.stages.export.inputs import GoesIn
from bnncli.stages.export.report import SIZES

if TYPE_CHECKING:
    from torch import Tensor, nn

_SHARES = (0.95, 0.99)  # of the split that have at most the thresholds that the file names
_SECONDS, _MOST_SECONDS, _MOST_REPEATS = 0.3, 20.0, 200  # of each measurement of time


@dataclass(frozen=True)
class ExpectedOutputs:
    """What predict and its thinned draws give for the rows that are checked, and how many draws there are of both."""

    whole: Prediction
    stored: Prediction
    num_whole: int | None
    num_stored: int | None


def eager(module: nn.Module) -> Callable[[Inputs], Values]:
    """The module as torch runs it."""

    def run(inputs: Inputs) -> Values:
        with torch.no_grad():
            outputs: Values = module(inputs)
        return outputs

    return run


def expected_outputs(
    run: Run, predictor: Predictor, choice: IntegratorChoice, features: Tensor, ready: Ready, kept: Ready
) -> ExpectedOutputs:
    """What predict gives for features (n, D), and what it gives by the draws that are kept alone."""
    whole = predictor.predict(choice, features).prediction
    if kept is ready:
        return ExpectedOutputs(whole, whole, ready.num_draws, ready.num_draws)
    stored = kept.predict(
        predictor.posterior,
        features.to(run.device).float(),
        num_samples=kept.num_draws,
        generator=run.stream("predict/draws"),
        progress=run.console,
    )
    return ExpectedOutputs(whole, stored, ready.num_draws, kept.num_draws)


def outputs_of(run: Run, model: Callable[[Inputs], Values], goes_in: GoesIn, name: str) -> Values:
    """What the file gives for all rows that are checked."""
    task = run.console.task(f"check in {name}", len(goes_in.rows))
    found: dict[str, list[Tensor]] = {}
    for inputs in goes_in.batches():
        for output, values in model(inputs).items():
            found.setdefault(output, []).append(values)
        run.console.poll("checking the file")
        task.advance(len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs))
    return {output: torch.cat(values) for output, values in found.items()}


def parity_of(
    options: ExportOptions,
    split: Split,
    goes_in: GoesIn,
    outputs: Mapping[str, Values],
    expected: Prediction,
    combined: Tensor | None,
) -> dict[str, Any]:
    """How far outputs are from those of predict. Raises NumericError where probabilities are too far.

    Args:
        combined: (n,) of the rows, where it is the score; its sign is turned in the file.
    """
    wanted = {"probs": expected.probs, "entropy": expected.entropy, "mutual_information": expected.mutual_info}
    wanted |= {"ood_score": None if combined is None else -combined}
    every = {
        runtime: {name: _largest(found[name] - values.cpu()) for name, values in wanted.items() if values is not None}
        for runtime, found in outputs.items()
    }
    worst = max(found["probs"] for found in every.values())
    if not worst <= options.own_tolerance:
        where = ", ".join(f"{found['probs']:.2g} in {runtime}" for runtime, found in every.items())
        raise NumericError(
            f"probabilities differ by up to {worst:.2g} from those of predict on {split.content.name} ({where}), "
            f"more than the tolerance of {options.own_tolerance:g}; nothing was written",
            hint="use a larger \0tolerance\0 if that is close enough",
            code="not_at_par",
        )
    return {
        "split": split.content.name,
        "rows": len(goes_in.rows),
        "tolerance": options.own_tolerance,
        "max_difference": {runtime: found["probs"] for runtime, found in every.items()},
        "outputs": every,
    }


def _largest(differences: Tensor) -> float:
    return float(differences.abs().max()) if differences.numel() else 0.0


def _losses(whole: Prediction, probs: Tensor, labels: Any) -> dict[str, float]:
    """NLL of predict and of the file, nats an example, and by how much the file's is larger."""
    of_predict = score("predict", whole.probs.cpu().numpy(), labels).nll
    of_export = score("export", probs.numpy(), labels).nll
    return {"predict": of_predict, "export": of_export, "loss": of_export - of_predict}


def thresholds(split: Split, scores: Tensor) -> dict[str, Any]:
    """The ood_score that shares of the split have at most."""
    quantiles = np.quantile(scores.double().numpy(), _SHARES, method="inverted_cdf")
    shares = {str(share): float(value) for share, value in zip(_SHARES, quantiles, strict=True)}
    return {"ood_score": {"split": split.content.name, "at_most": shares}}


def losses(
    split: Split, rows: np.ndarray, expected: ExpectedOutputs, own: Values, rule: SetRule | None
) -> dict[str, Any]:
    """What fewer draws cost: how many there are, NLL where there are labels, and how often sets are the same."""
    labels = None if split.content.labels is None else split.content.labels[rows]
    num_draws = {"stored": expected.num_stored, "predict": expected.num_whole}
    found: dict[str, Any] = {
        "draws": None if expected.num_whole is None else num_draws,
        "nll": None if labels is None or len(labels) == 0 else _losses(expected.whole, own["probs"], labels),
    }
    return found if rule is None else {**found, "sets": agreement(rule, expected.whole.probs.cpu(), own["set"])}


def times_of(run: Run, model: Callable[[Inputs], Values], goes_in: GoesIn) -> dict[str, float | None]:
    """Median milliseconds of a batch of each of the sizes; None where one would take too long."""
    found: dict[str, float | None] = {}
    per_input = 0.0
    for size in SIZES:
        if per_input * size > _MOST_SECONDS:
            found[str(size)] = None
            continue
        inputs = goes_in.first(size)
        model(inputs)
        taken: list[float] = []
        while len(taken) < 3 or (sum(taken) < _SECONDS and len(taken) < _MOST_REPEATS):
            start = time.perf_counter()
            model(inputs)
            taken.append(time.perf_counter() - start)
            run.console.poll("measuring times")
        per_input = statistics.median(taken) / size
        found[str(size)] = round(1e3 * statistics.median(taken), 4)
    return found
