"""What says which target a posterior is fitted to: a posterior whose prior it has, or a prior precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.errors import UsageError
from bnncli.options.target import TargetOptions
from bnncli.parameters.prior import Prior
from bnncli.run import named_posterior
from bnncli.run.inputs import Split, open_posterior, posterior_prior, posterior_source
from bnncli.run.out_of_fold import unique_sources
from bnncli.run.session import Run

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.posteriors.gaussian import Gaussian


_LARGE = 1 << 30  # bytes of a base's file, beyond which it is not read again


@dataclass(frozen=True)
class BesideBase:
    """How a Gaussian compares with its base, parameter by parameter.

    Args:
        name: of the base.
        median_share: the median parameter's variance, of that under the base.
        rms_distance, largest_distance: between the means, in standard deviations of the base.
    """

    name: str
    median_share: float
    rms_distance: float
    largest_distance: float


@dataclass(frozen=True)
class Base:
    """A posterior whose prior is the target's."""

    path: Path
    header: Header
    source: Source
    prior: Prior

    @property
    def is_gaussian(self) -> bool:
        """Whether it can whiten."""
        return self.header.meta.get("type") == "gaussian"


def find_base(run: Run, options: TargetOptions) -> Base | None:
    """The one that the options name, or the default; None where they give a prior precision.

    Raises:
        MissingInput: there is none.
        DataError: it has no prior.
        UsageError: it is over other layers, or there is a prior precision beside it.
    """
    if options.given_precision is not None:
        if options.base not in (None, options.default_base):
            raise UsageError("give only one of \0prior_precision\0 and \0base\0: both set the prior precision")
        return None
    path = named_posterior.find_base(run, options, options.base)
    header, source = posterior_source(run, path, "base")
    layers = str(header.meta.get("layers") or "last")
    if layers != options.layers:
        raise UsageError(
            f"\0base\0 {path.stem} is over \0layers\0 {layers}, but got \0layers\0 {options.layers}",
            hint="name a base over these layers, or give \0prior_precision\0 NUMBER",
        )
    if "num_varying" in header.meta:
        raise UsageError(
            f"\0base\0 {path.stem} fixes all but {header.meta['num_varying']:,} parameters, but this method "
            "moves all of them",
            hint="name a base that fixes none, or give \0prior_precision\0 NUMBER",
        )
    return Base(path, header, source, posterior_prior(path, header))


def beside_base(base: Base | None, gaussian: Gaussian) -> BesideBase | None:
    """The comparison; None where the base is no Gaussian, has no variances at hand, or is large."""
    if base is None or not base.is_gaussian or base.path.stat().st_size > _LARGE:
        return None
    other = open_posterior(base.path)[0]
    if not hasattr(other.covariance, "marginal_variances"):
        return None
    variances = other.covariance.marginal_variances()
    own: Tensor = gaussian.covariance.marginal_variances()  # type: ignore[attr-defined]
    distances = (gaussian.mean.cpu() - other.mean) / variances.sqrt()
    return BesideBase(
        base.path.stem,
        float((own.cpu() / variances).median()),
        float(distances.square().mean().sqrt()),
        float(distances.abs().max()),
    )


def prior_of(options: TargetOptions, base: Base | None) -> Prior:
    """The target's prior: the base's, or of the precision that was given."""
    if base is not None:
        return base.prior
    assert options.given_precision is not None
    return Prior(options.given_precision)


def request_params(run: Run, options: TargetOptions, base: Base | None) -> dict[str, Any]:
    """What the request records of the options."""
    return {**options.params(), "base": None if base is None else base.path.stem, "seed": run.compute.seed}


def request_sources(train: Split, held_out: Split | None, base: Base | None) -> Sequence[Source]:
    """What the posterior is made of: features, and the base."""
    return unique_sources(train, held_out) + ([base.source] if base else [])
