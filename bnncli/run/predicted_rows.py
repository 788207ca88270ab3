"""What is predicted for some rows of a split, and for all of them, whoever has predicted which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

from bnncli.integrators import Prediction, Ready
from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.progress import Progress, Task
from bnncli.system.workers import team
from bnncli.targets.blocks import row_slices

if TYPE_CHECKING:
    from torch import Tensor

Rows: TypeAlias = "dict[str, Tensor]"
# Where processes share a split's examples: numbers that those of a slice leave under one draw, and how many examples it has at least
# and at most. Products with a head want hundreds of examples; of a network, whose draws are passes, few examples may be dear.
_NUMBERS, _ROWS = 2**20, (64, 512)
_ROW_AXIS = {"group_probs": 1, "probs_samples": 1}  # of others it is the first


@dataclass(frozen=True)
class Predicted:
    """What one posterior predicts by one integrator for N examples, on the CPU.

    Attributes:
        prediction: probabilities and what belongs to them, with group means at `group_rows` where the draws have groups.
        energy: (N,) float32, -log sum exp of the mean logits. max_logit: (N,) float32, the largest of those.
        group_rows: (R,) int64 ascending; None without groups.
        probs_samples: (S, N, C) float16, of every draw, where they were to be kept.
        integrator: what predicted: its number of draws, the level of its intervals, what it says of itself.
    """

    prediction: Prediction
    energy: Tensor
    max_logit: Tensor
    group_rows: Tensor | None
    probs_samples: Tensor | None
    integrator: Ready


def shared_rows(num_rows: int, layout: ClassifierLayout) -> list[slice]:
    """Slices of a split's rows that are predicted each by itself, whoever does it, by a posterior with this layout."""
    return row_slices(num_rows, most=min(max(_NUMBERS // layout.widest, _ROWS[0]), _ROWS[1]), team=team())


def own_rows(num_rows: int, layout: ClassifierLayout) -> list[slice]:
    """Those of them that this process predicts: consecutive ones, perhaps none."""
    found, others = shared_rows(num_rows, layout), team()
    return found if others is None else [found[place] for place in others.share(len(found))]


def rows_of(prediction: Prediction, **beside: Tensor) -> Rows:
    """A prediction of some rows, and what goes with it, as tensors by their names, on the CPU."""
    found = {spec.name: getattr(prediction, spec.name) for spec in fields(prediction)}
    return {name: tensor.cpu() for name, tensor in (found | beside).items() if tensor is not None}


def joined(parts: Sequence[Rows], group_rows: Tensor | None, integrator: Ready) -> Predicted:
    """The prediction of consecutive rows, as one.

    Args:
        parts: from `rows_of`, at least one.
        group_rows: (R,) of all rows.
    """
    found = {name: torch.cat([part[name] for part in parts], dim=_ROW_AXIS.get(name, 0)) for name in parts[0]}
    energy, max_logit, probs_samples = found.pop("energy"), found.pop("max_logit"), found.pop("probs_samples", None)
    return Predicted(Prediction(**found), energy, max_logit, group_rows, probs_samples, integrator)


def scattered(parts: Sequence[Predicted], rows: Sequence[Tensor]) -> Predicted:
    """Predictions of some rows each, which are all rows together, as one in the order of the rows.

    Args:
        rows: (n,) ascending, of each part.
    """
    last, order = parts[-1], torch.cat(list(rows)).argsort()
    groups = [own[part.group_rows] for part, own in zip(parts, rows, strict=True) if part.group_rows is not None]
    group_rows, group_order = torch.cat(groups).sort() if groups else (None, order)
    found: Rows = {}
    for spec in fields(Prediction):
        values = [getattr(part.prediction, spec.name) for part in parts]
        if values[0] is not None:
            axis = _ROW_AXIS.get(spec.name, 0)
            found[spec.name] = torch.cat(values, axis).index_select(
                axis, group_order if spec.name == "group_probs" else order
            )
    samples = [part.probs_samples for part in parts if part.probs_samples is not None]
    return Predicted(
        Prediction(**found),
        torch.cat([part.energy for part in parts])[order],
        torch.cat([part.max_logit for part in parts])[order],
        group_rows,
        torch.cat(samples, dim=1)[:, order] if samples else None,
        last.integrator,
    )


@dataclass(frozen=True)
class PartProgress:
    """The progress of a part of some work, as that of the whole.

    Args:
        outer: where the work is shown.
        whole: the task of all parts.
        size: of this one, in the units of that.
    """

    outer: Progress
    whole: Task
    size: int

    def task(self, name: str, total: int) -> Task:
        """The task of this part, whose `total` steps count as its size."""
        return _Part(self.whole, self.size, total)

    def warn(self, text: str) -> None:
        """Passed on."""
        self.outer.warn(text)


@dataclass
class _Part:
    whole: Task
    size: int
    total: int
    done: int = 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        before = self._shown
        self.done += amount
        self.whole.advance(self._shown - before, note)

    @property
    def _shown(self) -> int:
        return self.size * self.done // max(1, self.total)
