"""Chains of hmc that several processes share out: each moves some of them over all the data, and all hear where they end.

Chains go in groups whose number depends on nothing but their own, so that a group's products are of one size, and round alike,
for any number of workers. Starts, momenta and acceptances are drawn by every worker for all chains: a trajectory is all that is
shared out, and after it the workers are in step again. They talk once a transition, not once a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from bnncli.inference.dynamics import Mover, PlainMover, State, WhitenedPotential
from bnncli.lazy import torch
from bnncli.machine.team import Team, alone, shares

if TYPE_CHECKING:
    from torch import Tensor

MOST_GROUPS = 64


def chain_groups(num_chains: int, *, smallest: int) -> list[slice]:
    """The chains of each group: at least `smallest` (all of them, where they are fewer), and at most 64 groups."""
    count = max(1, min(num_chains // smallest, MOST_GROUPS))
    return [slice(part.start, part.stop) for part in shares(num_chains, count)]


class Workers(NamedTuple):
    """Processes that share out chains.

    Args:
        smallest_group: chains that one product is of at least, where fewer would cost more each.
    """

    team: Team
    smallest_group: int = 1

    def mover(
        self,
        potential: WhitenedPotential,
        dynamics: str,
        num_chains: int,
        new_mover: Callable[[], Mover | None],
    ) -> SharedMover:
        """What moves all chains; arguments as of SharedMover, whose groups move plainly where `new_mover` makes none."""
        groups = chain_groups(num_chains, smallest=self.smallest_group)
        return SharedMover(potential, groups, self.team, lambda: new_mover() or PlainMover(potential, dynamics))


class SharedMover:
    """Makes the trajectories of all chains, this worker those of its groups; ends have their energy.

    Args:
        potential: that they move in.
        groups: of the chains, the same on all workers.
        team: the workers.
        new_mover: makes what moves one group.
    """

    has_energy: ClassVar[bool] = True

    def __init__(
        self, potential: WhitenedPotential, groups: list[slice], team: Team, new_mover: Callable[[], Mover]
    ) -> None:
        self.potential, self.groups, self.team = potential, groups, team
        self._shares = [groups[part.start : part.stop] for part in shares(len(groups), team.size)]
        self._movers = [new_mover() for _ in self._shares[team.rank]]

    def __call__(self, state: State, momentum: Tensor, *, step_size: float, num_steps: int) -> tuple[State, Tensor]:
        """The chains and their momenta (C, P) after num_steps gradients, on every worker."""
        num_params = momentum.shape[1]
        own = momentum.new_zeros(max(map(_num_chains, self._shares)), 3 * num_params + 1)
        start = 0
        with alone():
            for group, mover in zip(self._shares[self.team.rank], self._movers, strict=True):
                here = State(*(part[group] for part in state))
                end, turned = mover(here, momentum[group], step_size=step_size, num_steps=num_steps)
                end = self.potential.with_energy(end)
                stop = start + len(turned)
                own[start:stop] = torch.cat([end.z, end.gradient, turned, end.potential.unsqueeze(1)], dim=1)
                start = stop
        found = self.team.gather(own)
        ends = torch.cat([part[: _num_chains(share)] for part, share in zip(found, self._shares, strict=True)])
        z, gradient, turned = (ends[:, place : place + num_params] for place in range(0, 3 * num_params, num_params))
        return State(z, ends[:, -1], gradient), turned


def _num_chains(groups: list[slice]) -> int:
    return sum(group.stop - group.start for group in groups)
