"""Posteriors over theta, one file per kind: point, gaussian, flow, samples, ...

Every kind has a `type`, a `layout`, `sample(num_samples, generator) -> (S, P)` and `to(device)`. Integrators look up
further capabilities by name: `num_stored` (the number of stored draws), `weights` (of its `members`, which are the
whole posterior), `sample_whole(num_samples)` (whether that many draws give an exact mean), `center` (P,),
`logit_marginals(features)`, `logit_moments(features)`, `logit_root(features)`, `log_density(theta)`, `calibration` (a map
of the class logits at the center); and where theta is
a function of standard normals, `noise(num_samples, generator)`, `quasi_noise(num_samples, generator)` and
`from_noise(noise)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.lazy import torch
from bnncli.numerics import random
from bnncli.parameters.layouts import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor

LATENT_BINARY, SPARSE = "latent-binary", "sparse"  # types of networks that leave weights out
_AT_ONCE = 2**24  # numbers of noise held at once: 128 MiB
_MADE_AT_ONCE = 2**22  # numbers of theta computed from noise at once, with several temporary copies of 32 MiB
_UNIT, _FEWEST = 64, 16  # a block holds a multiple of _UNIT draws; _FEWEST draws however large they are


class HasNoise(Protocol):
    """A posterior whose theta is a function of standard normals."""

    @property
    def layout(self) -> ParamLayout:
        """Return the layout of theta."""

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Return standard normal draws (S, P) float64."""

    def from_noise(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return theta (S, P) and its log density (S,), both float64, for standard normal noise (S, P)."""


def standard_normal(num_samples: int, dim: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw from N(0, I), (S, P) float64, on the device.

    Up to `seeds.LARGE` numbers a draw they are the generator's own float64 stream, moved to the device: commands use
    CPU generators, so the draws are the same on every device. Larger draws are another stream: float64 made on the GPU,
    or float32 on the CPU, which takes half the time and reaches no further than 5.8 standard deviations (one number in
    10^8).
    Equal seeds give equal draws.
    """
    source = random.source_of(generator, dim, device)
    is_single = dim > random.LARGE and source.device.type == "cpu"
    dtype = torch.float32 if is_single else torch.float64
    noise = torch.randn(num_samples, dim, generator=source, device=source.device, dtype=dtype)
    return move(noise, device).double()


def noise_blocks(posterior: HasNoise, num_samples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield standard normal draws (s, P) float64 of a posterior, S in total, in blocks of bounded size.

    Up to `seeds.LARGE` parameters the blocks together equal a single call: PyTorch makes a CPU's normals by sixteens,
    so all but the last hold whole sixteens, and the last at least one of them. The number of blocks depends on S and P
    alone, never on free memory.
    """
    num_params = posterior.layout.num_params
    size = draws_at_once(num_params)
    left = num_samples
    while left > 0:
        is_last = left <= size or (left - size) * num_params < 16
        yield posterior.noise(left if is_last else size, generator)
        left -= left if is_last else size


def draws_at_once(num_params: int) -> int:
    """Return how many draws of `num_params` numbers are made at once."""
    most = _AT_ONCE // num_params
    unit = _UNIT if most >= _UNIT else _FEWEST
    return max(_FEWEST, most // unit * unit)


def thetas_at_once(num_params: int) -> int:
    """Return for how many draws of `num_params` numbers theta is computed from noise at once."""
    return max(_FEWEST, _MADE_AT_ONCE // num_params)


def sample_from_noise(
    posterior: Any, num_samples: int, generator: torch.Generator, *, also: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Draw theta (S, P) float32 from standard normals, without ever holding all the noise.

    Args:
        also: called with the noise (s, P) of each block, before its draws are made.
    """
    draws = torch.empty(0)
    done = 0
    for noise in noise_blocks(posterior, num_samples, generator):
        if also is not None:
            also(noise)
        for some in noise.split(thetas_at_once(posterior.layout.num_params)):
            part: Tensor = posterior.from_noise(some)[0].float()
            if len(part) == num_samples:
                return part
            draws = draws if done else part.new_empty(num_samples, part.shape[1])
            draws[done : done + len(part)] = part
            done += len(part)
    return draws


def draw(posterior: Any, num_samples: int, generator: torch.Generator) -> Tensor:
    """Return draws of theta (S, P) float32; the repeated center of a posterior without `sample`."""
    if hasattr(posterior, "sample"):
        draws: Tensor = posterior.sample(num_samples, generator)
        return draws
    center: Tensor = posterior.center.float()
    return center.expand(num_samples, -1).clone()


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to another device; from the CPU to a GPU through pinned memory, without synchronising."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
