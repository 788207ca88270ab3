"""Options of fit-temperature."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class FitTemperatureOptions(Checked):
    """Options of fit-temperature."""

    base: str | None = option(
        None,
        "Posterior whose mean to scale, by name or file. Default: the network's last layer.",
        metavar="NAME|FILE",
        numeric=False,
    )
