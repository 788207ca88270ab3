"""Plan the memory to predict with a posterior over a whole network, in bytes, before it is opened.

The posterior, the inputs and the predicting draws are held throughout. On top comes the largest of: the file while it
is read, draws while they are created, and a block of examples.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from bnncli.artifacts.headers import Header
from bnncli.inference.network_memory import first_use_bytes, prediction_bytes, probing_bytes, process_bytes
from bnncli.integrators import chunk_budget
from bnncli.integrators._draws import chunk_sizes
from bnncli.integrators._moments import NETWORK_MEAN_DRAWS
from bnncli.integrators._partitions import NUM_GROUPS, num_group_mean_rows
from bnncli.integrators.mc import affordable_draws
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, forward_growth
from bnncli.posteriors import draws_at_once, thetas_at_once
from bnncli.session.predictor import LINEARISED, OF_THETA, type_of
from bnncli.system.memory import budget, require

if TYPE_CHECKING:
    from bnncli.parameters.tensor_bytes import Growth

_READ_COPIES = 2  # copies of a posterior's file while reading: its bytes and its tensors
_DERIVED_VECTORS = 3  # vectors (P,) float64 that a covariance derives from its file
_MADE_VECTORS = 4  # vectors (P,) float64 per draw created from noise
# Bytes per number to turn draws into deviations of theta: float64, centred float64, and float32 of both.
_PUSHED_BYTES = 20
_QUASI_VECTORS = 4  # vectors (P,) float64 per Sobol draw: points, quantiles, theta and products
_LOGIT_COPIES = 4  # copies per draw of logits: normals, logits, probabilities, p log p
_COVARIANCES = 4  # covariances of an example's logits, float64: sum, increment and root


@dataclass(frozen=True)
class PredictionSizes:
    """Sizes of a prediction.

    Args:
        needs: what an integrator needs of the posterior.
        num_examples: of the split.
        num_draws: used; None for all stored draws, or without draws.
        keeps_samples: whether the probabilities of each draw are kept.
    """

    needs: str
    num_examples: int
    num_draws: int | None
    keeps_samples: bool = False

    def stored_bytes(self, num_classes: int, num_draws: int) -> int:
        """Return the bytes of predictions, draws and group means, as blocks and concatenated."""
        groups = 4 * NUM_GROUPS * num_group_mean_rows(self.num_examples, num_classes, NUM_GROUPS)
        return 2 * num_classes * (self.num_examples * (4 + 2 * num_draws * self.keeps_samples) + groups)


@dataclass(frozen=True)
class PosteriorMemory:
    """Memory of a posterior during prediction.

    Args:
        layout: bound to the network.
        kind: its type.
        structure: of a Gaussian's covariance; empty for others.
        file_bytes: of its file.
        num_stored: draws in its file; 0 if it creates them.
        drawn_params: size of a draw; of a mixture, a member's number and its last layer; 0 for all of the network's parameters.
    """

    layout: ModuleLayout
    kind: str
    structure: str
    file_bytes: int
    num_stored: int
    drawn_params: int = 0

    @classmethod
    def of(cls, header: Header, layout: ModuleLayout) -> PosteriorMemory:
        """Create it from a posterior's header and its layout bound to the network."""
        meta, metrics = header.meta, header.meta.get("metrics", {})
        stored = metrics.get("chains", 0) * metrics.get("draws", 0) if header.kind == "samples" else 0
        return cls(
            layout,
            type_of(header),
            str(meta.get("structure", "")),
            header.path.stat().st_size,
            int(stored or meta.get("default_samples") or 0),
            1 + HeadLayout.from_meta(meta["head"]).num_params if type_of(header) == "mixture" else 0,
        )

    @property
    def num_drawn(self) -> int:
        """Return the size of a draw."""
        return self.drawn_params or self.layout.num_params

    def predicting_bytes(self, device: torch.device, asked: PredictionSizes, *, has_scores: bool = True) -> int:
        """Return the peak, without the inputs.

        Args:
            has_scores: whether energies are computed, with further draws unless the posterior is linearised.
        """
        count, num_examples = asked.num_draws or self.num_stored or 1, asked.num_examples
        is_pushed = asked.needs == "logit_root" and (self.kind == "linear-draws" or count < self.layout.num_outputs)
        of_theta = asked.needs in OF_THETA or is_pushed
        kept = self._kept(count) if of_theta else 0
        block = self.block_bytes(device, num_examples, count if of_theta else 1)
        work = [kept + block, probing_bytes(self.layout)]
        if of_theta:
            work.append(self._made(count, needs=asked.needs, is_pushed=is_pushed))
        elif asked.needs != "center":
            work.append(self._moments(device, num_examples, count))
        if has_scores and self.kind not in (*LINEARISED, "point"):
            scored = affordable_draws(NETWORK_MEAN_DRAWS, self.num_drawn)
            work.append(kept + max(self._made(scored, needs="sample"), self._kept(scored) + block))
        return max(self.reading_bytes, self.held_bytes + max(work))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the posterior in use."""
        return self.file_bytes + 8 * _DERIVED_VECTORS * self.layout.num_params

    @property
    def reading_bytes(self) -> int:
        """Return the bytes to read the posterior; a sampler's draws are memory-mapped."""
        return self.file_bytes if self.kind == "samples" else _READ_COPIES * self.file_bytes

    def sampling_bytes(self, num_draws: int) -> int:
        """Return the bytes to create draws (S, P) float32."""
        return self._made(num_draws, needs="sample")

    def block_bytes(self, device: torch.device, num_examples: int, num_draws: int) -> int:
        """Return the bytes for a block of examples through the network under a block of draws, without gradients."""
        examples, draws = chunk_sizes(torch.empty(num_examples, 0, device=device), self.layout, num_draws)
        return self.pass_bytes(device, examples * min(draws, num_draws))

    def pass_bytes(self, device: torch.device, num_pairs: int) -> int:
        """Return the bytes to pass this many pairs of draw and example through the network at once, without gradients."""
        return process_bytes(self._forward, self.layout, num_pairs, device)

    @cached_property
    def _forward(self) -> Growth:
        """Return the growth of memory with examples, under one draw."""
        assert self.layout.network is not None
        return forward_growth(self.layout.network, self.layout.input_shape)

    def _kept(self, num_draws: int) -> int:
        """Return the bytes of draws (S, P) float32 beyond those in the file."""
        is_all = self.kind == "samples" and num_draws >= self.num_stored
        return 0 if is_all else 4 * num_draws * self.num_drawn

    def _made(self, num_draws: int, *, needs: str, is_pushed: bool = False) -> int:
        """Return the bytes to create those draws."""
        size = self.num_drawn
        if self.kind == "samples":
            return self._kept(num_draws)
        if is_pushed or self.kind == "linear-draws":
            return _PUSHED_BYTES * num_draws * size
        if needs == "quasi_noise":
            return 8 * _QUASI_VECTORS * num_draws * size
        noise = min(num_draws, draws_at_once(size))
        return self._kept(num_draws) + 8 * size * (noise + _MADE_VECTORS * min(noise, thetas_at_once(size)))

    def _moments(self, device: torch.device, num_examples: int, num_draws: int) -> int:
        """Return the bytes of the logits' covariances by block of examples, and of draws of the logits."""
        width = self.layout.num_classes
        count = chunk_sizes(torch.empty(num_examples, 0, device=device), self.layout, num_draws, width=width)[0]
        covariances = 8 * _COVARIANCES * count * self.layout.num_outputs**2
        drawn = min(chunk_budget(torch.empty(0, device=device)), num_draws * count * width)
        made = prediction_bytes(self.layout, count, self.structure, device)
        return covariances + max(made, 4 * _LOGIT_COPIES * drawn)


def require_prediction(memory: PosteriorMemory, asked: PredictionSizes, device: torch.device, *, what: str) -> int:
    """Return the peak bytes of predictions, with the inputs.

    Args:
        what: name of the prediction, for messages.

    Raises:
        DeviceError: memory is short.
    """
    beside = first_use_bytes(device) + (4 * memory.layout.num_features + 8) * asked.num_examples

    def needed(count: int | None) -> int:
        one = replace(asked, num_draws=count)
        stored = one.stored_bytes(memory.layout.num_classes, count or memory.num_stored)
        return beside + stored + memory.predicting_bytes(device, one)

    most = bisect_right(range(1, asked.num_draws), budget(device), key=needed) if asked.num_draws else 0
    require(needed(asked.num_draws), device, what=what, hint=f"use at most \0samples\0 {most}" if most else None)
    return needed(asked.num_draws)
