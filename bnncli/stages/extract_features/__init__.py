"""extract-features: checkpoint and data in, penultimate features and the head out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli import data
from bnncli.errors import BnnError, DataError
from bnncli.models import SavedModel
from bnncli.numerics.digests import json_sha256
from bnncli.numerics.seeds import stream_seed
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.options.extract_features import NO_NETWORK
from bnncli.run import revisions as _revisions
from bnncli.run.checkpoint_record import recorded_checkpoint
from bnncli.run.model_files import ModelFiles, own_files
from bnncli.run.produce import Computed, Request
from bnncli.run.produce_together import Work
from bnncli.run.session import Result, Run
from bnncli.run.shared_rows import shared_rows
from bnncli.stages.extract_features.newer_requests import note_changed, note_unreadable, settle
from bnncli.stages.extract_features.ready_splits import ReadyHead, head_of_run, open_ready_splits, splits_of_npz
from bnncli.stages.extract_features.same_head import check_same_head
from bnncli.stages.extract_features.splits import (
    check_network_file,
    check_outputs,
    input_notes,
    likelihood_of_run,
    likelihood_of_splits,
    model_identity,
    open_splits,
    saved_model,
    shared_params,
    user_sources,
)
from bnncli.stages.extract_features.trained_map import make_map
from bnncli.stages.extract_features.unfinished import unfinished_kept
from bnncli.storage.atomic import check_free_space
from bnncli.storage.features import (
    CHECK_ROWS,
    FeatureFile,
    check_split,
    encoded_names,
    read_features,
    write_features,
)
from bnncli.storage.provenance import Source

if TYPE_CHECKING:
    from bnncli.stages.extract_features.network import NetworkFeatures

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
    saved = saved_model(run, options)
    run.is_named = options.from_npz is not None or options.model == NO_NETWORK or bool(saved and saved.files)
    return _from_arrays(run, options) if options.from_npz is not None else _from_network(run, options, saved)


def _from_network(run: Run, options: ExtractFeaturesOptions, saved: SavedModel | None) -> Result:
    def unreadable(name: str, error: BnnError) -> None:
        note_unreadable(run, [name], error)

    splits = open_splits(options, saved, seed=_hold_out_seed(run), unreadable=unreadable)
    likelihood = likelihood_of_splits(run, options, saved, splits, unreadable=unreadable)
    network = cache(partial(_open_network, run, options, splits, saved, likelihood))
    names = [split.name for split in splits]
    recorded = _checkpoint_record(run, options, names, network, own_files(saved, run.checkpoint_path))
    begin = partial(check_network_file, options)
    requests = [
        _request(
            run,
            one.name,
            recorded,
            _params(run, options, one, saved, likelihood),
            user_sources(options, one, saved),
            len(one),
            begin,
        )
        for one in splits
    ]
    note_changed(run, requests)
    heads: dict[str, FeatureFile] = {}
    works = [
        Work(request, partial(_extract, run, options, network, recorded, split, request, names, heads, saved))
        for split, request in zip(splits, requests, strict=True)
    ]

    def also() -> list[Result]:
        first = _head_of(run, names[0], heads)
        return [] if options.model == NO_NETWORK else [make_map(run, options, first, recorded)]

    with unfinished_kept(network):
        results = settle(run, works, also=also)
    return _finish(run, results)


def _hold_out_seed(run: Run) -> int:
    """What chooses the rows that --hold-out moves."""
    return stream_seed(run.compute.seed, "extract-features/hold-out")


def _open_network(
    run: Run,
    options: ExtractFeaturesOptions,
    splits: list[data.InputSplit],
    saved: SavedModel | None,
    likelihood: str | None,
) -> NetworkFeatures:
    """The network that the splits go through, its checkpoint read."""
    from bnncli.stages.extract_features.network import NetworkFeatures  # here, for torch

    return NetworkFeatures(run, options, splits, saved, likelihood)


def _checkpoint_record(
    run: Run,
    options: ExtractFeaturesOptions,
    names: list[str],
    network: Callable[[], NetworkFeatures],
    files: ModelFiles | None,
) -> dict[str, Any] | None:
    """The checkpoint as provenance records it, read where it is not the one of the run's features; None without one."""
    if options.model == NO_NETWORK:
        return None
    recorded = recorded_checkpoint(run, files, state=options.state)
    if recorded is None:
        if not run.write.dry_run and not {*names} & {*run.folder.splits()}:  # those may refuse, and that is said first
            check_network_file(options)
        recorded = network().record
    return recorded


