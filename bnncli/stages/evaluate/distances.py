"""The rows of evaluate that measure a posterior's distance to draws of a reference, such as hmc, in weight space."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.headers import Header
from bnncli.evaluation.metric_rows import Row
from bnncli.evaluation.reference_distances import WeightDraws, num_draws_for, reference_rows, undefined_rows
from bnncli.evaluation.scores import distances
from bnncli.lazy import torch
from bnncli.session.inputs import open_posterior, recorded_prior
from bnncli.session.run import Run
from bnncli.stages.evaluate.reference import Reference, effective_size

if TYPE_CHECKING:
    from torch import Tensor


def distance_rows(run: Run, reference: Reference, posterior: Path | None) -> list[Row]:
    """The rows of one posterior, from its file; undefined rows say why."""
    if reference.path is None or posterior is None:
        return reference_rows(
            None, None, distances(), reference=reference.name, generator=run.stream("evaluate/permutation")
        )
    if posterior not in reference.measured:
        reference.measured[posterior] = _measure(run, reference, posterior)
    return reference.measured[posterior]


def _measure(run: Run, reference: Reference, posterior: Path) -> list[Row]:
    """The rows of one posterior, all of them at once."""
    own, header = open_posterior(posterior)
    if header.meta.get("layers") != reference.header.meta.get("layers"):
        why = f"the draws of {reference.name} are over other layers"
        return undefined_rows(distances(), reference=reference.name, reason=why)
    theirs, ours = recorded_prior(reference.header), recorded_prior(header)
    if ours is not None and theirs is not None and not ours.is_close(theirs):
        run.console.warn(
            f"{posterior.stem} has prior precision {ours}, but {reference.name} has {theirs}: MMD^2 and other "
            "distances compare different targets"
        )
    draws = _draws(run, own, header)
    return reference_rows(
        draws,
        reference.draws,
        distances(),
        reference=reference.name,
        generator=run.stream("evaluate/permutation"),
        device=run.device,
    )


def _draws(run: Run, posterior: Any, header: Header) -> WeightDraws:
    """All draws of chains; seeded ones of a density or a point, whose mean is exact where its centre is that.

    The centre of a latent binary network is its median probability model, and its mean that of one repeat.
    """
    if header.kind == "samples":
        return WeightDraws(posterior.draws, num_independent=effective_size(header))
    wanted = num_draws_for(posterior.layout.num_params)
    count = min(wanted, getattr(posterior, "num_stored", wanted))
    mean: Tensor | None = None if hasattr(posterior, "mean_theta") else getattr(posterior, "center", None)
    with torch.no_grad():
        draws: Tensor = posterior.to(run.device).sample(count, run.stream("evaluate/mmd")).cpu()
    return WeightDraws(draws, mean=mean)
