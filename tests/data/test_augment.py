"""Random crops and flips against torch's own padding and slicing, one image at a time."""

from __future__ import annotations

import pytest
import torch

from bnncli.data.pixels import Augmentation

FILL = torch.tensor([-1.0, 2.0])


@pytest.mark.parametrize(("padding", "flips"), [(2, True), (1, False), (0, True)])
def test_images_are_shifted_and_mirrored_as_drawn(padding: int, flips: bool) -> None:
    augmentation = Augmentation(padding, flips, FILL)
    shifts = 2 * padding + 1
    num_kinds = shifts**2 * (1 + flips)
    images = torch.randn(num_kinds, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    found = augmentation.apply(images, torch.arange(num_kinds))
    expected = []
    for number, image in enumerate(images):
        padded = FILL.view(2, 1, 1).expand(2, 5 + 2 * padding, 4 + 2 * padding).clone()
        padded[:, padding : padding + 5, padding : padding + 4] = image
        top, left = number // shifts % shifts, number % shifts
        cropped = padded[:, top : top + 5, left : left + 4]
        expected.append(cropped.flip(2) if number >= shifts**2 else cropped)
    # Shifted, then mirrored: the order of torchvision's RandomCrop and RandomHorizontalFlip.
    assert torch.equal(found, torch.stack(expected))


def test_every_shift_is_as_likely() -> None:
    augmentation = Augmentation(1, True, FILL)
    counts = augmentation.draw(18_000, torch.Generator().manual_seed(1)).bincount(minlength=18)
    assert len(counts) == 18
    # 1,000 each, standard deviation sqrt(18,000 / 18 x 17 / 18) = 30.7
    assert bool(((counts - 1000).abs() < 4 * 30.7).all())
