"""Random numbers: named streams of one seed, permutations, scrambled Sobol normals, noise keyed by row."""

from __future__ import annotations

import math
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor


# Up to this many numbers, a draw is made on the CPU in float64 for any device, so that draws agree between devices.
# Larger ones took six times as long to draw and move as the gradient that needed them (P of 2 million).
LARGE = 2**15


@lru_cache(maxsize=256)
def stream_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed for the stream `name` (such as "refine/shuffle") under the user's seed."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for the stream `name`; by default on the CPU, so that draws agree between devices."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, name))


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return a generator on the device of the draws: on a GPU, one seeded from the given one, to avoid transfers."""
    if device.type != "cuda" or generator.device.type == "cuda":
        return generator
    seed = int(torch.randint(2**62, (1,), generator=generator))
    return torch.Generator(device).manual_seed(seed)


def source_of(generator: torch.Generator, num_numbers: int, device: torch.device) -> torch.Generator:
    """Return the generator for draws of num_numbers numbers: the given one up to LARGE, above it one on the device.

    All draws decide here. A GPU generator is seeded from the given one at every call, so that storing the given one's
    state suffices to resume.
    """
    return on_device(generator, device) if num_numbers > LARGE else generator


_LOW = 2**32 - 1
# From this size on, importing PyTorch takes less time than shuffling here (1.5 s); from 2**32 / 20 on it also draws 64
# bits per item.
_LONG = 2**21


def permutation(num_items: int, seed: int) -> np.ndarray:
    """Return (num_items,) int64, equal to torch.randperm with a CPU generator seeded with `seed`.

    Durstenfeld's shuffle ("Algorithm 235", CACM 7, 1964): swap position i with position i + (word i modulo n - i).

    Args:
        seed: non-negative integer of at most 64 bits.
    """
    if num_items >= _LONG:
        return np.asarray(torch.randperm(num_items, generator=torch.Generator().manual_seed(seed)).numpy())
    twister = np.random.MT19937()
    np.random.RandomState(twister).seed(seed & _LOW)  # seeds like init_genrand, unlike its own constructor
    words = twister.random_raw(max(0, num_items - 1))
    steps = (words % np.arange(num_items, 1, -1, dtype=np.uint64)).tolist()
    order = list(range(num_items))
    for place, step in enumerate(steps):
        other = place + step
        order[place], order[other] = order[other], order[place]
    return np.array(order, dtype=np.int64)


MOST_DIMENSIONS = 21_201  # of the direction numbers
_BITS = 32


def quasi_normal(num_samples: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return points (S, dim) float64 on the CPU, each standard normal and jointly evenly spread; best if S is a power of two.

    Args:
        num_samples: S.
        dim: at most 21,201.
        generator: determines the scrambling.

    Raises:
        UsageError: there are too many dimensions.
    """
    from scipy.stats import qmc  # slow import

    if dim > MOST_DIMENSIONS:
        raise UsageError(
            f"\0qmc\0: Sobol points support at most {MOST_DIMENSIONS} dimensions, but {dim} are needed",
            hint="for a gaussian posterior, \0integrator\0 logit-mc \0qmc\0 needs one dimension per logit; otherwise "
            "omit \0qmc\0",
        )
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    sequence = qmc.Sobol(dim, scramble=True, bits=_BITS, rng=seed)
    balanced = 1 << (num_samples - 1).bit_length()  # SciPy warns otherwise; balance_warning tells users
    points = torch.from_numpy(sequence.random(balanced)[:num_samples])
    inside = torch.rand(num_samples, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    return torch.special.ndtri((points + inside * 2.0**-_BITS).clamp(tiny, 1 - 2.0**-53))


def balance_warning(num_samples: int, num_scrambles: int = 1) -> str | None:
    """Return a warning if Sobol points are less even than possible; None for a power of two in each scramble."""
    size, rest = divmod(num_samples, num_scrambles)
    if rest == 0 and size & (size - 1) == 0:
        return None
    lower = num_scrambles << (size.bit_length() - 1)
    return (
        f"\0qmc\0 spreads {num_samples} draws less evenly than {num_scrambles} times a power of two: use "
        f"\0samples\0 {lower} or {2 * lower}"
    )


_HALF = 1 << 31  # points are multiples of 2^-32, stored minus a half in 32 bits
_COLUMNS = 1 << 22  # numbers hashed at once
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number


def uniform_points(noise: Tensor) -> Tensor:
    """Convert standard normals (S, K) to uniform 32-bit points, int32."""
    uniform = torch.special.ndtr(noise.double())
    return ((uniform * 2 * _HALF).long().clamp_max(2 * _HALF - 1) - _HALF).int()


def row_shifts(rows: Tensor, dim: int) -> Tensor:
    """Return shifts (K, n) int32 of rows (n, ...), one per row and dimension, independent of the row's position."""
    counters = torch.arange(1, dim + 1, device=rows.device).unsqueeze(1)
    return (_mix(row_keys(rows) + counters * _GOLDEN) >> 32).int()


def shifted_normal(points: Tensor, shifts: Tensor, like: Tensor) -> Tensor:
    """Return standard normals (s, K, n) in the precision of `like`, from points (s, K) and shifts (K, n)."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    uniform = (points.unsqueeze(2) ^ shifts).to(dtype).add_(0.5).mul_(1 / _HALF)
    most = 1 - torch.finfo(dtype).eps / 2
    return uniform.clamp_(-most, most).erfinv_().mul_(math.sqrt(2)).to(like.dtype)


def row_keys(rows: Tensor) -> Tensor:
    """Return a 64-bit key per row, (n,): an order-independent exact sum of its elements' bits times odd numbers."""
    flat = rows.detach().flatten(1)
    keys = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    size = max(1, _COLUMNS // max(1, len(flat)))
    for begin in range(0, flat.shape[1], size):
        part = flat[:, begin : begin + size]
        bits = part.float().contiguous().view(torch.int32) if part.is_floating_point() else part
        places = torch.arange(begin, begin + part.shape[1], device=flat.device)
        keys += (bits.long() * (_mix(places * _GOLDEN) | 1)).sum(dim=1)
    return _mix(keys)


def _mix(keys: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of a key affects every bit of the result."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        keys = (keys ^ _unsigned_shift(keys, shift)) * factor
    return keys ^ _unsigned_shift(keys, 31)


def _unsigned_shift(keys: Tensor, by: int) -> Tensor:
    return (keys >> by) & ((1 << (64 - by)) - 1)
