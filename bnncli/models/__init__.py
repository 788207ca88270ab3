"""Models that bring their own definition, `--model KIND:PLACE`: one file in this folder for each kind.

A kind's file declares, at its left margin, `FORM = Form("hf:DIR", place=10)` (how it is named), `EXTRA = "hf"` (the extra of the
package with its library; None where it needs none), `TAKES = ("base_model",)` (the options among those of `Asked` that it
takes; absent where it takes none), and has `open_model(place, asked) -> SavedModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.options.declaration import declaration, declarations

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.data.transform import Transform

__all__ = ["Asked", "Composed", "Published", "SavedModel", "is_kind", "open_model"]

_FAMILY = "models"


@dataclass(frozen=True)
class Asked:
    """What the user says of a model beside its place.

    Attributes:
        arguments: as typed, by name.
        base_model: the folder of the model that an adapter is for.
        feature_node: name of the node of a graph whose output the features are.
        allow_download: whether the network may be used.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    base_model: str | None = None
    feature_node: str | None = None
    allow_download: bool = False


class SavedModel(Protocol):
    """A model that was opened without importing torch or its library: only small files were read."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the outputs, index = output; None where the files tell none."""

    @property
    def transform(self) -> Transform | None:
        """What makes its inputs out of images or texts; None where inputs are arrays."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that it is made of, whose names and bytes are its identity; none where its weights are the checkpoint's."""

    @property
    def task(self) -> str | None:
        """multiclass, binary or multilabel; None where the files do not tell."""

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """The network in evaluation mode, float32, on the CPU.

        Args:
            state: tensors that fill it, strictly; None for its own weights, of `files`.

        Raises:
            DataError: names or shapes of the weights do not fit the network.
            UsageError: its library is missing.
        """


@runtime_checkable
class Published(Protocol):
    """A saved model whose library knows what the outputs of published weights are called."""

    def published_classes(self, num_classes: int) -> tuple[str, ...] | None:
        """Names of so many outputs, index = output; None where the published weights have another number.

        The checkpoint may be of other weights: names that the data have go before these. The library is imported.
        """


@runtime_checkable
class Composed(Protocol):
    """A saved model of a base and an adapter, whose parameters `build` merges into those of the base."""

    def build_apart(self) -> nn.Module:
        """The same network with the adapter's parameters beside those of the base."""


def is_kind(spec: str) -> bool:
    """Whether `--model` names a model of this family: what stands before the first colon is the name of a kind."""
    kind, colon, _ = spec.partition(":")
    return bool(colon) and registry.has_name(_FAMILY, kind)


def open_model(spec: str, asked: Asked) -> SavedModel:
    """The model that `KIND:PLACE` names; neither torch nor its library is imported.

    Raises:
        UsageError: there is no place, or an option was given that this kind does not take.
        MissingInput: a file is missing.
        DataError: a file is damaged, or the model is no classifier.
    """
    kind, _, place = spec.partition(":")
    module = registry.load_module(_FAMILY, kind)
    if not place:
        raise UsageError(f"\0model\0: expected {module.FORM.text}; got {spec!r}")
    given = {
        "model_arg": asked.arguments, "base_model": asked.base_model, "feature_node": asked.feature_node,
        "allow_download": asked.allow_download,
    }  # fmt: skip
    for option in [option for option, value in given.items() if value]:
        if option not in (declaration(_FAMILY, kind, "TAKES") or ()):
            takers = [name for name, takes in declarations(_FAMILY, "TAKES").items() if option in takes]
            hint = f"supported by \0model\0 {', '.join(takers)}" if takers else None
            raise UsageError(f"\0{option}\0: not supported by the model {module.FORM.text}", hint=hint)
    return cast(SavedModel, module.open_model(place, asked))


class Place(NamedTuple):
    """Where a tensor passes: into a module (its argument by position or name) or out of it (slot None), at its call so and so."""

    module: str
    slot: int | str | None
    call: int
