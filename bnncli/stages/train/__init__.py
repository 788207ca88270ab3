"""train: labelled data in, a network's checkpoint out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli import data
from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import TRAINED_KIND, write_trained
from bnncli.errors import UsageError
from bnncli.likelihoods import name_to_record
from bnncli.numerics.random import stream_seed
from bnncli.options.command import (
    Argument,
    Command,
    CommonOptions,
    ComputeOptions,
    LockOptions,
    RecordOptions,
    WriteOptions,
)
from bnncli.options.train import TrainOptions
from bnncli.session import revisions as _revisions
from bnncli.session.produce import Computed, Request, Work, produce_together
from bnncli.session.run import Result, Run
from bnncli.session.splits import check_network_file, open_splits, user_sources
from bnncli.session.states import artifact_states
from bnncli.stages.train.report import next_command, summary_of
from bnncli.system.workers import is_leader

if TYPE_CHECKING:
    from bnncli.stages.train.work import Training

SUFFIX = ".safetensors"
HOLD_OUT_SEED = 0  # of extract-features where nothing is said: every seed is to leave out the same rows

COMMAND = Command(
    "Train a network on labelled data and write its checkpoint.",
    "Writes a safetensors state dict that records how it was trained. --hold-out picks the same examples as "
    "extract-features with seed 0, regardless of --seed.",
    (TrainOptions, ComputeOptions, RecordOptions, WriteOptions, LockOptions, CommonOptions),
    (
        "bnncli train lenet.safetensors --recipe lenet-fmnist --data train=npz:train.npz --data test=npz:test.npz --hold-out val=test:2000",
        "bnncli train net.safetensors --model net.py:make --data train=images:train --resize 36 --crop 32 --epochs 30",
        "bnncli train mlp.safetensors --recipe mlp-fmnist --data train=npz:train.npz --seeds 5",
    ),
    (Argument("ckpt", "The checkpoint to write. Its name must end in .safetensors.", writes=True),),
    section="Start",
    place=30,
)


def run(run: Run, options: TrainOptions) -> Result:
    """Train one network, or several seeds of it, and publish a checkpoint of each."""
    options = options.resolved()
    targets = _targets(run, options)
    splits = {
        split.name: split
        for split in open_splits(
            options,
            None,
            seed=stream_seed(HOLD_OUT_SEED, "extract-features/hold-out"),
            memory=lambda name: None,
        )
    }
    for split in splits.values():
        if (order := data.numbered_by_name(split)) is not None:
            run.console.info(order)
        if not split.is_labeled:
            raise UsageError(f"\0data\0 {split.name}: training and its scores need labels, but {split.spec} has none")
    likelihood = data.common_task({split.spec: split.shown_labels for split in splits.values()}, options.task)
    requests = [
        _request(run, options, target, seed, list(splits.values()), likelihood) for seed, target in targets.items()
    ]
    made: list[Training] = []

    def training() -> Training:
        """All networks, trained when the first is asked for."""
        from bnncli.stages.train.work import Training

        if not made:
            made.append(Training(run, options, splits, likelihood, requests[0], seeds=list(targets)))
        return made[0]

    def compute(place: int) -> Computed:
        trained = training().networks[place]

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            with training().resumable.hint():
                return write_trained(
                    requests[place].target,
                    trained.state,
                    averaged=trained.averaged,
                    meta=trained.meta,
                    provenance=provenance,
                    may_replace=may_replace,
                )

        return Computed(publish)

    works = [Work(request, partial(compute, place)) for place, request in enumerate(requests)]
    results = produce_together(run, works, also=lambda: [], before=lambda files: None)
    for one in made:
        one.forget()
    return _finished(run, options, requests, results)


def _targets(run: Run, options: TrainOptions) -> dict[int, Path]:
    """The file of each seed."""
    given, first = Path(run.arguments["ckpt"]), run.compute.seed
    if given.suffix != SUFFIX:
        raise UsageError(f"CKPT: expected a name that ends in {SUFFIX}; got {str(given)!r}")
    if options.seeds is None:
        return {first: given}
    return {seed: given.with_name(f"{given.stem}-{seed}{SUFFIX}") for seed in range(first, first + options.seeds)}


def _request(
    run: Run, options: TrainOptions, target: Path, seed: int, splits: list[data.InputSplit], likelihood: str | None
) -> Request:
    sources = {source.role: source for split in splits for source in user_sources(options, split, None)}
    names = sorted(split.name for split in splits)
    params = {**options.settings(), **name_to_record(likelihood), "splits": names, "seed": seed}

    def estimated_bytes() -> int:
        if ":" in str(options.model):  # code is not run to tell
            return 1 << 20
        from bnncli.stages.train.work import stored_bytes

        return stored_bytes(options)

    return Request(
        target,
        TRAINED_KIND,
        "checkpoint",
        params,
        _revisions.TRAIN,
        list(sources.values()),
        None,
        estimated_bytes,
        begin=partial(check_network_file, options),
    )


def _finished(run: Run, options: TrainOptions, requests: list[Request], results: list[Result]) -> Result:
    """All results as one, with what each checkpoint says of itself."""
    total = Result()
    for result in results:
        total.add(result)
    if run.write.dry_run or not is_leader():  # which alone sees the files take their names
        return total
    metas = [read_header(request.target).meta for request in requests]
    networks = [
        {"path": str(request.target), "gradient_passes": meta["gradient_passes"], **meta["metrics"]}
        for request, meta in zip(requests, metas, strict=True)
    ]
    total.extra = {"networks": networks}
    total.metrics = metas[0]["metrics"] if len(metas) == 1 else {}
    for request, meta in zip(requests, metas, strict=True):
        total.summary += summary_of(request.target, meta)
    features = run.folder.features("train")
    if len(requests) > 1 or not features.is_file() or artifact_states(run, [features])[0].state != "fresh":
        total.summary.append(f"next: {next_command(options, requests[0].target)}")
    return total
