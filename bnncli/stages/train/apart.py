"""Networks of several seeds in groups that workers train apart, and what becomes of them as tensors that travel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.stages.train.trained import Trained
from bnncli.system.workers import shares

if TYPE_CHECKING:
    from torch import Tensor

# Networks of a group, at most. On a CPU one by one costs next to nothing, but for the smallest; a GPU wants large kernels.
GROUP_SEEDS = {"cpu": 1, "cuda": 8}


def groups_of_seeds(num_seeds: int, device: torch.device) -> list[range]:
    """The places of each group's seeds, as even as can be; from their number alone, whatever the number of workers."""
    return shares(num_seeds, -(-num_seeds // GROUP_SEEDS.get(device.type, 1)))


def tensors_of(trained: Trained) -> dict[str, Tensor]:
    """A network after training."""
    said = torch.frombuffer(bytearray(json.dumps(trained.meta).encode()), dtype=torch.uint8)
    found = {f"state/{name}": tensor for name, tensor in trained.state.items()}
    found |= {f"averaged/{name}": tensor for name, tensor in (trained.averaged or {}).items()}
    return {"meta": said, **found}


def of_tensors(tensors: dict[str, Tensor]) -> Trained:
    """The inverse of tensors_of."""
    parts: dict[str, dict[str, Tensor]] = {"state": {}, "averaged": {}}
    for key, tensor in tensors.items():
        kind, slash, name = key.partition("/")
        if slash:
            parts[kind][name] = tensor
    return Trained(parts["state"], parts["averaged"] or None, json.loads(bytes(tensors["meta"].tolist())))
