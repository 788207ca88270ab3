"""The network of extract-features: loaded when the first split needs it, its head found once, its features collected."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnncli.checkpoints.load import Checkpoint, load_checkpoint
from bnncli.errors import UsageError
from bnncli.extraction.features import ExtractedBatch, Head, collect, extract, find_last_linear, head_of
from bnncli.networks import load_network
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.extract_features import NO_NETWORK
from bnncli.run.session import Run
from bnncli.stages.extract_features.splits import NamedSplit, class_names, model_identity
from bnncli.storage.feature_set import RECIPE
from bnncli.storage.features import CHECK_ROWS, FeatureSplit, encoded_names


class NetworkFeatures:
    """The checkpoint and its network, loaded when the first split needs them."""

    def __init__(self, run: Run, options: ExtractFeaturesOptions, splits: list[NamedSplit]) -> None:
        self.run, self.options, self.splits = run, options, splits
        self.checkpoint: Checkpoint | None = None
        self.record: dict[str, Any] | None = None
        if options.model == NO_NETWORK:
            return
        path = run.checkpoint_path
        self.checkpoint = load_checkpoint(path, progress=run.console)
        for note in self.checkpoint.notes:
            run.console.warn(note)
        self.record = {
            "path": path.name,
            "file_sha256": self.checkpoint.file_sha256,
            "weights_digest": self.checkpoint.weights_digest,
            "format": self.checkpoint.format,
            "selected_key": self.checkpoint.selected_key,
            "stripped_prefixes": list(self.checkpoint.stripped_prefixes),
            "size": self.checkpoint.size,
        }

    @property
    def recipe(self) -> dict[str, Any]:
        """The options that all splits of a run must share."""
        own = model_identity(self.options)
        return {name: own[name] if name in own else getattr(self.options, name) for name in RECIPE}

    @cached_property
    def model(self) -> torch.nn.Module:
        """The network with the checkpoint's weights, on the device."""
        arguments = {}
        for text in self.options.model_arg:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise UsageError(f"--model-arg: expected KEY=VALUE, got {text!r}")
            arguments[key] = value
        state = self.checkpoint.state if self.checkpoint is not None else None
        assert self.options.model is not None
        model = load_network(self.options.model, arguments, state)
        return model.to(self.run.device)

    @cached_property
    def head(self) -> Head | None:
        """The last linear layer: as named, or the one called last on the first example; None for flatten."""
        if self.options.model == NO_NETWORK:
            return None
        if self.options.last_layer is not None:
            return head_of(self.model, self.options.last_layer)
        first = next(self.splits[0].content.batches(1, device=self.run.device))
        return head_of(self.model, find_last_linear(self.model, first.inputs))

    @cached_property
    def classes(self) -> list[str]:
        """Names of the classes; without a head as many as the labels show."""
        if self.head is not None:
            return class_names(self.splits, self.head.layout.num_classes)
        named = [split for split in self.splits if split.content.classes and not split.is_ood]
        if named:
            return class_names(self.splits, len(named[0].content.classes or ()))
        counts = [_largest_label(split) + 1 for split in self.splits if split.content.is_labeled and not split.is_ood]
        return [str(index) for index in range(max([2, *counts]))]

    def features(self, split: NamedSplit) -> tuple[FeatureSplit, dict[str, Any], str | None]:
        """One split's features, what was done to its inputs, and the name of the last layer."""
        run, options, head = self.run, self.options, self.head
        batches = extract(
            self.model,
            head,
            split.content,
            name=split.name,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            device=run.device,
            dtype=getattr(torch, options.dtype),
            progress=run.console,
        )
        whole = collect(batches, len(split.content))
        weight, bias = (None, None) if head is None else (head.weight, head.bias)
        content = FeatureSplit(
            name=split.name,
            features=whole.features.numpy(),
            labels=_labels(split, whole),
            sample_id=split.content.rows.numpy(),
            classes=self.classes,
            head_weight=_numpy(weight),
            head_bias=_numpy(bias),
            check_logits=None if whole.logits is None else whole.logits[:CHECK_ROWS].numpy(),
            is_ood=split.is_ood,
            names=encoded_names(split.content.names),
        )
        preprocess = {
            "mean": options.mean,
            "std": options.std,
            "resize": options.resize,
            "crop": options.crop,
            "interpolation": "bilinear",
            "dtype": options.dtype,
            "augment": "none",
            "hold_out": split.held_out,
        }
        return content, preprocess, None if head is None else head.name


def _largest_label(split: NamedSplit) -> int:
    """The largest label of a split; a pass over the data where labels are known only when read."""
    if split.content.labels is not None:
        return int(split.content.labels.max())
    return max(int(batch.labels.max()) for batch in split.content.batches(512) if batch.labels is not None)


def _labels(split: NamedSplit, whole: ExtractedBatch) -> np.ndarray | None:
    known = split.content.labels if split.content.labels is not None else whole.labels
    return None if known is None or split.is_ood else known.numpy().astype(np.int64)


def _numpy(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.numpy()
