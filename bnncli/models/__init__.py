"""Models that bring their own definition, `--model KIND:PLACE`; models/kinds has one file for each kind.

A kind's file declares at module level `FORM = Form("hf:DIR", place=10)` (its spelling), `EXTRA = "hf"` (the package
extra that installs its library, or None), optionally `TAKES = ("base_model",)` (the options in `ModelRequest` that it
supports), and `open_model(place, asked) -> SavedModel`.
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

__all__ = ["AdaptedModel", "ModelRequest", "PublishedModel", "SavedModel", "is_kind", "open_model"]

_FAMILY = "models"


@dataclass(frozen=True)
class ModelRequest:
    """The user's request for a model, besides its place.

    Attributes:
        arguments: as typed, by name.
        base_model: folder of the model that an adapter belongs to.
        feature_node: name of the graph node whose output are the features.
        allow_download: whether network access is allowed.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    base_model: str | None = None
    feature_node: str | None = None
    allow_download: bool = False


class SavedModel(Protocol):
    """A model opened without importing torch or its library; only small files were read."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class name of each output; None if the files have none."""

    @property
    def transform(self) -> Transform | None:
        """Prepares its inputs from images or texts; None if inputs are arrays."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the model, whose names and bytes identify it; empty if the checkpoint has its weights."""

    @property
    def task(self) -> str | None:
        """multiclass, binary or multilabel; None if the files do not say."""

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Return the network in evaluation mode, float32, on the CPU.

        Args:
            state: tensors to load strictly; None for its own weights from `files`.

        Raises:
            DataError: names or shapes of the weights do not fit the network.
            UsageError: its library is missing.
        """


@runtime_checkable
class PublishedModel(Protocol):
    """A saved model whose library knows the class names of published weights."""

    def published_classes(self, num_classes: int) -> tuple[str, ...] | None:
        """Return the class names of num_classes outputs; None if the published weights have another number.

        The checkpoint may hold other weights, so names in the data take precedence. Imports the library.
        """


@runtime_checkable
class AdaptedModel(Protocol):
    """A saved model of a base and an adapter, whose parameters `build` merges into the base's."""

    def build_apart(self) -> nn.Module:
        """Return the same network with separate adapter parameters."""


def is_kind(spec: str) -> bool:
    """Return whether `--model` names a model of this family: the text before the first colon is a kind."""
    kind, colon, _ = spec.partition(":")
    return bool(colon) and registry.has_name(_FAMILY, kind)


def open_model(spec: str, asked: ModelRequest) -> SavedModel:
    """Open the model that `KIND:PLACE` names, without importing torch or its library.

    Raises:
        UsageError: the place is missing, or the kind does not support an option.
        MissingInput: a file is missing.
        DataError: a file is damaged, or the model is not a classifier.
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
    """Place that a tensor passes: into a module (its argument by position or name) or out of it (slot None), at a given call."""

    module: str
    slot: int | str | None
    call: int
