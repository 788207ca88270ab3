"""The splits of --from-npz: features that the user's own extractor has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bnncli import data
from bnncli.errors import UsageError
from bnncli.likelihoods import likelihood_of
from bnncli.numerics.digests import tensor_digest
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.declaration import check_split_name


@dataclass(frozen=True)
class ReadyHead:
    """The head of --from-npz, and the logits it gives."""

    weight: np.ndarray
    bias: np.ndarray | None

    @property
    def num_classes(self) -> int:
        """Classes that its logits tell apart."""
        return likelihood_of(len(self.weight)).num_classes

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
) -> tuple[list[data.InputSplit], data.FeatureArrays]:
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
        if name not in arrays.splits:
            raise UsageError(f"--ood: with --from-npz name one of {', '.join(arrays.splits)}; got {name!r}")
    splits = {
        check_split_name(name, "--from-npz"): data.InputSplit(
            f"{options.from_npz}:features_{name}",
            dataset,
            torch.arange(len(dataset)),
            data.Preprocess(),
            dataset.is_labeled,
            name=name,
            is_ood=name in options.ood,
        )
        for name, dataset in arrays.splits.items()
    }
    for text in options.hold_out:
        splits = data.hold_out(splits, text, generator=stream("extract-features/hold-out"))
    return sorted(splits.values(), key=lambda split: split.name != "train"), arrays
