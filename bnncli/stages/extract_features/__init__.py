"""extract-features: checkpoint and data in, penultimate features and the head out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli import data
from bnncli.errors import BnnError, DataError
from bnncli.machine.team import crew
from bnncli.models import SavedModel
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.options.extract_features import NO_NETWORK
from bnncli.run.checkpoint_record import recorded_checkpoint
from bnncli.run.model_files import ModelFiles, own_files
from bnncli.run.produce import Computed, Request
from bnncli.run.produce_together import Work
from bnncli.run.session import Result, Run
from bnncli.run.user_splits import check_network_file, open_splits, shift_params, user_sources
from bnncli.stages.extract_features.from_arrays import from_arrays
from bnncli.stages.extract_features.lent import lend_to_first
from bnncli.stages.extract_features.newer_requests import note_changed, note_unreadable, settle
from bnncli.stages.extract_features.no_model import own_model_told
from bnncli.stages.extract_features.one_split import (
    finished,
    head_of,
    hold_out_seed,
    publishable,
    shift_asked,
    split_request,
    without_rows,
)
from bnncli.stages.extract_features.same_head import check_same_head
from bnncli.stages.extract_features.splits import (
    input_notes,
    label_notes,
    likelihood_of_splits,
    model_identity,
    saved_model,
    shared_params,
)
from bnncli.stages.extract_features.trained_here import with_recorded
from bnncli.stages.extract_features.trained_map import make_map
from bnncli.stages.extract_features.unfinished import unfinished_kept
from bnncli.storage.features import FeatureFile
from bnncli.storage.known_data import KnownData

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
    options = with_recorded(run, options)
    saved = saved_model(run, options)
    has_own = own_files(saved, Path(run.arguments["ckpt"])) is not None
    run.is_named = options.from_npz is not None or options.model == NO_NETWORK or has_own
    if options.from_npz is not None:
        return from_arrays(run, options)
    others = crew()
    if others is not None and not others.is_leader:
        return lend_to_first(run, options, saved, others)
    with own_model_told(run, options):
        result = _from_network(run, options, saved)
    if others is not None:
        from bnncli.run.turns import end  # here, for torch

        end(others)
    return result


def _from_network(run: Run, options: ExtractFeaturesOptions, saved: SavedModel | None) -> Result:
    def unreadable(name: str, error: BnnError) -> None:
        note_unreadable(run, [name], error)

    known = cache(lambda name: KnownData(run.folder.features(name)))
    splits = open_splits(
        options,
        saved,
        seed=hold_out_seed(run),
        unreadable=unreadable,
        memory=known,
        ood=options.ood,
        shift=shift_asked(run, options),
    )
    likelihood = likelihood_of_splits(run, options, saved, splits, unreadable=unreadable)
    network = cache(partial(_open_network, run, options, splits, saved, likelihood))
    names = [split.name for split in splits]
    recorded = _checkpoint_record(run, options, names, network, own_files(saved, run.checkpoint_path))
    begin = partial(check_network_file, options)
    requests = [
        split_request(
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
        first = head_of(run, names[0], heads)
        return [] if options.model == NO_NETWORK else [make_map(run, options, first, recorded)]

    with unfinished_kept(network):
        results = settle(run, works, also=also)
    for split in splits if not run.write.dry_run else ():
        known(split.name).keep()
    return finished(run, results)


def _open_network(
    run: Run,
    options: ExtractFeaturesOptions,
    splits: list[data.InputSplit],
    saved: SavedModel | None,
    likelihood: str | None,
) -> NetworkFeatures:
    """The network that the splits go through, its checkpoint read."""
    from bnncli.run.turns import begin  # here, for torch
    from bnncli.stages.extract_features.network import NetworkFeatures

    if (others := crew()) is not None and not run.write.dry_run:
        begin(others)
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
    heads[split.name] = without_rows(content)
    check_same_head(run, content, names, recorded, shared_params(options, saved, content.likelihood))
    computed = publishable(run, content, preprocess, layer, split.order_digest, split.spec)
    computed.summary.extend([*label_notes(split), *input_notes(split, content)])
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
        "seed": run.compute.seed if split.held_out or (split.shift and split.shift.is_random) else None,
        "is_ood": split.is_ood,
        **shift_params(split.shift),
        **({} if split.first_rows is None else {"first_rows": split.first_rows}),
        **({} if likelihood is None else {"task": likelihood}),
    }
