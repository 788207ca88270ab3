"""extract-features as a worker that is not the first: opens the network and the data, and computes the batches that it is asked for."""

from __future__ import annotations

from functools import partial

from bnncli.artifacts.features import KnownData
from bnncli.models import SavedModel
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.session.run import Result, Run
from bnncli.session.splits import open_splits
from bnncli.stages.extract_features.one_split import hold_out_seed, shift_asked
from bnncli.system.workers import Team


def lend_to_first(run: Run, options: ExtractFeaturesOptions, saved: SavedModel | None, crew: Team) -> Result:
    """Nothing of its own: writes no file, decides nothing, says nothing.

    The data are opened while the first process opens them, the network when that has work for it.

    Raises:
        BnnError: the data or the network cannot be opened, or are others than the first process has.
    """
    splits = open_splits(
        options,
        saved,
        seed=hold_out_seed(run),
        memory=lambda name: KnownData(run.folder.features(name)),
        ood=options.ood,
        shift=shift_asked(run, options),
        classes=options.class_names,
    )
    from bnncli.session import network as turns  # here, for torch
    from bnncli.stages.extract_features.network import network_of

    if not turns.has_begun(crew):
        return Result()
    network = network_of(run, options, saved)
    head, by_name = network.head(splits[0]), {split.name: split for split in splits}
    for order in turns.orders(crew):
        split = by_name[order.split]
        order.check(split, network.record)
        batches = partial(
            network.batches,
            split,
            head,
            batch_size=options.batch_size,
            dtype=options.dtype,
            num_workers=options.num_workers,
            first_row=order.first_row,
            num_logits=order.num_logits,
        )
        turns.lend(batches, crew)
    return Result()
