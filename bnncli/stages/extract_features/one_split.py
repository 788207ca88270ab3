"""What both ways of extracting share: a split's request, its publishing, and the result of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bnncli.artifacts.atomic import check_free_space
from bnncli.artifacts.features import FeatureFile, check_split, read_features, write_features
from bnncli.artifacts.provenance import Source
from bnncli.data.shift import Shift
from bnncli.numerics.random import stream_seed
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.session import revisions as _revisions
from bnncli.session.network_fit import fit_of
from bnncli.session.produce import Computed, Request
from bnncli.session.run import Result, Run
from bnncli.session.splits import shared_rows, shift_of


def hold_out_seed(run: Run) -> int:
    """What chooses the rows that --hold-out moves."""
    return stream_seed(run.compute.seed, "extract-features/hold-out")


def shift_asked(run: Run, options: ExtractFeaturesOptions) -> Shift | None:
    """What is to be done to the images of the splits; None for nothing."""
    return shift_of({"rotate": options.rotate, "corrupt": options.corrupt, "seed": run.compute.seed})


def split_request(
    run: Run,
    name: str,
    checkpoint: dict[str, Any] | None,
    params: dict[str, Any],
    sources: list[Source],
    num_examples: int,
    begin: Callable[[], object] = lambda: None,
) -> Request:
    """The request for one split's features.

    Args:
        begin: called first where the features have to be made.
    """
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


def publishable(
    run: Run,
    content: FeatureFile,
    preprocess: dict[str, Any],
    layer: str | None,
    order_digest: str,
    source: str,
    is_shifted: bool = False,
    input_statistics: dict[str, Any] | None = None,
) -> Computed:
    """A feature split that has passed its own check and fits the run's other splits, with how well the network fits its labels."""
    target = run.folder.features(content.name)
    check_split(target, content)
    check_free_space(target.parent, content.features.nbytes)
    fit = fit_of(content, is_judged=not is_shifted, progress=run.console)
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
            network_fit=None if fit is None else fit.to_json(),
            input_statistics=input_statistics,
        )

    return Computed(publish, summary=summary)


def without_rows(content: FeatureFile) -> FeatureFile:
    """A split's head, classes and width, without its examples."""
    return replace(content, features=content.features[:0].copy(), labels=None, names=None, sample_id=np.empty(0))


def head_of(run: Run, split: str, made: Mapping[str, FeatureFile]) -> FeatureFile:
    """The head of a split: as this command has made it, or as it was there."""
    return made[split] if split in made else read_features(run.folder.features(split))


def finished(run: Run, results: list[Result]) -> Result:
    """All results as one; warns where two splits of the run share rows."""
    total = Result()
    for result in results:
        total.add(result)
    if not run.write.dry_run:
        for text in shared_rows(run.folder):
            run.console.warn(text)
    if total.action == "up_to_date" and len(total.outputs) > 1:
        total.summary = [f"all {len(total.outputs)} artifacts are up to date"]
    return total
