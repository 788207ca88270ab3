"""Options of diagnose."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option
from bnncli.options.layers import chosen_layers_option, trust_code_option


@dataclass(frozen=True)
class DiagnoseOptions(Checked):
    """Options of diagnose."""

    posterior: list[str] = option(
        [],
        "Posterior to judge, by name or file; all of the run by default. Repeatable.",
        metavar="NAME|FILE",
    )
    layers: str | None = chosen_layers_option(is_recorded=False)
    draws: int | None = option(
        None,
        "Draws for ELBO and Pareto k; by default 512, doubled up to 8192 until the ELBO's standard error is at most 2 nats and 1 %; "
        "not where the log weights spread by more than 50 nats, which the first 32 show over other layers than the last, "
        "and fewer, down to 64, of a network whose passes over the data take long.",
        minimum=2,
    )
    strict: bool = option(False, "Exit 3 unless a posterior is good for its target.")
    trust_code: bool = trust_code_option(is_recorded=False)
