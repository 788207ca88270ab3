"""Options of evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.option import Checked, option


@dataclass(frozen=True)
class EvaluateOptions(Checked):
    """Options of evaluate."""

    posterior: list[str] = option([], "Only this posterior's predictions. Repeatable.", metavar="NAME", numeric=False)
    integrator: list[str] = option(
        [], "Only this integrator's predictions. Repeatable.", family="integrators", numeric=False
    )
    split: list[str] = option([], "Only this in-distribution split. Repeatable.", metavar="SPLIT", numeric=False)
    metric: list[str] = option(
        [],
        "Show only this score, and fail (65) where it is undefined for every posterior. Repeatable.",
        choices=("accuracy", "nll", "brier", "ece", "mce", "auroc", "fpr95", "mmd2"),
        numeric=False,
    )
    reference: str = option("hmc", "Sample posterior that MMD^2 is measured to.", metavar="NAME")
    bins: int = option(15, "Equal-width bins of ECE and MCE.", minimum=1)
