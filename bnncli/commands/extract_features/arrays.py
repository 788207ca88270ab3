"""Take features from another extractor (`--from-npz`), and write the network as trained as posteriors/map.safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.features import CHECK_ROWS, FeatureFile, encode_names, head_digest, read_features
from bnncli.artifacts.posteriors import gradient_passes, write_posterior
from bnncli.artifacts.provenance import Source
from bnncli.commands.extract_features.splits import (
    add_head,
    check_same_head,
    check_two_classes,
    choose_likelihood,
    combine_results,
    drop_rows,
    hold_out_seed,
    note_changed,
    prepare_split,
    settle,
    split_request,
)
from bnncli.data.arrays import FeatureArrays, read_feature_arrays
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit, hold_out
from bnncli.errors import DataError, UsageError
from bnncli.likelihoods import BINARY, likelihood_of, name_to_record
from bnncli.numerics.digests import json_sha256, tensor_digest
from bnncli.options.declaration import check_split_name
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.point import Point
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import head_theta
from bnncli.session.produce import ComputationOutput, Request, Work, produce
from bnncli.session.run import Result, Run
from bnncli.session.splits import check_outputs

if TYPE_CHECKING:
    from bnncli.commands.extract_features import ExtractFeaturesOptions


@dataclass(frozen=True)
class ReadyHead:
    """The head that comes with --from-npz."""

    weight: np.ndarray
    bias: np.ndarray | None

    @property
    def num_classes(self) -> int:
        """Return the number of classes; two for a single logit."""
        return likelihood_of(len(self.weight)).num_classes

    @property
    def digest(self) -> str:
        """Return a digest of the weights."""
        parts = {"weight": self.weight, "bias": self.bias}
        return tensor_digest({name: part for name, part in parts.items() if part is not None})

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Return logits (n, K) float32 of features (n, D)."""
        logits = features.astype(np.float64) @ self.weight.T.astype(np.float64)
        return (logits if self.bias is None else logits + self.bias).astype(np.float32)


def extract_from_arrays(run: Run, options: ExtractFeaturesOptions) -> Result:
    """Write a feature file for every split of the npz file and, where a head is known, the network as trained."""
    splits, arrays = open_ready_splits(options, seed=hold_out_seed(run))
    if arrays.head_weight is None:
        head = read_head_of_run(run, splits, arrays.num_features)
    else:
        head = ReadyHead(arrays.head_weight, arrays.head_bias)
    names = [split.name for split in splits]
    likelihood = arrays.likelihood
    if options.task is None:
        likelihood = choose_likelihood(run, likelihood, names, [split for split in splits if split.is_labeled])
    widths = [split.num_labels for split in splits if split.num_labels is not None]
    if head is None and options.task == BINARY:
        likelihood = BINARY
    if head is not None:
        check_outputs(options.task, likelihood, len(head.weight))
        num_classes = head.num_classes
    elif widths:
        num_classes = widths[0]
    else:
        num_classes = max([2, *(int(one.labels.max()) + 1 for one in arrays.splits.values() if one.labels is not None)])
    check_two_classes(likelihood, num_classes)
    requests = []
    for split in splits:
        params = {
            "dtype": options.dtype,
            "hold_out": split.held_out,
            "seed": run.compute.seed if split.held_out else None,
            "is_ood": split.is_ood,
            **({} if likelihood is None else {"task": likelihood}),
        }
        digest = json_sha256([split.order_digest, None if head is None else head.digest, num_classes])
        source = Source(f"data.{split.name}", Path(str(options.from_npz)), f"sha256:{digest}", is_artifact=False)
        requests.append(split_request(run, split.name, None, params, [source], len(split)))
    note_changed(run, requests)
    heads: dict[str, FeatureFile] = {}
    works = [
        Work(request, partial(_compute_split, run, options, split, head, num_classes, likelihood, names, heads))
        for split, request in zip(splits, requests, strict=True)
    ]

    def also() -> list[Result]:
        return [] if head is None else [make_map(run, options, add_head(run, names[0], heads), None)]

    return combine_results(run, settle(run, works, also=also))


