"""Repeats of a latent binary network in groups that are fitted apart, each a batch of its own with random streams of its own.

Whichever process fits a group, it comes to the same bits: which repeats are together follows from their sizes alone. A batch
of another number of them might round otherwise, and draw other noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bnncli.latent.factors import Factors
from bnncli.latent.history import History
from bnncli.latent.model import LatentModel
from bnncli.latent.multiplier import MultiplierModel
from bnncli.latent.prior import SpikeAndSlab
from bnncli.lazy import torch
from bnncli.machine.team import Team, shares
from bnncli.progress import Progress
from bnncli.theta.network import NetworkLayout
from bnncli.training.shared_out import Seat, Stored, share_out

if TYPE_CHECKING:
    from torch import Tensor

# Weights of a group's networks together, at most, where it has several. Measured on a core, ten networks one by one against a
# batch of them: with 840 weights 6 times as long, with 5,120 three times, with 20,480 1.5 times, with 40,400 1.3, with 128,000
# as long. On a GPU steps of less than some millions of weights wait for the launches of their kernels.
GROUP_WEIGHTS = {"cpu": 2**16, "cuda": 2**22}


def groups_of(layout: NetworkLayout, num_repeats: int, device: torch.device) -> list[slice]:
    """The repeats of each group, as even as can be."""
    count = -(-num_repeats // largest_group(layout, num_repeats, device))
    return [slice(part.start, part.stop) for part in shares(num_repeats, count)]


def largest_group(layout: NetworkLayout, num_repeats: int, device: torch.device) -> int:
    """How many of so many repeats are in a group at most."""
    weights = GROUP_WEIGHTS.get(device.type, GROUP_WEIGHTS["cpu"])
    return min(num_repeats, max(1, weights // layout.num_weights))


def fit_apart(
    team: Team,
    start: LatentModel,
    fit: Callable[[LatentModel, int, Seat], Mapping[str, Tensor]],
    *,
    what: str,
    num_steps: int,
    progress: Progress,
    stored: Stored | None = None,
) -> list[dict[str, Tensor]]:
    """What the fit of each group gave, on every worker.

    Args:
        start: of all repeats; each group goes on from its own part.
        fit: of a group, from its start, the first of its repeats, and its place among the others.
        what, num_steps, progress, stored: as share_out has them.

    Raises:
        BnnError: as share_out.
    """
    groups = groups_of(start.layout, start.num_repeats, start.device)

    def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
        return fit(start.of_repeats(groups[number]), groups[number].start, seat)

    labels = [_label(rows, start.num_repeats) for rows in groups]
    return share_out(team, labels, work, what=what, num_steps=num_steps, progress=progress, stored=stored)


def fit_tensors(model: LatentModel, history: History) -> dict[str, Tensor]:
    """What became of a group."""
    prior = {name: part.expand(model.num_repeats, -1) for name, part in model.prior.tensors().items()}
    return dict(model.tensors()) | {f"prior.{name}": part for name, part in prior.items()} | history.tensors()


def joined(start: LatentModel, groups: Sequence[Mapping[str, Tensor]], *, has_learnt_prior: bool) -> LatentModel:
    """The model of all repeats, on the device of their start; groups: their fit_tensors."""

    def of_all(name: str) -> Tensor:
        parts = [one[name] for one in groups]
        return (parts[0] if name.endswith("mask") else torch.cat(parts)).to(start.device)

    factors = Factors(**{name: of_all(name) for name in start.factors.tensors()})
    prior = start.prior
    if has_learnt_prior:
        prior = SpikeAndSlab.from_tensors({name: of_all(f"prior.{name}") for name in prior.tensors()}, prior.bias_sd)
    multipliers = [
        MultiplierModel.from_tensors({name: of_all(f"multiplier.{index}.{name}") for name, _ in one.tensors()})
        for index, one in enumerate(start.multipliers)
    ]
    return LatentModel(start.layout, factors, prior, tuple(multipliers))


def joined_history(groups: Sequence[Mapping[str, Tensor]]) -> History:
    """That of all repeats."""
    names = [name for name in groups[0] if name.startswith("history.")]
    return History.from_tensors({name: torch.cat([one[name] for one in groups], dim=1) for name in names})


def _label(rows: slice, num_repeats: int) -> str:
    """A group, for people."""
    first, last = rows.start + 1, rows.stop
    return f"network {first} of {num_repeats}" if first == last else f"networks {first} to {last} of {num_repeats}"
