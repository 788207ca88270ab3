"""What the Gaussian of the split dynamics turns about: the posterior's mean, as the chains tell it when they have settled.

The mode is not the mean, and what the Gaussian explains no kick has to: about the mean, steps of the same acceptance are longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mean_of_chains(z: Tensor, gradient: Tensor) -> Tensor:
    """The mean (P,) of what the chains at z (C, P) draw from, whose potential has this gradient (C, P) there.

    The gradient's own mean is 0 (Stein 1972), so that z - gradient has the mean of z; where the posterior is near N(0, I) it hardly
    varies, and each coordinate takes of the two what varies less between the chains. Their mean is shrunk towards 0, by as much
    of it as is noise (James and Stein 1961, the positive part): one chain, or chains that are all over the place, tell nothing.
    """
    num_chains = len(z)
    if num_chains == 1:
        return z.new_zeros(z.shape[1])
    explained = z - gradient
    is_steadier = explained.var(dim=0) < z.var(dim=0)
    values = explained.where(is_steadier, z)
    mean = values.mean(dim=0)
    noise = values.var(dim=0).sum() / num_chains
    return mean * (1 - noise / mean.square().sum()).clamp(min=0).nan_to_num(nan=0.0)
