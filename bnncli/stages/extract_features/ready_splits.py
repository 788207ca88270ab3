"""The splits of --from-npz: features that the user's own extractor has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bnncli import data
from bnncli.errors import UsageError
from bnncli.numerics.digests import tensor_digest
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.declaration import check_split_name


@dataclass(frozen=True)
class ReadySplit:
    """A split of --from-npz: features (N, D), labels (N,) or None, sample ids (N,), names (N,) or None."""

    name: str
    features: np.ndarray
    labels: np.ndarray | None
    sample_id: np.ndarray
    is_ood: bool
    held_out: str | None
    names: np.ndarray | None = None

    @property
    def origin(self) -> str:
        """The array in the file that the rows are from: another split's for one that --hold-out made."""
        new, _, rest = (self.held_out or "").partition("=")
        return rest.rpartition(":")[0] if new == self.name else self.name

    @property
    def content_digest(self) -> str:
        """Identity of the examples and their order."""
        parts = {
            "features": self.features,
            "sample_id": self.sample_id,
            "labels": self.labels,
            "names": self.names,
        }
        return tensor_digest({name: part for name, part in parts.items() if part is not None})


@dataclass(frozen=True)
class ReadyHead:
    """The head of --from-npz, and the logits it gives."""

    weight: np.ndarray
    bias: np.ndarray | None

    @property
    def digest(self) -> str:
        """Identity of the head."""
        parts = {"weight": self.weight, "bias": self.bias}
        return tensor_digest({name: part for name, part in parts.items() if part is not None})

    def logits(self, features: np.ndarray) -> np.ndarray:
        """(n, K) float32."""
        logits = features.astype(np.float64) @ self.weight.T.astype(np.float64)
        return (logits if self.bias is None else logits + self.bias).astype(np.float32)


def open_ready_splits(
    options: ExtractFeaturesOptions, stream: Callable[[str], torch.Generator]
) -> tuple[list[ReadySplit], data.FeatureArrays]:
    """Every split of --from-npz FILE; --ood NAME marks one as out-of-distribution, --hold-out moves rows.

    Raises:
        UsageError: --data, or other options that need a network; an unknown name.
    """
    for flag, value in (
        ("--data", options.data),
        ("--model-arg", options.model_arg),
        ("--mean", options.mean),
        ("--std", options.std),
        ("--resize", options.resize),
        ("--crop", options.crop),
        ("--last-layer", options.last_layer),
    ):
        if value:
            raise UsageError(f"{flag} needs a network; with --from-npz the features are ready")
    assert options.from_npz is not None
    arrays = data.read_feature_arrays(Path(options.from_npz), unlabeled=options.ood)
    for name in options.ood:
        if name not in arrays.features:
            raise UsageError(f"--ood: with --from-npz name one of {', '.join(arrays.features)}; got {name!r}")
    splits = {
        check_split_name(name, "--from-npz"): ReadySplit(
            name,
            features,
            None if name in options.ood else arrays.labels.get(name),
            np.arange(len(features)),
            name in options.ood,
            None,
            arrays.names.get(name),
        )
        for name, features in arrays.features.items()
    }
    for text in options.hold_out:
        splits = _hold_out(splits, text, stream("extract-features/hold-out"))
    return sorted(splits.values(), key=lambda split: split.name != "train"), arrays


def _hold_out(splits: dict[str, ReadySplit], text: str, generator: torch.Generator) -> dict[str, ReadySplit]:
    new, old, count = data.parse_hold_out(text, {name: len(split.features) for name, split in splits.items()})
    stay, move = data.hold_out_rows(len(splits[old].features), count, generator)
    return {**splits, old: _take(splits[old], old, stay, text), new: _take(splits[old], new, move, text)}


def _take(split: ReadySplit, name: str, rows: torch.Tensor, text: str) -> ReadySplit:
    chosen = rows.numpy()
    labels = None if split.labels is None else split.labels[chosen]
    names = None if split.names is None else split.names[chosen]
    return ReadySplit(name, split.features[chosen], labels, split.sample_id[chosen], split.is_ood, text, names)
