"""extract-features: checkpoint and data in, penultimate features and the head out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.errors import BnnError
from bnncli.machine.team import crew
from bnncli.models import SavedModel
from bnncli.options import ExtractFeaturesOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.options.extract_features import NO_NETWORK
from bnncli.run.model_files import own_files
from bnncli.run.session import Result, Run
from bnncli.stages.extract_features.from_arrays import from_arrays
from bnncli.stages.extract_features.from_network import NetworkExtraction
from bnncli.stages.extract_features.lent import lend_to_first
from bnncli.stages.extract_features.newer_requests import note_changed, note_unreadable
from bnncli.stages.extract_features.no_model import own_model_told
from bnncli.stages.extract_features.splits import saved_model
from bnncli.stages.extract_features.trained_here import with_recorded
from bnncli.stages.extract_features.trained_map import make_map
from bnncli.storage.features import FeatureFile

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
    """The features of the splits that go through the network, and that as the posterior `map`."""

    def unreadable(name: str, error: BnnError) -> None:
        note_unreadable(run, [name], error)

    def trained(first: FeatureFile, recorded: dict[str, Any] | None) -> list[Result]:
        return [] if options.model == NO_NETWORK else [make_map(run, options, first, recorded)]

    extraction = NetworkExtraction(run, options, saved, unreadable)
    note_changed(run, extraction.requests)
    return extraction.result(also=trained)
