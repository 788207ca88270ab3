"""Logits of a minibatch under draws of independent weights that differ from example to example, for gradients with less noise.

local: draws of a layer's outputs from their mean and variance in the place of its weights (Kingma, Salimans and Welling 2015,
arXiv:1506.02557). Exact where a layer is used once an example: outputs that share weights, of a convolution or of a linear layer at
several places, are not independent of one another.
flipout: one draw of the weights for all, with signs of its inputs and outputs turned for each example (Wen, Vicol, Ba, Tran and Grosse 2018,
arXiv:1803.04386): exact for convolutions too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.theta.head import HeadLayout
from bnncli.theta.layout import LogitLayout
from bnncli.theta.module import ModuleLayout

if TYPE_CHECKING:
    from torch import Tensor, nn

LOCAL, FLIPOUT = "local", "flipout"
_LEAST_VARIANCE = 1e-24  # under a root, whose slope at zero is infinite
# The logits (B, K) of examples' features or inputs (B, ...), for mean (P,) and standard deviations (P,) of theta; by autograd.
LogitDraws: TypeAlias = "Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]"


def logit_draws(layout: LogitLayout, estimator: str) -> LogitDraws:
    """What draws logits so.

    Args:
        layout: of a head, or of a network's parameters, all of linear layers and, for flipout, convolutions.
        estimator: local or flipout.

    Raises:
        UsageError: a chosen parameter is of another kind of layer.
    """
    if layout.head is not None:
        return _of_head(layout.head, estimator)
    return _of_network(cast(ModuleLayout, layout), estimator)


def _of_head(layout: HeadLayout, estimator: str) -> LogitDraws:
    def logits(mean: Tensor, sd: Tensor, features: Tensor, generator: torch.Generator) -> Tensor:
        inputs = layout.augment_features(features)
        return inputs @ layout.augment(mean).T + _noise(
            lambda x, weight: x @ weight.T, inputs, layout.augment(sd), estimator, generator
        )

    return logits


def _noise(
    product: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    sd: Tensor,
    estimator: str,
    generator: torch.Generator,
) -> Tensor:
    """What is added to the outputs at the mean weights: of a product of inputs (B, in, ...) with weights (out, in, ...)."""
    if estimator == LOCAL:
        variance = product(inputs.square(), sd.square()).clamp_min(_LEAST_VARIANCE)
        return variance.sqrt() * _normal(variance.shape, inputs, generator)
    places = (1,) * (sd.ndim - 2)
    draw = sd * _normal(sd.shape, inputs, generator)
    # Of groups of channels a weight has those of one: all inputs get signs.
    turned = product(inputs * _signs((len(inputs), inputs.shape[1], *places), inputs, generator), draw)
    return turned * _signs((len(inputs), len(sd), *places), inputs, generator)


def _of_network(layout: ModuleLayout, estimator: str) -> LogitDraws:
    network = layout.network
    assert network is not None
    modules = {
        part.name.rpartition(".")[0]: network.module.get_submodule(part.name.rpartition(".")[0])
        for part in layout.parts
    }
    kinds = (
        (torch.nn.Linear,)
        if estimator == LOCAL
        else (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    )
    for name, module in modules.items():
        if not isinstance(module, kinds):
            also = " and convolutions" if estimator == FLIPOUT else ""
            raise UsageError(
                f"\0estimator\0 {estimator} supports only linear layers{also}; {name or 'the network'} is "
                f"{type(module).__name__}",
                hint="use \0estimator\0 reparam"
                + ("" if estimator == FLIPOUT else " or flipout, or limit \0layers\0 to these"),
            )

    def logits(mean: Tensor, sd: Tensor, inputs: Tensor, generator: torch.Generator) -> Tensor:
        shaped = network.shaped(inputs, layout.input_shape)
        with _perturbed(modules, layout.split(sd), estimator, generator):
            return network(shaped, layout.split(mean))

    return logits


@contextmanager
def _perturbed(
    modules: Mapping[str, nn.Module], sds: Mapping[str, Tensor], estimator: str, generator: torch.Generator
) -> Iterator[None]:
    """Within, the outputs of these modules have the noise of their weights added to them; each may be used once."""
    used: set[str] = set()

    def hook_of(name: str) -> Callable[..., Tensor]:
        weight, bias = (sds.get(f"{name}.{part}".lstrip(".")) for part in ("weight", "bias"))

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            (inputs,) = args
            if name in used or (isinstance(module, torch.nn.Linear) and inputs.ndim != 2):
                raise UsageError(
                    f"\0estimator\0 {estimator}: {name} shares its weights across several positions of each example",
                    hint="use \0estimator\0 reparam",
                )
            used.add(name)
            if weight is not None:
                output = output + _noise(_product_of(module), inputs, weight, estimator, generator)
            if bias is not None:  # a draw for each example, for all its places
                places = (1,) * (output.ndim - 2)
                draw = bias * _normal((len(output), len(bias)), output, generator)
                output = output + draw.view(*draw.shape, *places)
            return output

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _product_of(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The module's product of inputs and weights, without its bias."""
    if isinstance(module, torch.nn.Linear):
        return torch.nn.functional.linear
    convolution = cast(torch.nn.Conv2d, module)
    return lambda inputs, weight: convolution._conv_forward(inputs, weight, None)


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype)
    return made.to(like.device)


def _signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    return made.to(like).mul_(2).sub_(1)
