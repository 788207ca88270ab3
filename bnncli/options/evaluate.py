"""Options of evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.assertions import Assertion, parse_assertion
from bnncli.option import Checked, option

METRICS = ("accuracy", "nll", "brier", "ece", "mce", "auroc", "fpr95", "mmd2")


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
        choices=METRICS,
        numeric=False,
    )
    assert_: list[str] = option(
        [],
        "Exit 3 unless this holds, as ece<=0.02, laplace.mc.auroc:mnist>=0.9 or nll<map.nll@test: [POSTERIOR[.INTEGRATOR].]METRIC[:CHOICE...][@SPLIT], an operator, a number or another score. Repeatable.",
        metavar="ASSERTION",
        numeric=False,
    )
    reference: str = option("hmc", "Sample posterior that MMD^2 is measured to.", metavar="NAME")
    bins: int = option(15, "Equal-width bins of ECE and MCE.", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.assertions  # wrong ones are told before any work

    @property
    def assertions(self) -> list[Assertion]:
        """What --assert asks for."""
        return [parse_assertion(text, "--assert", METRICS) for text in self.assert_]
