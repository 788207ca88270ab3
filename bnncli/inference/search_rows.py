"""Of how many examples a search for the prior precision is made, where all of them would take long.

A search finds ten modes or more, each by some dozen passes over the data, and judges each by draws on val. The precision that
val prefers is one of the prior, and depends little on how many examples there are,
so that a part of them tells it; the fit there is of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.inference.costs import NUM_DRAWS
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Examples times parameters that a candidate's mode, and the draws on val, may take: about 15 and 5 s on two cores.
_MODE_WORK = {"cpu": 1.6e10, "cuda": 1e12}
_VAL_WORK = {"cpu": 1.6e11, "cuda": 1.6e13}
_BRIEF_SHARE = (
    1 / 16
)  # of _MODE_WORK, from which on the weakest priors of the grid, whose modes take the longest, are tried only where they may be the best
_LEAST_BY_OUTPUT = 10  # examples
_LEAST_VAL = 1000
_PAYS = 0.5  # larger parts are all


@dataclass(frozen=True)
class SearchRows:
    """Sorted rows (n,) int64 of train and of val; None where they are all of them."""

    train: Tensor | None
    val: Tensor | None


def search_rows(
    num_examples: int,
    num_val: int,
    *,
    num_params: int,
    num_outputs: int,
    device: torch.device,
    generator: torch.Generator,
) -> SearchRows:
    """The rows to search by: drawn without replacement, from sizes and the kind of device alone."""
    train = search_size(num_examples, num_params=num_params, num_outputs=num_outputs, device=device)
    val = _size(num_val, max(int(_VAL_WORK[_kind(device)] / (num_params * NUM_DRAWS)), _LEAST_VAL))
    return SearchRows(_some(num_examples, train, generator), _some(num_val, val, generator))


def search_size(num_examples: int, *, num_params: int, num_outputs: int, device: torch.device) -> int:
    """How many training examples a search reads."""
    return _size(num_examples, max(int(_MODE_WORK[_kind(device)] / num_params), _LEAST_BY_OUTPUT * num_outputs))


def is_brief(num_examples: int, *, num_params: int, device: torch.device) -> bool:
    """Whether a search by so many examples leaves out precisions far from the checkpoint's own."""
    return num_examples * num_params > _BRIEF_SHARE * _MODE_WORK[_kind(device)]


def _kind(device: torch.device) -> str:
    return device.type if device.type in _MODE_WORK else "cpu"


def _size(count: int, wanted: int) -> int:
    return count if wanted > _PAYS * count else wanted


def _some(count: int, wanted: int, generator: torch.Generator) -> Tensor | None:
    return None if wanted == count else torch.randperm(count, generator=generator)[:wanted].sort().values
