"""Options of compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.evaluation.scores import declared
from bnncli.options.declaration import Checked, collected, option
from bnncli.options.scoring import Quantity, of_compared_scores, parse_score
from bnncli.options.shared import check_variant, chosen_layers_option


def compared() -> tuple[str, ...]:
    """The scores that two posteriors can be paired in."""
    return tuple(name for name, score in declared().items() if score.is_paired)


def _default_metrics() -> list[str]:
    return [name for name in compared() if declared()[name].is_shown]


def _metric_help() -> str:
    names = ", ".join(_default_metrics())
    return f"Score to compare: METRIC[:CHOICE...], such as ece:equal-mass or auroc:mnist. Default: {names}."


@dataclass(frozen=True)
class CompareOptions(Checked):
    """Options of compare, `settings` being those that scores bring."""

    metric: list[str] = option([], _metric_help, metavar="SCORE", group="What to compare")
    posterior: list[str] = option(
        [], "Compare only this posterior's predictions.", metavar="NAME", group="What to compare"
    )
    layers: str | None = chosen_layers_option("What to compare", is_recorded=False)
    integrator: list[str] = option(
        [],
        "Compare only this integrator's predictions: a name (mc), or a name with settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        group="What to compare",
    )
    split: str = option("test", "Split to compare on.", metavar="SPLIT", group="What to compare")
    baseline: str | None = option(
        None,
        "Show differences from this posterior (POSTERIOR or POSTERIOR.INTEGRATOR), with intervals and p-values.",
        metavar="NAME",
        group="Tests",
    )
    alpha: float = option(
        0.05,
        "Family-wise significance level for the tests in each column. The intervals have level 1 - alpha.",
        minimum=1e-6,
        maximum=0.5,
        group="Tests",
    )
    bootstrap: int = option(
        1000,
        "Number of bootstrap replicates over examples, used with a single checkpoint.",
        minimum=100,
        group="Tests",
        is_rare=True,
    )
    settings: dict[str, Any] = collected(of_compared_scores)
    plot: str | None = option(
        None, "Draw the comparison as compare-SPLIT.png in this folder.", metavar="DIR", writes=True, group="Output"
    )
    by: str | None = option(
        None,
        "cost sorts the rows by how many gradient passes over the training data each posterior took, cheapest first.",
        choices=("cost",),
        group="Output",
    )
    format: str = option(
        "text", "Output format of the table.", choices=("text", "csv", "markdown", "latex"), group="Output"
    )
    seed: int = option(0, "Seed of the bootstrap.", minimum=0, env_common=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.scores  # wrong ones are told before any work
        if len(set(self.metric)) < len(self.metric):
            raise UsageError("\0metric\0: the same score is given twice")

    @property
    def scores(self) -> list[Quantity]:
        """What --metric asks for."""
        return [parse_score(text, "\0metric\0", compared()) for text in self.metric or _default_metrics()]
