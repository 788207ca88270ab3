"""Random crops and flips of whole batches, on the device that they lie on.

Padding and cropping is He et al. (2016, arXiv:1512.03385, 4.2; after Lee et al. 2015): each image is shifted by up to
`padding` pixels along each axis, and what comes in is `fill`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Augmentation:
    """What may happen to an image.

    Args:
        padding: pixels of the largest shift along each axis; 0 shifts nothing.
        flips: whether half of the images are mirrored, left to right.
        fill: (C,) what lies outside of an image, as the network takes it: black, normalised.
    """

    padding: int
    flips: bool
    fill: Tensor

    def draw(self, num_images: int, generator: torch.Generator) -> Tensor:
        """A number (n,) int64 for each image that says what happens to it, all equally likely; where the generator is."""
        return torch.randint(self._shifts**2 * (1 + self.flips), (num_images,), generator=generator)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Images (n, C, H, W), each shifted and mirrored as its number (n,) says."""
        (height, width), shifts = images.shape[-2:], self._shifts
        down, right = drawn // shifts % shifts - self.padding, drawn % shifts - self.padding
        rows = torch.arange(height, device=images.device) + down.unsqueeze(1)
        columns = torch.arange(width, device=images.device).expand(len(images), width)
        if self.flips:
            is_mirrored = (drawn >= shifts**2).unsqueeze(1)
            columns = torch.where(is_mirrored, width - 1 - columns, columns)
        columns = columns + right.unsqueeze(1)
        first = torch.arange(len(images), device=images.device).view(-1, 1, 1)
        found = images.movedim(1, 3)[
            first, rows.clamp(0, height - 1).unsqueeze(2), columns.clamp(0, width - 1).unsqueeze(1)
        ]
        is_inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
        return torch.where(is_inside.unsqueeze(3), found, self.fill).movedim(3, 1)

    @property
    def _shifts(self) -> int:
        """Along one axis."""
        return 2 * self.padding + 1
