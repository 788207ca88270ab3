"""Heads of any size on the GPU, from random features: what graphs and repeats are tried on."""

from __future__ import annotations

import torch
from torch import Tensor

from bnncli.inference.laplace import fit_gaussian
from bnncli.latent.factors import initial_factors, initial_model
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget


def examples(count: int, num_features: int, num_classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Standard normal features (N, D) and labels (N,) of a random head's noisy logits."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, num_features, generator=generator)
    weight = 2 * torch.randn(num_features, num_classes, generator=generator) / num_features**0.5
    noise = torch.rand(count, num_classes, generator=generator).clamp_(1e-9).log().neg().log()
    labels = (features @ weight - noise).argmax(dim=1)
    return features.to(device), labels.to(device)


def head_target(layout: HeadLayout, count: int, device: torch.device) -> LastLayerTarget:
    """The log posterior of a head on so many examples."""
    features, labels = examples(count, layout.num_features, layout.num_classes, device)
    return LastLayerTarget(features, labels, layout, Prior(100.0))


def head_gaussian(target: LastLayerTarget, structure: str = "full") -> Gaussian:
    """The Gaussian at its mode."""
    start = torch.zeros(target.layout.num_params, dtype=torch.float64, device=target.device)
    return fit_gaussian(target, start=start, structure=structure).gaussian


def latent_model(sizes: tuple[int, ...], repeats: int, estimator: str, device: torch.device) -> LatentModel:
    """What a latent binary fit starts from."""
    layout, generator = NetworkLayout(sizes), torch.Generator().manual_seed(0)
    factors = initial_factors(layout, repeats, generator, device=device)
    prior = SpikeAndSlab.constant(layout.num_layers).to(device)
    is_mnf = estimator == "mnf"
    flows = [initial_model(n, repeats, generator, device=device) for _, n in layout.shapes] if is_mnf else []
    return LatentModel(layout, factors, prior, tuple(flows))


def made_head(layout: HeadLayout, device: torch.device) -> Tensor:
    """The head (P,) float64 that labels of `made_target` are drawn with; its biases are zero."""
    weight = torch.randn(
        layout.num_outputs, layout.num_features, generator=torch.Generator(device).manual_seed(1), device=device
    )
    bias = torch.zeros(layout.num_outputs, device=device) if layout.has_bias else None
    return layout.join(3 * weight / layout.num_features**0.5, bias).double()


def made_target(
    device: torch.device,
    count: int,
    layout: HeadLayout,
    *,
    dtype: torch.dtype = torch.float32,
    precision: float = 100.0,
) -> LastLayerTarget:
    """Rectified normal features and the labels of a random head, made on the device a block at a time: for sizes of any data."""
    generator = torch.Generator(device).manual_seed(0)
    features = torch.empty(count, layout.num_features, dtype=dtype, device=device)
    labels = torch.empty(count, dtype=torch.int64, device=device)
    weight = layout.split(made_head(layout, device).float())[0]
    for begin in range(0, count, 2**14):
        rows = slice(begin, min(begin + 2**14, count))
        block = torch.randn(labels[rows].shape[0], layout.num_features, generator=generator, device=device).relu_()
        features[rows] = block
        logits = block @ weight.T
        if layout.num_outputs == 1:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
        noise = torch.rand(logits.shape, generator=generator, device=device).clamp_(min=1e-9).log_().neg_().log_()
        labels[rows] = (logits - noise).argmax(dim=1)
    return LastLayerTarget(features, labels, layout, Prior(precision))
