"""The splits of --from-npz: features that the user's own extractor has made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bnncli import data
from bnncli.artifacts.features import read_features
from bnncli.errors import DataError, UsageError
from bnncli.likelihoods import likelihood_of
from bnncli.numerics.digests import tensor_digest
from bnncli.options.declaration import check_split_name
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.session.run import Run


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
    options: ExtractFeaturesOptions, *, seed: int
) -> tuple[list[data.InputSplit], data.FeatureArrays]:
    """Every split of --from-npz FILE; --ood NAME marks one as out-of-distribution, --hold-out moves rows.

    Args:
        seed: chooses the rows that --hold-out moves.

    Raises:
        UsageError: --data, or other options that need a network; an unknown name.
    """
    for flag, value in (
        ("--data", options.data),
        ("--model-arg", options.model_arg),
        ("--base-model", options.base_model),
        ("--feature-node", options.feature_node),
        ("--allow-download", options.allow_download),
        ("--mean", options.mean),
        ("--std", options.std),
        ("--resize", options.resize),
        ("--crop", options.crop),
        ("--rotate", options.rotate is not None),
        ("--corrupt", options.corrupt),
        ("--last-layer", options.last_layer),
        ("--output", options.output),
        ("--state", options.state),
    ):
        if value:
            raise UsageError(f"{flag} needs a network; --from-npz takes finished features")
    assert options.from_npz is not None
    arrays = data.read_feature_arrays(Path(options.from_npz), unlabeled=options.ood, task=options.task)
    for name in options.ood:
        if name not in arrays.splits:
            raise UsageError(
                f"--ood: expected one of the splits in --from-npz ({', '.join(arrays.splits)}); got {name!r}"
            )
    splits = {
        check_split_name(name, "--from-npz"): data.InputSplit(
            f"{options.from_npz}:features_{name}",
            dataset,
            np.arange(len(dataset)),
            data.Preprocess(),
            dataset.is_labeled,
            name=name,
            is_ood=name in options.ood,
        )
        for name, dataset in arrays.splits.items()
    }
    for text in options.hold_out:
        splits = data.hold_out(splits, text, seed=seed)
    return sorted(splits.values(), key=lambda split: split.name != "train"), arrays


def head_of_run(run: Run, splits: list[data.InputSplit], num_features: int) -> ReadyHead | None:
    """The head of the run's other splits, for an npz file that has none; None where they have none.

    Raises:
        DataError: it takes another number of features.
    """
    made = {split.name for split in splits}
    for name in [name for name in run.folder.splits() if name not in made]:
        content = read_features(run.folder.features(name))
        if content.header is None or content.header.weights_digest is not None or content.head_weight is None:
            continue
        if num_features != content.head_weight.shape[1]:
            raise DataError(
                f"{splits[0].spec.rpartition(':')[2]} has {num_features} features, but the head of split "
                f"{name!r} of this run takes {content.head_weight.shape[1]}",
                code="wrong_head",
                hint="use features from the same layer of the same network, or another --run-dir",
            )
        run.console.info(f"the file has no head_weight; using the head of split {name!r} of this run")
        return ReadyHead(content.head_weight, content.head_bias)
    return None
