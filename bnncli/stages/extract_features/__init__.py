"""extract-features: checkpoint and data in, penultimate features and the head out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bnncli import data
from bnncli.errors import BnnError, DataError
from bnncli.numerics.digests import json_sha256
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.options.extract_features import NO_NETWORK
from bnncli.posteriors.point import Point
from bnncli.run import revisions as _revisions
from bnncli.run.classes import run_classes
from bnncli.run.inputs import head_theta
from bnncli.run.produce import Computed, Request, produce
from bnncli.run.produce_together import Work
from bnncli.run.session import Result, Run
from bnncli.run.shared_rows import shared_rows
from bnncli.stages.extract_features.network import NetworkFeatures
from bnncli.stages.extract_features.newer_requests import note_changed, note_unreadable, settle
from bnncli.stages.extract_features.ready_splits import ReadyHead, open_ready_splits
from bnncli.stages.extract_features.splits import model_identity, open_splits, user_sources
from bnncli.storage.artifacts import read_header
from bnncli.storage.atomic import check_free_space
from bnncli.storage.feature_set import differences
from bnncli.storage.features import (
    CHECK_ROWS,
    FeatureFile,
    check_split,
    encoded_names,
    head_digest,
    read_features,
    write_features,
)
from bnncli.storage.posteriors import write_posterior
from bnncli.storage.provenance import Source
from bnncli.theta.head import HeadLayout

COMMAND = Command(
    "Run the network over the data once, and keep penultimate features and the last linear layer.",
    "Writes features/<split>.h5 for every split and posteriors/map.safetensors, the network as trained. Every later "
    "command works from these files and needs no network code. The last linear layer is found, and proved: features "
    "times head must equal the network's output.",
    (ExtractFeaturesOptions, *COMPUTE),
    (
        "bnncli extract-features ckpt.pt --model lenet5 --data train=npz:train.npz --data test=npz:test.npz --hold-out val=test:2000 --ood mnist=npz:mnist.npz",
        "bnncli extract-features ckpt.pt --model net.py:make --model-arg width=4 --data train=images:train --resize 256 --crop 224",
        "bnncli extract-features myrun --from-npz features.npz",
    ),
    place=10,
)


def run(run: Run, options: ExtractFeaturesOptions) -> Result:
    """Write a feature file for every split named, and the network as trained as the posterior `map`."""
    run.is_named = options.from_npz is not None or options.model == NO_NETWORK
    return _from_arrays(run, options) if options.from_npz is not None else _from_network(run, options)


def _from_network(run: Run, options: ExtractFeaturesOptions) -> Result:
    splits = open_splits(options, run.stream, unreadable=lambda name, error: note_unreadable(run, [name], error))
    network = NetworkFeatures(run, options, splits)
    names = [split.name for split in splits]
    requests = [
        _request(run, one.name, network.record, _params(run, options, one), user_sources(options, one), len(one))
        for one in splits
    ]
    note_changed(run, requests)
    heads: dict[str, FeatureFile] = {}
    works = [
        Work(request, partial(_extract, run, network, split, names, heads))
        for split, request in zip(splits, requests, strict=True)
    ]

    def also() -> list[Result]:
        first = _head_of(run, names[0], heads)
        return [] if options.model == NO_NETWORK else [_make_map(run, options, first, network.record)]

    return _finish(run, settle(run, works, also=also))


def _extract(
    run: Run, network: NetworkFeatures, split: data.InputSplit, names: list[str], heads: dict[str, FeatureFile]
) -> Computed:
    content, preprocess, layer = network.features(split)
    heads[split.name] = _without_rows(content)
    _check_same_head(run, content, names, network.record, network.shared_params)
    return _publishable(run, content, preprocess, layer, split.order_digest, split.spec)


def _params(run: Run, options: ExtractFeaturesOptions, split: data.InputSplit) -> dict[str, Any]:
    """What changes the numbers of one split's features."""
    return {
        **model_identity(options),
        "mean": options.mean,
        "std": options.std,
        "resize": options.resize,
        "crop": options.crop,
        "dtype": options.dtype,
        "hold_out": split.held_out,
        "seed": run.compute.seed if split.held_out else None,
        "is_ood": split.is_ood,
        **({} if split.first_rows is None else {"first_rows": split.first_rows}),
    }