def open_ready_splits(options: ExtractFeaturesOptions, *, seed: int) -> tuple[list[InputSplit], FeatureArrays]:
    """Open every split of --from-npz FILE, train first.

    Args:
        seed: seed for the rows that --hold-out moves.

    Raises:
        UsageError: an option that needs a network, or an unknown split in --ood.
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
        ("--skip-unreadable", options.skip_unreadable),
    ):
        if value:
            raise UsageError(f"{flag} needs a network; --from-npz takes finished features")
    assert options.from_npz is not None
    arrays = read_feature_arrays(Path(options.from_npz), unlabeled=options.ood, task=options.task)
    for name in options.ood:
        if name not in arrays.splits:
            raise UsageError(
                f"--ood: expected one of the splits in --from-npz ({', '.join(arrays.splits)}); got {name!r}"
            )
    splits = {
        check_split_name(name, "--from-npz"): InputSplit(
            f"{options.from_npz}:features_{name}",
            dataset,
            np.arange(len(dataset)),
            Preprocess(),
            dataset.is_labeled,
            name=name,
            is_ood=name in options.ood,
        )
        for name, dataset in arrays.splits.items()
    }
    for text in options.hold_out:
        splits = hold_out(splits, text, seed=seed)
    return sorted(splits.values(), key=lambda split: split.name != "train"), arrays


def read_head_of_run(run: Run, splits: list[InputSplit], num_features: int) -> ReadyHead | None:
    """Return the head of the run's other splits, for an npz file without one; None where they have none.

    Raises:
        DataError: that head takes another number of features.
    """
    own = {split.name for split in splits}
    for name in [name for name in run.folder.splits() if name not in own]:
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


def _compute_split(
    run: Run,
    options: ExtractFeaturesOptions,
    split: InputSplit,
    head: ReadyHead | None,
    num_classes: int,
    likelihood: str | None,
    names: list[str],
    heads: dict[str, FeatureFile],
) -> ComputationOutput:
    features = np.asarray(split.dataset.read(split.rows)[0])
    content = FeatureFile(
        name=split.name,
        features=features.astype(options.dtype, copy=False),
        labels=split.labels,
        sample_id=split.rows,
        classes=[str(index) for index in range(num_classes)],
        head_weight=None if head is None else head.weight,
        head_bias=None if head is None else head.bias,
        check_logits=None if head is None else head.logits(features[:CHECK_ROWS]),
        is_ood=split.is_ood,
        names=encode_names(split.names),
        groups=split.groups,
        likelihood=likelihood,
    )
    heads[split.name] = drop_rows(content)
    check_same_head(run, content, names, None, {})
    preprocess = {"dtype": options.dtype, "augment": "unknown", "hold_out": split.held_out}
    return prepare_split(run, content, preprocess, None, split.order_digest, split.spec)


def make_map(
    run: Run, options: ExtractFeaturesOptions, content: FeatureFile, checkpoint: dict[str, Any] | None
) -> Result:
    """Write the network as trained: a posterior with all its mass at the head's weights."""
    weight, bias = content.head_weight, content.head_bias
    if weight is None:
        return Result()
    layout = HeadLayout(weight.shape[0], weight.shape[1], bias is not None, content.likelihood)
    size = 16 * layout.num_params
    target = run.folder.posterior("map")
    params = {"last_layer": options.last_layer, **name_to_record(content.likelihood)}
    source = Source("head", Path(options.from_npz or run.checkpoint_path), head_digest(content), is_artifact=False)
    request = Request(
        target, "posterior", "map", params, _revisions.EXTRACT_FEATURES, [source], checkpoint, lambda: size
    )

    def compute() -> ComputationOutput:
        theta = head_theta(weight, bias)
        assert theta is not None
        tensors, meta = Point(theta, layout).to_tensors()
        meta |= {"method": "map", "param_layout": layout.to_json(), "classes": content.classes, "metrics": {}}
        passes = None if checkpoint is None else gradient_passes(run.checkpoint_path)
        meta |= {} if passes is None else {"gradient_passes": passes}

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_posterior(target, tensors, meta=meta, provenance=provenance, may_replace=may_replace)

        return ComputationOutput(publish)

    return produce(run, request, compute)
