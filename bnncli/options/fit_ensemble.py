"""Options of fit-ensemble."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked
from bnncli.options.layers import trust_code_option


@dataclass(frozen=True)
class FitEnsembleOptions(Checked):
    """Options of fit-ensemble."""

    trust_code: bool = trust_code_option(is_recorded=False)
