"""The draws that evaluate measures distances to: which they are, whether they can be used, and what speaks against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError, DeviceError, MissingInput
from bnncli.evaluation.convergence import GOOD_RHAT, STUCK_ACCEPTANCE, deciding
from bnncli.evaluation.metric_rows import Row
from bnncli.options.shared import LayersOptions
from bnncli.parameters.module import LAST, STATE
from bnncli.session.inputs import open_posterior, require_draws
from bnncli.session.predictions import layers_of
from bnncli.session.run import Run

USUAL = "hmc"

if TYPE_CHECKING:
    from bnncli.evaluation.reference_distances import WeightDraws


@dataclass(frozen=True)
class Reference:
    """The draws that distances are measured to, opened when first needed.

    Args:
        name: of the posterior.
        path: None where the run has none.
        measured: rows by the posterior's file; all integrators of one posterior share them.
    """

    name: str
    path: Path | None
    measured: dict[Path, list[Row]] = field(default_factory=dict)

    @cached_property
    def header(self) -> Header:
        """Of the file; there must be one."""
        assert self.path is not None
        return read_header(self.path)

    @cached_property
    def draws(self) -> WeightDraws:
        """Every draw, and about how many of them are independent."""
        from bnncli.evaluation.reference_distances import WeightDraws

        assert self.path is not None
        posterior, header = open_posterior(self.path)
        return WeightDraws(posterior.draws, num_independent=effective_size(header))

    def doubts(self) -> list[str]:
        """What the reference's own diagnostics say against it."""
        if self.path is None:
            return []
        metrics = self.header.meta.get("metrics", {})
        r_hat, lowest = deciding(metrics).r_hat, metrics.get("lowest_chain_acceptance")
        if (r_hat is None or r_hat <= GOOD_RHAT) and (lowest is None or lowest >= STUCK_ACCEPTANCE):
            return []
        shown = "undefined" if r_hat is None else f"{r_hat:.3f}"
        return [f"{self.name} has not converged (R-hat {shown}): do not trust its row or distances to it"]


def open_reference(run: Run, name: str) -> Reference:
    """The reference of the run; one without a file (and a reason in the rows) when the run has no hmc draws.

    Raises:
        MissingInput: another one was named, and is not there.
    """
    path = run.folder.posterior(name, suffix=".nc")
    if path.is_file():
        header = read_header(path)
        try:
            run.use(header)
            require_draws(run, header, num_used=0)
        except (DataError, DeviceError) as error:
            if error.code not in ("stale_input", "out_of_memory"):  # damaged: what else was made of it is no truer
                raise
            run.console.warn(f"skipping MMD^2: {error.message}{error.advice}")
            return Reference(name, None)
        return Reference(name, path)
    if name != USUAL:
        raise MissingInput(f"--reference: no draws {path}", hint=run.suggest("hmc", name=name), path=path)
    return Reference(name, None)


@dataclass(frozen=True)
class References:
    """The reference that was asked for, and in the place of the usual one, for other layers, draws over the same layers.

    Args:
        asked: by its name.
        by_layers: hmc-all for all layers, and so on, where the run has them.
    """

    asked: Reference
    by_layers: dict[str, Reference]

    @classmethod
    def of(cls, run: Run, name: str, posteriors: Sequence[Path | None]) -> References:
        """Those of posteriors by their files. Raises as `open_reference` does."""
        found = {}
        for layers in {layers_of(path) for path in posteriors} - {LAST, STATE} if name == USUAL else ():
            path = run.folder.posterior(f"{USUAL}{LayersOptions(layers).layers_suffix}", suffix=".nc")
            if path.is_file() and layers_of(path) == layers:
                found[layers] = open_reference(run, path.stem)
        return cls(open_reference(run, name), found)

    def for_posterior(self, path: Path | None) -> Reference:
        """That of a posterior by its file."""
        return self.by_layers.get(layers_of(path), self.asked)


def effective_size(header: Header) -> int:
    """The smallest effective number of draws over all parameters, as hmc has recorded it; 0 where it is unknown."""
    metrics = header.meta.get("metrics", {})
    sizes = [metrics.get(name) for name in ("min_ess_bulk", "min_ess_tail")]
    return min((int(size) for size in sizes if size is not None), default=0)
