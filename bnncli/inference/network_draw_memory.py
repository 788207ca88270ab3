"""What refine and hmc over a whole network will take of the memory, planned before they start, in bytes.

Inputs and the base are held as a whole. Beside them stands what needs most: chains or training steps, or draws that judge them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.inference import elbo
from bnncli.inference.network_blocks import first_use_bytes, gradient_bytes, trying_bytes
from bnncli.lazy import torch
from bnncli.machine.memory import budget, require
from bnncli.posteriors import draws_at_once, made_at_once
from bnncli.targets.activation_room import pairs_at_once
from bnncli.theta.module import ModuleLayout

_CHAIN_VECTORS = (
    14  # of P numbers, float64, that each chain holds within a trajectory: two states, momentum, and products
)
_JUDGED_VECTORS = (
    6  # of P numbers, float64, for each draw whose log weight is found: theta, and what it is made of on the way
)
_MADE_VECTORS = 4  # the same for each draw that is made to predict with


@dataclass(frozen=True)
class NetworkDraws:
    """Where draws are of, and what is held beside them.

    Args:
        layout: of the chosen parameters, bound to the network.
        num_examples, num_held: of the training and the validation data, 0 without any.
        base_bytes: of the base's file, float64, or what stands for it.
    """

    layout: ModuleLayout
    num_examples: int
    num_held: int
    base_bytes: int

    def sampling_bytes(self, device: torch.device, *, num_chains: int, num_draws: int) -> int:
        """Of chains, and of so many draws a chain, which are read from their file to be judged."""
        size = self.layout.num_params
        chains = 8 * _CHAIN_VECTORS * num_chains * size
        moving = chains + gradient_bytes(self.layout, num_chains * self.num_examples, device, torch.float32)
        work = max(moving, 8 * num_chains * size) + 4 * num_chains * num_draws * size
        return self._beside(device) + max(work, trying_bytes(self.layout))

    def require_sampling(self, device: torch.device, *, num_chains: int, num_draws: int) -> int:
        """What chains take. Raises DeviceError, naming how many have room, where that is too much."""

        def needed(count: int) -> int:
            return self.sampling_bytes(device, num_chains=count, num_draws=num_draws)

        there = budget(device)
        fitting = [count for count in range(1, num_chains) if needed(count) <= there]
        hint = f"use at most \0chains\0 {fitting[-1]}" if fitting else "no chain fits: use fewer \0layers\0"
        what = f"hmc with {num_chains} chains and {self.layout.num_params} parameters"
        require(needed(num_chains), device, what=what, hint=hint)
        return needed(num_chains)

    def refinement_bytes(
        self, device: torch.device, *, training: int, num_drawn: int, num_judging: int, num_predicting: int
    ) -> int:
        """Of a flow.

        Args:
            training: training_bytes of the flow.
            num_drawn: draws of a step.
            num_judging: draws that tell the ELBO.
            num_predicting: draws that predict the validation data.
        """
        layout, size = self.layout, self.layout.num_params
        step = training + gradient_bytes(layout, num_drawn * self.num_examples, device, torch.float32)
        block = gradient_bytes(layout, pairs_at_once(layout, device), device, torch.float32)
        judging = judging_bytes(size, num_draws=num_judging) + block
        work = [step, judging, trying_bytes(layout)]
        if self.num_held:
            noise = min(num_predicting, draws_at_once(size))
            work.append(size * (4 * num_predicting + 8 * noise + 8 * _MADE_VECTORS * min(noise, made_at_once(size))))
            work.append(4 * size * num_predicting + block)
        return self._beside(device) + max(work)

    def require_refinement(self, device: torch.device, **sizes: int) -> int:
        """What a flow takes; sizes as for refinement_bytes. Raises DeviceError where that is too much."""
        needed = self.refinement_bytes(device, **sizes)
        hint = "use fewer \0elbo_draws\0, a shorter \0length\0 or a smaller \0subspace\0"
        require(needed, device, what=f"refining a Gaussian of {self.layout}", hint=hint)
        return needed

    def _beside(self, device: torch.device) -> int:
        """The inputs, and the base: as read, with what is derived from it, and in a second precision."""
        inputs = (4 * self.layout.num_features + 8) * (self.num_examples + self.num_held)
        return first_use_bytes(device) + inputs + 5 * self.base_bytes // 2


def judging_bytes(num_params: int, *, num_draws: int) -> int:
    """Of draws (S, P) whose log weights are found, a part of them at a time, beside a block of examples."""
    held = min(num_draws, draws_at_once(num_params))
    return 8 * num_params * (held + _JUDGED_VECTORS * min(held, elbo.weighed_at_once(num_params)))
