"""Options of fit-ensemble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.options.declaration import Checked, option
from bnncli.options.shared import trust_code_option

TRAINED, TEMPERATURE, LAPLACE = "trained", "temperature", "laplace"


@dataclass(frozen=True)
class FitEnsembleOptions(Checked):
    """Options of fit-ensemble."""

    each: str = option(
        TRAINED,
        "What each member predicts with: its network as trained, the network at one shared temperature, or a "
        "Gaussian over its last layer.",
        choices=(TRAINED, TEMPERATURE, LAPLACE),
        numeric=False,  # recorded where it is given: `each_params`
    )
    trust_code: bool = trust_code_option(is_recorded=False)

    @property
    def each_params(self) -> dict[str, Any]:
        """What requests record of it: nothing for networks as trained."""
        return {} if self.each == TRAINED else {"each": self.each}
