"""Networks with random weights whose logits depend on their images, images for them, and the logits that a run stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bnncli.artifacts.features import read_features
from bnncli.models import ModelRequest, open_model

_RNG = np.random.default_rng(0)


def image(height: int, width: int = 40) -> Image.Image:
    """Noise on a shade of its own, so that images differ after any resizing."""
    shade = _RNG.integers(0, 190, 3)
    return Image.fromarray((shade + _RNG.integers(0, 66, (height, width, 3))).astype(np.uint8))


IMAGES = [image(40), image(33), image(60)]


def images_in(folder: Path, classes: tuple[str, ...]) -> list[Image.Image]:
    """Three images of each class, saved in class folders, in the order in which they are read."""
    found = []
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(3):
            found.append(image(30 + number))
            found[-1].save(folder / name / f"{number}.png")
    return found


def settled(network: Any, size: int = 96) -> Any:
    """The network in evaluation mode, its batch norms as after training: fresh ones let little of an image through."""
    norms = [module for module in network.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
    if norms:
        with torch.no_grad():
            network.train()(torch.randn(4, 3, size, size))
    return network.eval()


def logits_of_ours(spec: str, state: Any, images: list[Image.Image], **arguments: str) -> torch.Tensor:
    """What the model of KIND:PLACE makes of images with its own preprocessing."""
    saved = open_model(spec, ModelRequest(arguments))
    inputs = saved.transform(images).inputs
    with torch.no_grad():
        return saved.build(state)(torch.from_numpy(np.asarray(inputs)))


def stored_logits(path: Path) -> torch.Tensor:
    """Features of a file times its head."""
    split = read_features(path)
    weight, features = np.asarray(split.head_weight, np.float64), np.asarray(split.features, np.float64)
    bias = 0 if split.head_bias is None else np.asarray(split.head_bias, np.float64)
    return torch.from_numpy(features @ weight.T + bias)


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits (N, K) are equal to 1e-5 of their size, and those of different images are different."""
    assert found.shape == expected.shape
    assert float(expected.std(dim=0).max()) > 1e-2
    assert float((found - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))
