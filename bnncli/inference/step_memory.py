"""What fits by stochastic gradient steps take of the memory, planned before they start, in bytes.

Vectors of theta's length are held in float64 or twice in float32; beside them stands what needs most: a step, the judging of draws, or the
predictions for val. Inputs of a network are held as a whole; features are streamed where they do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.inference.memory import drawn_bytes, fit_bytes
from bnncli.inference.network_blocks import first_use_bytes, gradient_bytes, trying_bytes
from bnncli.lazy import torch
from bnncli.machine.memory import budget, require
from bnncli.theta.layout import MatrixLayout
from bnncli.theta.module import ModuleLayout

_BATCH_VECTORS = 4  # of a minibatch's logits under every theta
_FULL_STEPS = 32  # on all data that are laid out at once, as bnncli.inference.target_learner has it
_LAID_OUT = 2**26  # of batches and draws of several steps at once on a CPU, as bnncli.training.steps has it


@dataclass(frozen=True)
class Stepping:
    """A fit, as its memory goes.

    Args:
        num_vectors: of P numbers, float64, that it holds: parameters, gradients, states of the optimizer, states to resume from.
        num_drawn: theta whose gradients are taken in a step.
        batch_size: examples a step; all or more for no minibatches.
        num_kept: draws (float32) that it gives.
        num_predicting: draws that predict val.
        num_judging: draws whose log joint is found.
    """

    num_vectors: int
    num_drawn: int
    batch_size: int
    num_kept: int = 0
    num_predicting: int = 0
    num_judging: int = 0

    def head_bytes(self, layout: MatrixLayout, num_examples: int) -> int:
        """Of a last layer."""
        batch = min(self.batch_size, num_examples) * (
            layout.num_features + _BATCH_VECTORS * self.num_drawn * layout.num_outputs
        )
        is_whole = self.batch_size >= num_examples
        step = 4 * batch * (not is_whole) + self._laid_out(layout.num_params, layout.num_features, num_examples)
        used = drawn_bytes(layout.num_params, num_used=max(self.num_predicting, 1), num_stored=self.num_kept)
        judging = fit_bytes("diag", layout, num_draws=self.num_judging)
        return (
            8 * self.num_vectors * layout.num_params + 4 * self.num_kept * layout.num_params + max(step, used, judging)
        )

    def network_bytes(self, layout: ModuleLayout, num_examples: int, num_held: int, device: torch.device) -> int:
        """Of a network's parameters, with its inputs."""
        from bnncli.targets.activation_room import pairs_at_once  # here, for torch

        size = layout.num_params
        inputs = (4 * layout.num_features + 8) * (num_examples + num_held)
        pairs = self.num_drawn * min(self.batch_size, num_examples)
        block = gradient_bytes(layout, pairs_at_once(layout, device), device, torch.float32)
        laid_out = self._laid_out(size, layout.num_features, num_examples)
        work = [gradient_bytes(layout, pairs, device, torch.float32) + laid_out, trying_bytes(layout)]
        if num_held:
            work.append(drawn_bytes(size, num_used=max(self.num_predicting, 1), num_stored=self.num_kept) + block)
        if self.num_judging:
            work.append(drawn_bytes(size, num_used=self.num_judging) + block)
        held = 8 * self.num_vectors * size + 4 * self.num_kept * size
        return first_use_bytes(device) + inputs + held + max(work)

    def _laid_out(self, num_params: int, num_features: int, num_examples: int) -> int:
        """Of batches and noise of several steps, or of one that is large."""
        noise = self.num_drawn * num_params
        if self.batch_size >= num_examples:
            return 4 * max(noise, min(_LAID_OUT // 4, _FULL_STEPS * noise))
        batch, num_steps = self.batch_size * num_features, -(-num_examples // self.batch_size)
        return 4 * max(noise + batch, min(_LAID_OUT // 4, num_steps * (noise + batch)))


def require_steps(needed: int, device: torch.device | str, *, what: str, hint: str) -> int:
    """What a fit takes. Raises DeviceError with the hint where it has no room."""
    if needed > budget(device):
        require(needed, device, what=what, hint=hint)
    return needed