def _extract(
    run: Run,
    options: ExtractFeaturesOptions,
    network: Callable[[], NetworkFeatures],
    recorded: dict[str, Any] | None,
    split: data.InputSplit,
    request: Request,
    names: list[str],
    heads: dict[str, FeatureFile],
    saved: SavedModel | None,
) -> Computed:
    if network().record != recorded:
        message = f"{run.checkpoint_path} was replaced while this command ran; nothing was written"
        raise DataError(message, code="input_replaced", hint="run the command again", path=run.checkpoint_path)
    content, preprocess, layer = network().features(split, request)
    heads[split.name] = _without_rows(content)
    check_same_head(run, content, names, recorded, shared_params(options, saved, content.likelihood))
    computed = _publishable(run, content, preprocess, layer, split.order_digest, split.spec)
    computed.summary.extend(input_notes(split, content))
    return computed


def _params(
    run: Run, options: ExtractFeaturesOptions, split: data.InputSplit, saved: SavedModel | None, likelihood: str | None
) -> dict[str, Any]:
    """What changes the numbers of one split's features."""
    return {
        **model_identity(options, saved),
        "mean": options.mean,
        "std": options.std,
        "resize": options.resize,
        "crop": options.crop,
        "dtype": options.dtype,
        "hold_out": split.held_out,
        "seed": run.compute.seed if split.held_out else None,
        "is_ood": split.is_ood,
        **({} if split.first_rows is None else {"first_rows": split.first_rows}),
        **({} if likelihood is None else {"task": likelihood}),
    }


def _request(
    run: Run,
    name: str,
    checkpoint: dict[str, Any] | None,
    params: dict[str, Any],
    sources: list[Source],
    num_examples: int,
    begin: Callable[[], object] = lambda: None,
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
        begin=begin,
    )


def _publishable(
    run: Run,
    content: FeatureFile,
    preprocess: dict[str, Any],
    layer: str | None,
    order_digest: str,
    source: str,
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


def _without_rows(content: FeatureFile) -> FeatureFile:
    """A split's head, classes and width, without its examples."""
    return replace(content, features=content.features[:0].copy(), labels=None, names=None, sample_id=np.empty(0))


def _head_of(run: Run, split: str, made: Mapping[str, FeatureFile]) -> FeatureFile:
    """The head of a split: as this command has made it, or as it was there."""
    return made[split] if split in made else read_features(run.folder.features(split))


def _from_arrays(run: Run, options: ExtractFeaturesOptions) -> Result:
    try:
        splits, arrays = open_ready_splits(options, seed=_hold_out_seed(run))
    except BnnError as error:
        note_unreadable(run, splits_of_npz(run, Path(str(options.from_npz))), error)
        raise
    if arrays.head_weight is None:
        head = head_of_run(run, splits, arrays.num_features)
    else:
        head = ReadyHead(arrays.head_weight, arrays.head_bias)
    names = [split.name for split in splits]
    is_told = options.task is not None or any(split.is_labeled for split in splits)
    likelihood = arrays.likelihood if is_told else likelihood_of_run(run, names)
    widths = [split.num_labels for split in splits if split.num_labels is not None]
    if head is not None:
        check_outputs(options.task or likelihood, len(head.weight))
        num_classes = head.num_classes
    elif widths:
        num_classes = widths[0]
    else:
        num_classes = max([2, *(int(one.labels.max()) + 1 for one in arrays.splits.values() if one.labels is not None)])
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
        requests.append(_request(run, split.name, None, params, [source], len(split)))
    note_changed(run, requests)
    heads: dict[str, FeatureFile] = {}
    works = [
        Work(request, partial(_ready, run, options, split, head, num_classes, likelihood, names, heads))
        for split, request in zip(splits, requests, strict=True)
    ]

    def also() -> list[Result]:
        return [] if head is None else [make_map(run, options, _head_of(run, names[0], heads), None)]

    return _finish(run, settle(run, works, also=also))


def _ready(
    run: Run,
    options: ExtractFeaturesOptions,
    split: data.InputSplit,
    head: ReadyHead | None,
    num_classes: int,
    likelihood: str | None,
    names: list[str],
    heads: dict[str, FeatureFile],
) -> Computed:
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
        names=encoded_names(split.names),
        likelihood=likelihood,
    )
    heads[split.name] = _without_rows(content)
    check_same_head(run, content, names, None, {})
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
