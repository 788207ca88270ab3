"""Options of diagnose."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option
from bnncli.options.shared import chosen_layers_option, trust_code_option


@dataclass(frozen=True)
class DiagnoseOptions(Checked):
    """Options of diagnose."""

    posterior: list[str] = option(
        [],
        "Posterior to judge, by name or file. Default: all posteriors in the run.",
        metavar="NAME|FILE",
    )
    layers: str | None = chosen_layers_option(is_recorded=False)
    draws: int | None = option(
        None,
        "Number of draws for the ELBO and Pareto k. Default: 512 to 8192, stopping when the ELBO is known to 2 "
        "nats; fewer for slow networks.",
        minimum=2,
    )
    strict: bool = option(False, "Exit 3 if none of the judged posteriors fits well.")
    trust_code: bool = trust_code_option(is_recorded=False)
