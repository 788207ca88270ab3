"""What a fit returns, one file per kind: point, gaussian, flow, samples, ...

Every kind has a `type`, a `layout`, `sample(num_samples, generator) -> (S, P)` and `to(device)`. Some have more, and
integrators ask for it by name: `num_stored` (draws that it has, no more), `weights` (of its `members`, which are all of it), `sample_whole(num_samples)` (whether so many are all of an exact mean), `center` (P,), `logit_marginals(features)`, `logit_moments(features)`,
`logit_root(features)`, `log_density(theta)`; and where theta is made from standard normals, `noise(num_samples, generator)`,
`quasi_noise(num_samples, generator)` and `from_noise(noise)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.lazy import torch
from bnncli.numerics import random
from bnncli.parameters.layouts import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor

LATENT_BINARY, SPARSE = "latent-binary", "sparse"  # types of networks of which weights are out
_AT_ONCE = 2**24  # numbers of noise held at once: 128 MiB
_MADE_AT_ONCE = 2**22  # numbers of theta made of noise at once: several copies of 32 MiB on the way
_UNIT, _FEWEST = 64, 16  # draws that a part holds whole numbers of, and the fewest however large they are


class HasNoise(Protocol):
    """A posterior that is made from standard normals."""

    @property
    def layout(self) -> ParamLayout:
        """How theta lies."""

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Standard normal draws (S, P) float64."""

    def from_noise(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """theta (S, P) and its log density (S,), both float64, for standard normal noise (S, P)."""


def standard_normal(num_samples: int, dim: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """N(0, I) draws (S, P), float64, on the device.

    Up to `seeds.LARGE` numbers a draw they are the generator's own float64 stream, moved: on the CPU, as streams of commands
    are, the same for every device. Above they are another stream: on a GPU float64 made there, on a CPU float32, which takes
    half the time and has nothing beyond 5.8 standard deviations (one number in 10^8). Equal seeds give equal draws.
    """
    source = random.source_of(generator, dim, device)
    is_single = dim > random.LARGE and source.device.type == "cpu"
    dtype = torch.float32 if is_single else torch.float64
    noise = torch.randn(num_samples, dim, generator=source, device=source.device, dtype=dtype)
    return move(noise, device).double()


def noise_blocks(posterior: HasNoise, num_samples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Standard normal draws (s, P) float64 of a posterior, S together: all at once, or a part at a time where they are many.

    Up to `seeds.LARGE` parameters the parts are together what one call makes: PyTorch makes a CPU's normals by sixteens, so
    all but the last hold whole sixteens, and the last at least one of them. How many there are depends on S and P alone,
    never on free memory.
    """
    num_params = posterior.layout.num_params
    size = draws_at_once(num_params)
    left = num_samples
    while left > 0:
        is_last = left <= size or (left - size) * num_params < 16
        yield posterior.noise(left if is_last else size, generator)
        left -= left if is_last else size


def draws_at_once(num_params: int) -> int:
    """How many draws of so many numbers are made at once."""
    most = _AT_ONCE // num_params
    unit = _UNIT if most >= _UNIT else _FEWEST
    return max(_FEWEST, most // unit * unit)


def made_at_once(num_params: int) -> int:
    """Of how many draws of so many numbers theta is made of its noise at once."""
    return max(_FEWEST, _MADE_AT_ONCE // num_params)


def sample_from_noise(
    posterior: Any, num_samples: int, generator: torch.Generator, *, also: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Draws (S, P) float32 of a posterior that is made from standard normals, whose noise is never held as a whole.

    Args:
        also: called with the noise (s, P) of each part, before its draws are made.
    """
    draws = torch.empty(0)
    done = 0
    for noise in noise_blocks(posterior, num_samples, generator):
        if also is not None:
            also(noise)
        for some in noise.split(made_at_once(posterior.layout.num_params)):
            part: Tensor = posterior.from_noise(some)[0].float()
            if len(part) == num_samples:
                return part
            draws = draws if done else part.new_empty(num_samples, part.shape[1])
            draws[done : done + len(part)] = part
            done += len(part)
    return draws


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on another device; from the CPU to a GPU through pinned memory, so that nothing waits for the GPU."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
