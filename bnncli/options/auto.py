"""Options of auto."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.command import accept_poor_network_option
from bnncli.options.declaration import Checked, option, parse_positive
from bnncli.options.shared import trust_code_option

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class AutoOptions(Checked):
    """Options of auto."""

    budget: str | None = option(
        None,
        "Time limit, such as 90s, 5m or 1h. Fits that would exceed it are skipped; the next auto resumes them "
        "where it can.",
        metavar="TIME",
    )
    prior_precision: str = option("auto", "Prior precision, as in fit-laplace.", metavar="NUMBER|val|marglik|auto")
    criterion: str = option(
        "nll-keep-accuracy",
        "What a recommended posterior must improve: the val NLL without a significant loss of accuracy, or just "
        "the NLL.",
        choices=("nll-keep-accuracy", "nll"),
    )
    full: bool = option(False, "Try all methods, even when a simpler posterior already fits well.")
    accept_poor_network: bool = accept_poor_network_option()
    trust_code: bool = trust_code_option(is_recorded=False, also=" and for an ensemble")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.budget_seconds
        if self.prior_precision not in ("auto", "val", "marglik"):
            parse_positive(self.prior_precision, "\0prior_precision\0", "auto, val, marglik or a positive number")

    @property
    def budget_seconds(self) -> float | None:
        """Seconds; None without a limit."""
        if self.budget is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", self.budget)
        if found is None or float(found[1]) == 0:
            raise UsageError(f"\0budget\0: expected a time such as 90s, 5m or 1h; got {self.budget!r}")
        return float(found[1]) * _SECONDS[found[2]]
