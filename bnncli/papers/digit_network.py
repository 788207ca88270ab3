"""The convolutional network on digits of Hobbhahn (2020), arXiv 2003.01227, section 5.1, and Gaussians over all of its weights.

As released: 32 and 64 filters of 5 x 5, each with ReLU and pooling, then 256 units and the classes with no activation between; Adam,
1e-3, weight decay 5e-4, batches of 64, where the text has 128.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import ggn
from bnncli.structures.diag import Diag
from bnncli.targets.network import NetworkTarget

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHT_DECAY = 5e-4
_RATE, _BATCH = 1e-3, 64
_SHAPE = (1, 28, 28)


def read_images(path: Path, *, classes: int | None = None, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Read the first images (n, 1, 28, 28) in [0, 1] of a file, and labels (n,), of the first classes alone if `classes` is given.

    Raises:
        DataError: the file has no such arrays.
    """
    try:
        with np.load(path) as arrays:
            pixels, labels = arrays["x"], arrays["y"]
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: expected arrays x and y: {error}") from None
    if pixels.shape[1:] != _SHAPE[1:] or pixels.dtype != np.uint8:
        raise DataError(f"{path}: expected uint8 images of 28 x 28; got {pixels.dtype}, {pixels.shape[1:]}")
    chosen: NDArray[np.intp] = np.flatnonzero(labels < classes) if classes is not None else np.arange(len(labels))
    chosen = chosen[:count]
    return torch.from_numpy(pixels[chosen]).unsqueeze(1) / 255, torch.from_numpy(labels[chosen]).long()


def train_network(
    inputs: Tensor, labels: Tensor, *, classes: int, epochs: int, generator: torch.Generator
) -> NetworkTarget:
    """Train such a network and return its log posterior with the prior of its weight decay, at its own weights."""
    network, likelihood = _network(classes, generator), likelihood_of(classes)
    optimizer = torch.optim.Adam(network.parameters(), lr=_RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(_BATCH):
            optimizer.zero_grad()
            loss = -likelihood.log_likelihoods(network(inputs[rows]).unsqueeze(0), labels[rows]).mean()
            loss.backward()
            optimizer.step()
    network.requires_grad_(False)
    layout = ModuleLayout.of(ModuleNetwork(network.eval()), num_outputs=classes, input_shape=_SHAPE)
    return NetworkTarget(inputs, labels, layout, Prior(WEIGHT_DECAY * len(inputs)))


def weights(target: NetworkTarget) -> Tensor:
    """Return the network's own weights (P,)."""
    network = target.layout.network
    assert network is not None
    return torch.nn.utils.parameters_to_vector(network.module.parameters()).detach()


def compute_curvature(target: NetworkTarget, count: int) -> Tensor:
    """Return the diagonal of the Gauss-Newton matrix of one image (P,) float64, the mean over the first `count` training images.

    It is the curvature that the released code has, with no factor N.
    """
    few = target.minibatch(*target.examples(torch.arange(min(count, target.num_examples))))
    return ggn(few, weights(target), "diag")["hessian.diag"].double() / target.num_examples


def build_gaussian(target: NetworkTarget, variances: Tensor) -> Gaussian[ModuleLayout]:
    """Return the Gaussian at the network's weights with these variances (P,)."""
    return Gaussian(weights(target).double(), Diag(variances), target.layout)


def _network(classes: int, generator: torch.Generator) -> nn.Module:
    layers = torch.nn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        return layers.Sequential(
            layers.Conv2d(1, 32, 5),
            layers.ReLU(),
            layers.MaxPool2d(2),
            layers.Conv2d(32, 64, 5),
            layers.ReLU(),
            layers.MaxPool2d(2),
            layers.Flatten(),
            layers.Linear(1024, 256),
            layers.Linear(256, classes),
        )
