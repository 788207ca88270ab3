"""Features that the user's own extractor has made: --from-npz."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from bnncli import data
from bnncli.artifacts.features import CHECK_ROWS, FeatureFile, encoded_names
from bnncli.artifacts.provenance import Source
from bnncli.likelihoods import BINARY
from bnncli.numerics.digests import json_sha256
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.session.produce import Computed, Work
from bnncli.session.run import Result, Run
from bnncli.session.splits import check_outputs
from bnncli.stages.extract_features.newer_requests import note_changed, settle
from bnncli.stages.extract_features.one_split import (
    finished,
    head_of,
    hold_out_seed,
    publishable,
    split_request,
    without_rows,
)
from bnncli.stages.extract_features.ready_splits import ReadyHead, head_of_run, open_ready_splits
from bnncli.stages.extract_features.same_head import check_same_head
from bnncli.stages.extract_features.splits import check_two_classes, likelihood_beside
from bnncli.stages.extract_features.trained_map import make_map


def from_arrays(run: Run, options: ExtractFeaturesOptions) -> Result:
    """Write a feature file for every split of the npz file; the network as trained where a head is known."""
    splits, arrays = open_ready_splits(options, seed=hold_out_seed(run))
    if arrays.head_weight is None:
        head = head_of_run(run, splits, arrays.num_features)
    else:
        head = ReadyHead(arrays.head_weight, arrays.head_bias)
    names = [split.name for split in splits]
    likelihood = arrays.likelihood
    if options.task is None:
        likelihood = likelihood_beside(run, likelihood, names, [split for split in splits if split.is_labeled])
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
        Work(request, partial(_ready, run, options, split, head, num_classes, likelihood, names, heads))
        for split, request in zip(splits, requests, strict=True)
    ]

    def also() -> list[Result]:
        return [] if head is None else [make_map(run, options, head_of(run, names[0], heads), None)]

    return finished(run, settle(run, works, also=also))


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
    heads[split.name] = without_rows(content)
    check_same_head(run, content, names, None, {})
    preprocess = {"dtype": options.dtype, "augment": "unknown", "hold_out": split.held_out}
    return publishable(run, content, preprocess, None, split.order_digest, split.spec)
