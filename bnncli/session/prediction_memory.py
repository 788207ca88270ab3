"""What a posterior over a whole network will take of the memory to predict with, planned before it is opened, in bytes.

The posterior is held as its file has it, and so are the inputs and the draws that predict. Beside them stands what needs most: the
file while it is read, draws while they are made, or a block of examples.
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

_READ_COPIES = 2  # of a posterior's file: its bytes, and its tensors
_DERIVED_VECTORS = 3  # of P numbers, float64, that a covariance makes of its file
_MADE_VECTORS = 4  # of P numbers, float64, for each draw that is made of its noise
# Of each number of draws that become deviations of theta: float64, the mean taken off, and float32 of both.
_PUSHED_BYTES = 20
_QUASI_VECTORS = 4  # of P numbers, float64, for each draw of Sobol points: those, their quantiles, theta and products
_LOGIT_COPIES = 4  # of draws of logits: normals, the logits, their probabilities, and p log p
_COVARIANCES = 4  # of an example's logits, float64: the sum, what is added, and its root


@dataclass(frozen=True)
class PredictionSizes:
    """What is to be predicted.

    Args:
        needs: of the posterior, as an integrator says.
        num_examples: of the split.
        num_draws: that predict; None for all that the posterior has, or where none do.
        keeps_samples: whether the probabilities of each draw are kept.
    """

    needs: str
    num_examples: int
    num_draws: int | None
    keeps_samples: bool = False

    def stored_bytes(self, num_classes: int, num_draws: int) -> int:
        """Of what is predicted, of draws, and of their groups; as blocks, and joined."""
        groups = 4 * NUM_GROUPS * num_group_mean_rows(self.num_examples, num_classes, NUM_GROUPS)
        return 2 * num_classes * (self.num_examples * (4 + 2 * num_draws * self.keeps_samples) + groups)


@dataclass(frozen=True)
class PosteriorMemory:
    """A posterior, as the memory of its predictions goes.

    Args:
        layout: bound to the network.
        kind: its type.
        structure: of a Gaussian's covariance; empty for others.
        file_bytes: of its file.
        num_stored: draws that its file has; 0 where it makes them.
        drawn_params: numbers of a draw, of a mixture a member's number and its last layer; 0 for all of the network's.
    """

    layout: ModuleLayout
    kind: str
    structure: str
    file_bytes: int
    num_stored: int
    drawn_params: int = 0

    @classmethod
    def of(cls, header: Header, layout: ModuleLayout) -> PosteriorMemory:
        """Of the posterior with this header, bound to the network."""
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
        """Numbers of a draw."""
        return self.drawn_params or self.layout.num_params

    def predicting_bytes(self, device: torch.device, asked: PredictionSizes, *, has_scores: bool = True) -> int:
        """At the peak, beside the inputs.

        Args:
            has_scores: whether energies are taken too, of draws of their own where the posterior is not linearised.
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
        """Of the posterior while it is used."""
        return self.file_bytes + 8 * _DERIVED_VECTORS * self.layout.num_params

    @property
    def reading_bytes(self) -> int:
        """Of the posterior while it is read; draws of a sampler are mapped."""
        return self.file_bytes if self.kind == "samples" else _READ_COPIES * self.file_bytes

    def sampling_bytes(self, num_draws: int) -> int:
        """Of draws (S, P) float32 while they are made."""
        return self._made(num_draws, needs="sample")

    def block_bytes(self, device: torch.device, num_examples: int, num_draws: int) -> int:
        """Of a block of examples that goes through the network under a block of draws, without gradients."""
        examples, draws = chunk_sizes(torch.empty(num_examples, 0, device=device), self.layout, num_draws)
        return self.pass_bytes(device, examples * min(draws, num_draws))

    def pass_bytes(self, device: torch.device, num_pairs: int) -> int:
        """Of so many pairs of a draw and an example that go through the network together, without gradients."""
        return process_bytes(self._forward, self.layout, num_pairs, device)

    @cached_property
    def _forward(self) -> Growth:
        """Of examples, under one draw."""
        assert self.layout.network is not None
        return forward_growth(self.layout.network, self.layout.input_shape)

    def _kept(self, num_draws: int) -> int:
        """Of draws (S, P) float32 that are not those of the file itself."""
        is_all = self.kind == "samples" and num_draws >= self.num_stored
        return 0 if is_all else 4 * num_draws * self.num_drawn

    def _made(self, num_draws: int, *, needs: str, is_pushed: bool = False) -> int:
        """Of the same while they are made."""
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
        """Of the logits' covariances, a block of examples at a time, and of draws of the logits."""
        width = self.layout.num_classes
        count = chunk_sizes(torch.empty(num_examples, 0, device=device), self.layout, num_draws, width=width)[0]
        covariances = 8 * _COVARIANCES * count * self.layout.num_outputs**2
        drawn = min(chunk_budget(torch.empty(0, device=device)), num_draws * count * width)
        made = prediction_bytes(self.layout, count, self.structure, device)
        return covariances + max(made, 4 * _LOGIT_COPIES * drawn)


def require_prediction(memory: PosteriorMemory, asked: PredictionSizes, device: torch.device, *, what: str) -> int:
    """Bytes that predictions take at their peak, the inputs with them. Raises DeviceError where that is too much.

    Args:
        what: is predicted, for the person.
    """
    beside = first_use_bytes(device) + (4 * memory.layout.num_features + 8) * asked.num_examples

    def needed(count: int | None) -> int:
        one = replace(asked, num_draws=count)
        stored = one.stored_bytes(memory.layout.num_classes, count or memory.num_stored)
        return beside + stored + memory.predicting_bytes(device, one)

    most = bisect_right(range(1, asked.num_draws), budget(device), key=needed) if asked.num_draws else 0
    require(needed(asked.num_draws), device, what=what, hint=f"use at most \0samples\0 {most}" if most else None)
    return needed(asked.num_draws)
