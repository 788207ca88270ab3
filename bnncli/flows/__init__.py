"""Invertible layers, one file each: a flow posterior is a base Gaussian pushed through `length` of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.options.declaration import Setting, class_attribute, declaration
from bnncli.parameters.layouts import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor, nn

SPACES = ("whitened", "weight")


class Recipe(NamedTuple):
    """Default training of the layers of one kind.

    Args:
        length: layers.
        epochs: passes over the data.
        batch_size: examples a step.
        num_draws: theta drawn a step.
        learning_rate: initial learning rate of Adam.
    """

    length: int
    epochs: int
    batch_size: int
    num_draws: int
    learning_rate: float


# Kristiadi, Eschenhagen, Hennig (2022), arXiv:2205.10041.
PUBLISHED = Recipe(length=5, epochs=20, batch_size=128, num_draws=1, learning_rate=1e-3)
# Fewer and better steps: on two cores they take as long as the published ones.
ALL_DATA = Recipe(length=4, epochs=600, batch_size=2**16, num_draws=8, learning_rate=0.01)

# For a whole network, where a step on all data costs as much as an epoch of minibatches.
MINIBATCHES = Recipe(length=1, epochs=50, batch_size=256, num_draws=1, learning_rate=0.03)


class FlowLayer(Protocol):
    """Interface of a layer; each is also an nn.Module, built as kind(layout, generator, **settings).

    A layer whose Jacobian J does not depend on z may also have `push_score(score (S, P)) -> (S, P)`, J^{-T} score: the
    gradient of the log density behind it, from that before it. A kind may have a static `push_together(layers, z (S,
    P))`, which equals `push` on layers of that kind alone, in fewer operations.

    Args:
        recipe: default training.
        settings: names of its settings: those that its file declares in SETTINGS, which are options of refine, and
            index, its place among the layers. Each is also an attribute of the layer, with its resolved value.
        spaces: where it can act, the default first.
        maps: how its stored parameters become those of its formula.
    """

    recipe: ClassVar[Recipe]
    settings: ClassVar[tuple[str, ...]]
    spaces: ClassVar[tuple[str, ...]]
    maps: ClassVar[str]

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det Jacobian| there, (S,)."""

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with forward(z) = y (S, P)."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the unconstrained parameters, on the CPU, float64 when the layer is."""

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""

    def summary(self) -> dict[str, float]:
        """Return a few numbers that describe what the layer does."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move the layer, as every nn.Module does."""


def build_layers(
    kind: str, layout: ParamLayout, generator: torch.Generator, *, length: int, **settings: Any
) -> tuple[Any, ...]:
    """Build `length` layers of one kind; a setting of None takes the kind's default.

    Raises:
        UsageError: when there is no such kind, or it does not take a setting.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    check_settings(kind, given)
    load = registry.load_class("flows", kind)
    places = [{"index": index} if "index" in load.settings else {} for index in range(length)]
    return tuple(load(layout, generator, **given, **place) for place in places)


def check_settings(kind: str, given: Iterable[str]) -> None:
    """Check that layers of this kind take the settings of these names. Raises UsageError otherwise, or for an unknown kind."""
    for name in given:
        if name not in class_attribute("flows", kind, "settings"):
            takers = [flow for flow in registry.names("flows") if name in class_attribute("flows", flow, "settings")]
            raise UsageError(f"\0{name}\0: not supported by {kind} layers; supported by: {', '.join(takers)}")


def resolve_settings(kind: str, layout: ParamLayout, **settings: Any) -> dict[str, Any]:
    """Return the settings that all layers of this kind would have, as `settings_of` does for a built layer.

    Args:
        settings: given values; None takes the kind's default.

    Raises:
        UsageError: when there is no such kind, or it does not take a setting or this value.
    """
    check_settings(kind, settings)
    return resolve(declaration("flows", kind, "SETTINGS") or {}, layout, **settings)


def resolve(declared: Mapping[str, Setting], layout: ParamLayout, **given: Any) -> dict[str, Any]:
    """Return a value for each setting that a kind declares: the given one, or its default; None for one that does not apply.

    Raises:
        UsageError: a value is given for a setting that does not apply, or exceeds the bound that theta sets.
    """
    found: dict[str, Any] = {}
    for name, setting in declared.items():
        value = given.get(name)
        other, needed = setting.only_with or (None, None)
        if other is not None and found[other] != needed:
            if value is not None:
                raise UsageError(f"\0{name}\0: not supported with \0{other}\0 {found[other]}; use \0{other}\0 {needed}")
            found[name] = None
            continue
        most = getattr(layout, setting.at_most) if setting.at_most else None
        if value is None:
            value = setting.default if most is None else min(setting.default, most)
        if most is not None and not 1 <= value <= most:
            raise UsageError(f"\0{name}\0: expected 1 to {most}, the number of parameters; got {value}")
        found[name] = value
    return found


def push(layers: Sequence[FlowLayer], z: Tensor) -> tuple[Tensor, Tensor]:
    """Push z (S, P) through all layers; return the image and the sum of their log|det Jacobian| (S,), differentiable once."""
    kinds = {type(layer) for layer in layers}
    if len(kinds) == 1 and hasattr(kind := kinds.pop(), "push_together"):
        together: tuple[Tensor, Tensor] = kind.push_together(layers, z)
        return together
    total = z.new_zeros(z.shape[0])
    for layer in layers:
        z, log_det = layer(z)
        total = total + log_det
    return z, total


def choose_recipe(kind: str, *, is_of_network: bool = False, **choices: Any) -> Recipe:
    """Return the training of layers of this kind; a choice of None takes the kind's default. Raises UsageError for an unknown kind.

    Args:
        is_of_network: whether each draw of theta costs a forward pass of a whole network for each example of a step.
            Kinds that use all data in a step for the last layer then use minibatches.
    """
    own: Recipe = class_attribute("flows", kind, "recipe")
    if is_of_network and own.batch_size > MINIBATCHES.batch_size:
        own = MINIBATCHES
    return own._replace(**{name: value for name, value in choices.items() if value is not None})


def settings_of(layer: FlowLayer) -> dict[str, Any]:
    """Return the resolved settings that all layers of a flow share."""
    return {name: getattr(layer, name) for name in layer.settings if name != "index"}


def choose_space(kind: str, space: str) -> str:
    """Return where layers of this kind act: `space`, or the kind's default for auto. Raises UsageError where they cannot act."""
    spaces = class_attribute("flows", kind, "spaces")
    if space == "auto":
        return str(spaces[0])
    if space not in spaces:
        raise UsageError(
            f"\0space\0: {kind} layers support {' or '.join(spaces)} space; got {space!r}",
            hint=class_attribute("flows", kind, "spaces_reason"),
        )
    return space


def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    """Draw float64 numbers from U(-bound, bound), on the generator's device."""
    unit = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return (2 * unit - 1) * bound


def zeros(*shape: int, generator: torch.Generator) -> nn.Parameter:
    """Return a parameter of float64 zeros, on the generator's device."""
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64, device=generator.device))


def place_buffer(index: int, generator: torch.Generator) -> Tensor:
    """Return a layer's place among the layers as a tensor (1,), to be stored with the parameters."""
    return torch.tensor([index], device=generator.device)


def load_tensors(layer: Any, tensors: dict[str, Tensor]) -> Any:
    """Load the parameters and buffers of `tensors_of` into a layer, and return it."""
    layer.load_state_dict(tensors)
    return layer


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name, on the CPU; floating-point ones as float64."""
    state = {name: value.detach().cpu().clone() for name, value in layer.state_dict().items()}
    return {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
