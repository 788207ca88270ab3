"""Measure the agreement of chains on parameters and predictions, and report it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from bnncli.evaluation.convergence import (
    MAX_ROWS,
    Convergence,
    convergence,
    deciding_numbers,
    held_out_convergence,
    label_convergence,
)
from bnncli.lazy import torch
from bnncli.names import count_noun
from bnncli.session.inputs import Split
from bnncli.session.metrics import ChainMetrics
from bnncli.session.run import Run
from bnncli.targets.network import NetworkTarget

Judge: TypeAlias = "Callable[[torch.Tensor], Convergence]"  # takes draws (C, T, P)


def parameter_judge(run: Run) -> Judge:
    """Return a function that measures convergence over all parameters on the device."""
    return lambda draws: convergence(draws.cpu().numpy(), device=run.device, progress=run.console)


def head_judges(run: Run, train: Split, held_out: Split | None) -> dict[str, Judge]:
    """Return functions that measure convergence of last-layer predictions; `heldout` only, and empty without labels."""
    if held_out is None or held_out.content.labels is None:
        return {}
    return {"heldout": partial(_judge_held_out, run, train, held_out)}


def network_judge(run: Run, target: NetworkTarget, split: Split) -> Judge:
    """Return a function that measures convergence of a network's predictions on a split."""
    rows = select_diagnostic_rows(run, split)
    examples = target.held_out(split.stored[rows].to(run.device), split.labels(run.device)[rows.to(run.device)])
    return lambda draws: label_convergence(draws, examples, progress=run.console)


def select_diagnostic_rows(run: Run, split: Split) -> torch.Tensor:
    """Return a seeded, ascending selection of at most MAX_ROWS examples of a split."""
    order = torch.randperm(len(split.content.features), generator=run.stream("hmc/held-out"))
    return order[:MAX_ROWS].sort().values


def _judge_held_out(run: Run, train: Split, held_out: Split, draws: torch.Tensor) -> Convergence:
    """Measure convergence of the predictions for a few hundred seeded validation examples."""
    rows = select_diagnostic_rows(run, held_out)
    return held_out_convergence(
        draws,
        torch.from_numpy(held_out.content.features)[rows],
        held_out.labels(torch.device("cpu"))[rows],
        layout=train.layout,
        device=run.device,
        progress=run.console,
    )


_JUDGED = {
    "heldout": "log probabilities of held-out labels",
    "train": "log probabilities of training labels (no labelled val split)",
}


def parameter_metrics(judged: Convergence) -> dict[str, Any]:
    """Return the convergence metrics of the parameters."""
    return {
        "max_rhat": judged.r_hat,
        "min_ess_bulk": judged.ess_bulk,
        "min_ess_tail": judged.ess_tail,
        "undefined": judged.undefined,
    }


def prediction_metrics(predictions: Mapping[str, Convergence], judged_by: str | None) -> dict[str, Any]:
    """Return the convergence metrics of the label log probabilities.

    Args:
        predictions: convergence by source of the labels: heldout, train.
        judged_by: the entry that decides; None for the parameters.
    """
    held_out = predictions.get("heldout")
    found = {
        "heldout_max_rhat": held_out.r_hat if held_out else None,
        "heldout_min_ess_bulk": held_out.ess_bulk if held_out else None,
        "heldout_min_ess_tail": held_out.ess_tail if held_out else None,
    }
    if judged_by is None:
        return found
    decided = predictions[judged_by]
    return found | {
        "judged_by": judged_by,
        f"{judged_by}_max_rhat": decided.r_hat,
        f"{judged_by}_min_ess_bulk": decided.ess_bulk,
        f"{judged_by}_min_ess_tail": decided.ess_tail,
        f"{judged_by}_undefined": decided.undefined,
    }


def format_deciding_diagnostic(metrics: ChainMetrics) -> str:
    """Return the number of draws and the deciding convergence, or why there is no effective sample size."""
    judged_by, numbers = metrics.get("judged_by"), deciding_numbers(metrics)
    of = "" if judged_by is None else f"{_JUDGED[judged_by]}: "
    why = f"; {numbers.undefined}" if numbers.r_hat is not None and numbers.ess_bulk is None else ""
    chains = count_noun(metrics["chains"], "chain")
    return f"{chains} of {count_noun(metrics['draws'], 'draw')}: {of}{agreement(numbers)}{why}"


def format_other_diagnostics(metrics: ChainMetrics) -> list[str]:
    """Return lines for the convergence numbers that do not decide."""
    judged_by = metrics.get("judged_by")
    if judged_by is not None:
        parameters = {name: value for name, value in metrics.items() if name != "judged_by"}
        return [
            f"parameters: {agreement(deciding_numbers(parameters))}; these are not used for the verdict, because units "
            "of a layer can be permuted, so chains with different weights can predict the same"
        ]
    if metrics["heldout_max_rhat"] is None:
        return []
    bulk, tail = metrics.get("heldout_min_ess_bulk"), metrics.get("heldout_min_ess_tail")
    return [f"{_JUDGED['heldout']}: {agreement(Convergence(metrics['heldout_max_rhat'], None, bulk, tail))}"]


def agreement(numbers: Convergence) -> str:
    """Return the agreement of the chains as text; only R-hat if there is no effective sample size."""
    if numbers.r_hat is None:
        return f"R-hat undefined ({numbers.undefined})"
    found = f"largest R-hat {numbers.r_hat:.3f}"
    if numbers.ess_bulk is None:
        return found
    tail = "" if numbers.ess_tail is None else f", {numbers.ess_tail:.0f} tail"
    return f"{found}, smallest effective sample size {numbers.ess_bulk:.0f} bulk{tail}"
