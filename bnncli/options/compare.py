"""Options of compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.options.assertions import Quantity, parse_score
from bnncli.options.declaration import Checked, collected, option
from bnncli.options.layers import chosen_layers_option
from bnncli.options.of_scores import of_compared_scores
from bnncli.options.predicted import check_variant
from bnncli.scores import declared


def compared() -> tuple[str, ...]:
    """The scores that two posteriors can be paired in."""
    return tuple(name for name, score in declared().items() if score.is_paired)


def _default_metrics() -> list[str]:
    return [name for name in compared() if declared()[name].is_shown]


def _metric_help() -> str:
    names = ", ".join(_default_metrics())
    return f"Score to compare, METRIC[:CHOICE...], as ece:equal-mass or auroc:mnist; {names} by default. Repeatable."


@dataclass(frozen=True)
class CompareOptions(Checked):
    """Options of compare, `settings` being those that scores bring."""

    metric: list[str] = option(
        [],
        _metric_help,
        metavar="SCORE",
    )
    posterior: list[str] = option([], "Only this posterior's predictions. Repeatable.", metavar="NAME")
    layers: str | None = chosen_layers_option(is_recorded=False)
    integrator: list[str] = option(
        [],
        "Only this integrator's predictions: a name (mc), or one with its settings (mc-qmc). Repeatable.",
        metavar="NAME",
        check=check_variant,
    )
    split: str = option("test", "Split to compare on.", metavar="SPLIT")
    baseline: str | None = option(
        None,
        "Show differences from this posterior instead, POSTERIOR or POSTERIOR.INTEGRATOR, with intervals and p-values.",
        metavar="NAME",
    )
    alpha: float = option(
        0.05, "Level of the tests, all of a column together; intervals have 1 - alpha.", minimum=1e-6, maximum=0.5
    )
    bootstrap: int = option(1000, "Bootstrap replicates over examples, where there is one checkpoint.", minimum=100)
    settings: dict[str, Any] = collected(of_compared_scores)
    plot: str | None = option(
        None,
        "Draw the comparison into this folder, compare-SPLIT.png: a panel for each score, a dot for each checkpoint.",
        metavar="DIR",
        writes=True,
    )
    by: str | None = option(
        None,
        "cost: sort the rows by what each posterior cost, the cheapest first, and show it: gradient passes over the training data, through "
        "the head or the network.",
        choices=("cost",),
    )
    format: str = option("text", "Form of the table on stdout.", choices=("text", "csv", "markdown", "latex"))
    seed: int = option(0, "Seed of the bootstrap.", minimum=0, env_common=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.scores  # wrong ones are told before any work
        if len(set(self.metric)) < len(self.metric):
            raise UsageError("\0metric\0: the same score is named twice")

    @property
    def scores(self) -> list[Quantity]:
        """What --metric asks for."""
        return [parse_score(text, "\0metric\0", compared()) for text in self.metric or _default_metrics()]