def _request(
    run: Run,
    name: str,
    checkpoint: dict[str, Any] | None,
    params: dict[str, Any],
    sources: list[Source],
    num_examples: int,
) -> Request:
    target = run.folder.features(name)
    return Request(
        target,
        "features",
        f"features.{name}",
        params,
        _revisions.EXTRACT_FEATURES,
        sources,
        checkpoint,
        lambda: num_examples * 64,
    )


def _publishable(
    run: Run, content: FeatureFile, preprocess: dict[str, Any], layer: str | None, order_digest: str, source: str
) -> Computed:
    """A feature split that has passed its own check and fits the run's other splits."""
    target = run.folder.features(content.name)
    check_split(target, content)
    check_free_space(target.parent, content.features.nbytes)
    summary = [
        f"{content.name}: {len(content.features)} examples, {content.features.shape[1]} features"
        + ("" if content.labels is not None else ", no labels")
    ]

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_features(
            target,
            content,
            preprocess=preprocess,
            layer=layer,
            order_digest=order_digest,
            source=source,
            provenance=provenance,
            may_replace=may_replace,
        )

    return Computed(publish, summary=summary)


def _check_same_head(
    run: Run, content: FeatureFile, names: list[str], record: dict[str, Any] | None, shared_params: dict[str, Any]
) -> None:
    """Splits of a run that this command does not make have its head, classes and preprocessing, unless they are stale."""
    weights_digest = record["weights_digest"] if record else None
    for name in sorted({*run.folder.splits()} - {*names}):
        path = run.folder.features(name)
        header = read_header(path)
        if header.weights_digest != weights_digest:
            continue
        theirs = header.provenance.get("params", {})
        for option in differences(theirs, shared_params):
            raise DataError(
                f"split {name!r} of this run was made with another --{option.replace('_', '-')} "
                f"({theirs.get(option)} there, {shared_params[option]} now)",
                code="mixed_options",
                path=path,
                hint="give the same options, all splits in one command with --force, or another --run-dir",
            )
        if header.meta.get("head_digest") != head_digest(content):
            raise DataError(
                f"split {name!r} of this run has another head than the one now given",
                code="wrong_head",
                path=path,
                hint="give all splits in one command with --force, or use another --run-dir",
            )
    run_classes(run.folder, content, weights_digest=weights_digest, without=names)


def _without_rows(content: FeatureFile) -> FeatureFile:
    """A split's head, classes and width, without its examples."""
    return replace(content, features=content.features[:0].copy(), labels=None, names=None, sample_id=np.empty(0))


def _head_of(run: Run, split: str, made: Mapping[str, FeatureFile]) -> FeatureFile:
    """The head of a split: as this command has made it, or as it was there."""
    return made[split] if split in made else read_features(run.folder.features(split))


def _make_map(
    run: Run, options: ExtractFeaturesOptions, content: FeatureFile, checkpoint: dict[str, Any] | None
) -> Result:
    """The network as trained, as a posterior with all its mass at the head's weights."""
    weight, bias = content.head_weight, content.head_bias
    if weight is None:
        return Result()
    layout = HeadLayout(weight.shape[0], weight.shape[1], bias is not None)
    size = 16 * layout.num_params
    target = run.folder.posterior("map")
    params = {"last_layer": options.last_layer}
    source = Source("head", Path(options.from_npz or run.checkpoint_path), head_digest(content), is_artifact=False)
    request = Request(
        target, "posterior", "map", params, _revisions.EXTRACT_FEATURES, [source], checkpoint, lambda: size
    )

    def compute() -> Computed:
        theta = head_theta(weight, bias)
        assert theta is not None
        tensors, meta = Point(theta, layout).to_tensors()
        meta |= {"method": "map", "param_layout": layout.to_json(), "classes": content.classes, "metrics": {}}

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_posterior(target, tensors, meta=meta, provenance=provenance, may_replace=may_replace)

        return Computed(publish)

    return produce(run, request, compute)


