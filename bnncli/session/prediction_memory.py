"""Estimate the memory to predict with a posterior over a whole network, in bytes, before it is opened."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from bnncli.artifacts.headers import Header
from bnncli.inference.memory import logit_block_bytes, made_draw_bytes, network_bytes
from bnncli.integrators._draws import chunk_sizes
from bnncli.integrators._moments import NETWORK_MEAN_DRAWS
from bnncli.integrators.mc import affordable_draws
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout
from bnncli.session.predictor import LINEARISED, OF_THETA, type_of
from bnncli.system.memory import budget, require

_READ_COPIES = 2  # copies of a posterior's file while reading: its bytes and its tensors; a sampler's is mapped
_AT_ONCE_BYTES = 32  # per parameter of draws all made at once: Sobol points or deviations, and theta, in float64
_COVARIANCES = 4  # covariances of an example's logits, float64: sum, increment and root


@dataclass(frozen=True)
class PosteriorMemory:
    """Memory of a posterior over a network during prediction.

    Args:
        layout: bound to the network.
        kind: its type.
        structure: of a Gaussian's covariance; empty for others.
        file_bytes: of its file.
        num_stored: draws in its file; 0 if it creates them.
        drawn_params: size of a draw; of a mixture, a member's number and its last layer.
    """

    layout: ModuleLayout
    kind: str
    structure: str
    file_bytes: int
    num_stored: int
    drawn_params: int

    @classmethod
    def of(cls, header: Header, layout: ModuleLayout) -> PosteriorMemory:
        """Create it from a posterior's header and its layout bound to the network."""
        meta, metrics, kind = header.meta, header.meta.get("metrics", {}), type_of(header)
        stored = metrics.get("chains", 0) * metrics.get("draws", 0) if kind == "samples" else 0
        drawn = 1 + HeadLayout.from_meta(meta["head"]).num_params if kind == "mixture" else layout.num_params
        num_stored = int(stored or meta.get("default_samples") or 0)
        return cls(layout, kind, str(meta.get("structure", "")), header.path.stat().st_size, num_stored, drawn)

    @property
    def posterior_bytes(self) -> int:
        """Return the bytes to read the posterior."""
        return self.file_bytes * (1 if self.kind == "samples" else _READ_COPIES)

    def draw_bytes(self, num_draws: int) -> int:
        """Return the bytes to create and hold draws (S, P) float32, beyond those in the file."""
        if self.kind == "samples":
            return 4 * num_draws * self.drawn_params * (num_draws < self.num_stored)
        return 4 * num_draws * self.drawn_params + made_draw_bytes(self.drawn_params, num_draws)

    def predicting_bytes(
        self, device: torch.device, needs: str, num_examples: int, num_draws: int | None, *, has_scores: bool = True
    ) -> int:
        """Return the peak beside the posterior and the inputs: draws, or the logits' covariances, and a block of examples.

        Args:
            needs: what an integrator needs of the posterior.
            num_draws: used; None for all stored draws, or without draws.
            has_scores: whether energies are computed, with further draws unless the posterior is linearised.
        """
        count, layout = num_draws or self.num_stored or 1, self.layout
        is_pushed = needs == "logit_root" and (self.kind == "linear-draws" or count < layout.num_outputs)
        of_theta = needs in OF_THETA or is_pushed
        examples, at_once = chunk_sizes(torch.empty(num_examples, 0, device=device), layout, count if of_theta else 1)
        block = layout.forward_bytes * examples * min(at_once, count)
        if is_pushed or needs == "quasi_noise":
            work = _AT_ONCE_BYTES * count * self.drawn_params
        elif of_theta:
            work = self.draw_bytes(count)
        elif needs == "center":
            work = 0
        else:
            rows = chunk_sizes(torch.empty(num_examples, 0, device=device), layout, count, width=layout.num_classes)[0]
            work = 8 * _COVARIANCES * rows * layout.num_outputs**2
            work += logit_block_bytes(layout, device, rows, self.structure)
        if has_scores and self.kind not in (*LINEARISED, "point", "calibrated"):
            work += self.draw_bytes(affordable_draws(NETWORK_MEAN_DRAWS, self.drawn_params))
        return work + block


def require_prediction(
    memory: PosteriorMemory,
    device: torch.device,
    needs: str,
    num_examples: int,
    num_draws: int | None,
    *,
    keeps_samples: bool,
    what: str,
) -> int:
    """Return the peak bytes of predictions, with the inputs.

    Args:
        keeps_samples: whether the probabilities of each draw are kept.
        what: name of the prediction, for messages.

    Raises:
        DeviceError: memory is short.
    """
    held = memory.posterior_bytes + network_bytes(memory.layout, num_examples)

    def needed(count: int | None) -> int:
        of_draws = 4 * (count or memory.num_stored) * keeps_samples
        stored = num_examples * memory.layout.num_classes * (8 + of_draws)
        return held + stored + memory.predicting_bytes(device, needs, num_examples, count)

    most = bisect.bisect_right(range(1, num_draws), budget(device), key=needed) if num_draws else 0
    require(needed(num_draws), device, what=what, hint=f"use at most \0samples\0 {most}" if most else None)
    return needed(num_draws)
