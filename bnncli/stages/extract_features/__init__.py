"""extract-features: checkpoint and data in, penultimate features and the head out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.artifacts.features import FeatureFile
from bnncli.artifacts.files import read_header
from bnncli.models import SavedModel
from bnncli.options.command import COMPUTE, Argument, Command
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.options.shared import NO_NETWORK
from bnncli.session.network_fit import MISREAD, recorded_fit
from bnncli.session.run import Result, Run, own_files
from bnncli.stages.extract_features.from_arrays import from_arrays
from bnncli.stages.extract_features.from_network import NetworkExtraction
from bnncli.stages.extract_features.lent import lend_to_first
from bnncli.stages.extract_features.newer_requests import note_changed
from bnncli.stages.extract_features.no_model import own_model_told
from bnncli.stages.extract_features.splits import saved_model
from bnncli.stages.extract_features.trained_here import with_recorded
from bnncli.stages.extract_features.trained_map import make_map
from bnncli.system.workers import crew

COMMAND = Command(
    "Run the network over the data once and store its penultimate features.",
    "Writes features/<split>.h5 for each split, and posteriors/map.safetensors, the network as trained. Later "
    "commands use these files and need no network code. Finds the last linear layer, and checks that applying "
    "it to the features reproduces the network's output.",
    (ExtractFeaturesOptions, *COMPUTE),
    (
        "bnncli extract-features ckpt.pt --model lenet5 --data train=npz:train.npz --data test=npz:test.npz --hold-out val=test:2000 --ood mnist=npz:mnist.npz",
        "bnncli extract-features ckpt.pt --model net.py:make --model-arg width=4 --data train=images:train --resize 256 --crop 224",
        "bnncli extract-features myrun --from-npz features.npz",
    ),
    (
        Argument(
            "ckpt", "The checkpoint, or a name for the run if the model has its own weights. Artifacts go to CKPT.bnn."
        ),
    ),
    section="Start",
    place=40,
)


def run(run: Run, options: ExtractFeaturesOptions) -> Result:
    """Write a feature file for every split named, and the network as trained as the posterior `map`."""
    options = with_recorded(run, options)
    saved = saved_model(run, options)
    has_own = own_files(saved, Path(run.arguments["ckpt"])) is not None
    run.is_named = options.from_npz is not None or options.model == NO_NETWORK or has_own
    if options.from_npz is not None:
        result = from_arrays(run, options)
        _tell_fits(run, result, lambda name: "features or a head of another network")
        return result
    others = crew()
    if others is not None and not others.is_leader:
        return lend_to_first(run, options, saved, others)
    with own_model_told(run, options):
        result = _from_network(run, options, saved)
    if others is not None:
        from bnncli.session.network import end  # here, for torch

        end(others)
    return result


def _from_network(run: Run, options: ExtractFeaturesOptions, saved: SavedModel | None) -> Result:
    """The features of the splits that go through the network, and that as the posterior `map`."""

    def trained(first: FeatureFile, recorded: dict[str, Any] | None) -> list[Result]:
        return [] if options.model == NO_NETWORK else [make_map(run, options, first, recorded)]

    extraction = NetworkExtraction(run, options, saved)
    note_changed(run, extraction.requests)
    result = extraction.result(also=trained)
    _tell_fits(run, result, partial(_causes, extraction))
    return result


def _tell_fits(run: Run, result: Result, causes: Callable[[str], str]) -> None:
    """Say how well the network fits each labelled split, and warn where its inputs or labels were probably misread.

    Args:
        causes: tells what may be wrong with the inputs of a split.
    """
    written = [] if run.write.dry_run else [Path(one["path"]) for one in result.outputs if one["role"] != "map"]
    found = {path.stem: fit for path in written if (fit := recorded_fit(read_header(path))) is not None}
    if not found:
        return
    result.extra["network_fit"] = {name: fit.to_json() for name, fit in found.items()}
    result.summary += [fit.sentence(name) for name, fit in found.items()]
    misread = {name: fit for name, fit in found.items() if fit.verdict == MISREAD}
    if misread:
        likely = ["wrong order or names of the classes", "labels that start at 1"]
        if not all(fit.relabelled for fit in misread.values()):
            likely.insert(0, causes(next(name for name, fit in misread.items() if not fit.relabelled)))
        doubts = "; ".join(fit.doubt(name) for name, fit in misread.items())
        run.console.warn(
            f"the network probably misreads its inputs or labels: {doubts}. Likely causes: {', '.join(likely)}"
        )


def _causes(extraction: NetworkExtraction, name: str) -> str:
    """Return what may be wrong with the inputs of a split of this kind of data."""
    split = next(one for one in extraction.splits if one.name == name)
    if split.preprocess.transform is None:
        first = next(iter(split.take(np.arange(1)).batches(1))).inputs
        if not isinstance(first, Mapping) and first.ndim == 4:
            better = extraction.better_scaling(name)
            found = "\0mean\0 or \0std\0 missing or wrong" + (f" ({better})" if better else "")
            return f"{found}, channels in another order (RGB, BGR), pixels from 0 to 255 instead of 0 to 1"
    return "inputs preprocessed differently than in training"