def _from_arrays(run: Run, options: ExtractFeaturesOptions) -> Result:
    try:
        splits, arrays = open_ready_splits(options, run.stream)
    except BnnError as error:
        note_unreadable(run, _splits_of_npz(run, Path(str(options.from_npz))), error)
        raise
    if arrays.head_weight is None:
        head = _head_of_run(run, splits, arrays.num_features)
    else:
        head = ReadyHead(arrays.head_weight, arrays.head_bias)
    if head is not None:
        num_classes = head.num_classes
    else:
        num_classes = max([2, *(int(one.labels.max()) + 1 for one in arrays.splits.values() if one.labels is not None)])
    names = [split.name for split in splits]
    requests = []
    for split in splits:
        params = {
            "dtype": options.dtype,
            "hold_out": split.held_out,
            "seed": run.compute.seed if split.held_out else None,
            "is_ood": split.is_ood,
        }
        digest = json_sha256([split.order_digest, None if head is None else head.digest, num_classes])
        source = Source(f"data.{split.name}", Path(str(options.from_npz)), f"sha256:{digest}", is_artifact=False)
        requests.append(_request(run, split.name, None, params, [source], len(split)))
    note_changed(run, requests)
    heads: dict[str, FeatureFile] = {}
    works = [
        Work(request, partial(_ready, run, options, split, head, num_classes, names, heads))
        for split, request in zip(splits, requests, strict=True)
    ]

    def also() -> list[Result]:
        return [] if head is None else [_make_map(run, options, _head_of(run, names[0], heads), None)]

    return _finish(run, settle(run, works, also=also))


def _splits_of_npz(run: Run, path: Path) -> list[str]:
    """The splits of the run that a file names, or that were made from it where it cannot be read."""
    try:
        return [name for name in data.feature_splits(path) if name in run.folder.splits()]
    except BnnError:
        theirs = {name: read_header(run.folder.features(name)) for name in run.folder.splits()}
        return [
            name for name, header in theirs.items()
            if any(os.path.abspath(header.input_path(entry)) == os.path.abspath(path) for entry in header.inputs)
        ]  # fmt: skip


def _head_of_run(run: Run, splits: list[data.InputSplit], num_features: int) -> ReadyHead | None:
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
                f"{splits[0].spec.rpartition(':')[2]} has {num_features} features, the head of split {name!r} of this run "
                f"takes {content.head_weight.shape[1]}",
                code="wrong_head",
                hint="give features of the same layer of the same network, or another --run-dir",
            )
        run.console.info(f"the file has no head_weight: taking the head of split {name!r} of this run")
        return ReadyHead(content.head_weight, content.head_bias)
    return None


def _ready(
    run: Run,
    options: ExtractFeaturesOptions,
    split: data.InputSplit,
    head: ReadyHead | None,
    num_classes: int,
    names: list[str],
    heads: dict[str, FeatureFile],
) -> Computed:
    features = split.dataset.read(split.rows)[0].numpy()
    content = FeatureFile(
        name=split.name,
        features=features.astype(options.dtype, copy=False),
        labels=None if split.labels is None else split.labels.numpy(),
        sample_id=split.rows.numpy(),
        classes=[str(index) for index in range(num_classes)],
        head_weight=None if head is None else head.weight,
        head_bias=None if head is None else head.bias,
        check_logits=None if head is None else head.logits(features[:CHECK_ROWS]),
        is_ood=split.is_ood,
        names=encoded_names(split.names),
    )
    heads[split.name] = _without_rows(content)
    _check_same_head(run, content, names, None, {})
    preprocess = {"dtype": options.dtype, "augment": "unknown", "hold_out": split.held_out}
    return _publishable(run, content, preprocess, None, split.order_digest, split.spec)


def _finish(run: Run, results: list[Result]) -> Result:
    total = Result()
    for result in results:
        total.add(result)
    if not run.write.dry_run:
        for text in shared_rows(run.folder):
            run.console.warn(text)
    if total.action == "up_to_date":
        total.summary = [f"all {len(total.outputs)} artifacts are up to date"]
    return total
