"""Standard normals that differ from row to row, made of a few points that all rows share.

Points u_s are uniform on the unit cube; row n uses the binary digits of u_s flipped where those of d_n are one (a digital
shift: Owen 2003, "Variance with alternative scramblings of digital nets"). For each row these are as uniform, as independent
and as evenly spread as the points themselves. The shift d_n is a hash of the row's numbers: means over the points have
independent errors in different rows, and the same row has the same normals in any batch, shard or order. A matrix of
normals that all rows share gives errors that a mean over rows does not reduce.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_HALF = 1 << 31  # points are multiples of 2^-32, stored minus a half in 32 bits
_COLUMNS = 1 << 22  # numbers that are hashed at a time
_GOLDEN = -7046029254386353131  # 2^64 over the golden ratio, as a signed number


def uniform_points(noise: Tensor) -> Tensor:
    """Standard normals (S, K) as uniform points in 32 bits, int32."""
    uniform = torch.special.ndtr(noise.double())
    return ((uniform * 2 * _HALF).long().clamp_max(2 * _HALF - 1) - _HALF).int()


def row_shifts(rows: Tensor, dim: int) -> Tensor:
    """Shifts (K, n) int32 of rows (n, ...): one for each row and dimension, the same wherever a row stands."""
    counters = torch.arange(1, dim + 1, device=rows.device).unsqueeze(1)
    return (_mix(row_keys(rows) + counters * _GOLDEN) >> 32).int()


def shifted_normal(points: Tensor, shifts: Tensor, like: Tensor) -> Tensor:
    """Standard normals (s, K, n) in the precision of a tensor, of points (s, K) and shifts (K, n)."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    uniform = (points.unsqueeze(2) ^ shifts).to(dtype).add_(0.5).mul_(1 / _HALF)
    most = 1 - torch.finfo(dtype).eps / 2
    return uniform.clamp_(-most, most).erfinv_().mul_(math.sqrt(2)).to(like.dtype)


def row_keys(rows: Tensor) -> Tensor:
    """A number in 64 bits for each row, (n,): a sum, exact in any order, of its elements' bits times odd numbers."""
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
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of a key moves every bit of the result."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        keys = (keys ^ _unsigned_shift(keys, shift)) * factor
    return keys ^ _unsigned_shift(keys, 31)


def _unsigned_shift(keys: Tensor, by: int) -> Tensor:
    return (keys >> by) & ((1 << (64 - by)) - 1)
