"""extract-features: from a checkpoint and data to penultimate features and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.features import FeatureFile
from bnncli.artifacts.files import read_header
from bnncli.errors import UsageError
from bnncli.models import SavedModel
from bnncli.names import format_names, quote_name
from bnncli.numerics.corruptions import CORRUPTIONS, NUM_SEVERITIES
from bnncli.options import shared
from bnncli.options.command import COMPUTE, Argument, Command
from bnncli.options.declaration import CheckedOptions, declaration, list_forms, option
from bnncli.options.shared import EITHER, NO_NETWORK, check_corruption
from bnncli.registry import check_name, has_name, names
from bnncli.session.network import end
from bnncli.session.network_fit import MISREAD, read_recorded_fit
from bnncli.session.run import Result, Run, own_files
from bnncli.session.unreadable import suggest_skipping
from bnncli.system.input_files import convert_read_errors
from bnncli.system.workers import worker_pool

if TYPE_CHECKING:
    from bnncli.commands.extract_features.network import NetworkExtraction


def _model_help() -> str:
    built_in = ", ".join(name for name in names("networks") if name != NO_NETWORK)
    return (
        f"Network: {built_in}; a saved model ({', '.join(list_forms('models'))}); or your code, "
        f"package.module:factory or file.py:factory. {NO_NETWORK} takes the inputs as features."
    )


def _corrupt_help() -> str:
    return (
        f"Corrupt the images in the splits given here. Kinds: {', '.join(CORRUPTIONS)}; severities: 1 to "
        f"{NUM_SEVERITIES}."
    )


@dataclass(frozen=True)
class ExtractFeaturesOptions(CheckedOptions):
    """Options of extract-features."""

    model: str | None = option(None, _model_help, metavar="MODEL", group="Network")
    model_arg: list[str] = shared.model_arg()
    base_model: str | None = option(
        None,
        "Folder that holds the adapter's base model, for \0model\0 peft:DIR.",
        metavar="DIR",
        group="Network",
        is_rare=True,
    )
    feature_node: str | None = option(
        None,
        "Graph node whose output is the features. Default: the input of the last linear layer.",
        metavar="NAME",
        group="Network",
        is_rare=True,
    )
    allow_download: bool = option(
        False, "Let \0model\0 download what is missing on this machine.", numeric=False, group="Network"
    )
    data: list[str] = shared.data()
    ood: list[str] = option(
        [],
        "Out-of-distribution split. SPEC is as for \0data\0, labels are ignored; with \0from_npz\0, give just "
        "the split's name.",
        metavar="SPLIT=SPEC",
        group="Data",
    )
    hold_out: list[str] = shared.hold_out()
    skip_unreadable: bool = shared.skip_unreadable()
    max_skipped: float | None = shared.max_skipped()
    from_npz: str | None = option(
        None,
        "Arrays from your own feature extractor: features_<split>, labels_<split>, head_weight, head_bias.",
        metavar="FILE",
        group="Network",
    )
    classes: str | None = option(
        None,
        "Class names in the order of the network's outputs: a file with one per line, or a,b,c.",
        metavar="FILE|A,B,C",
        group="Data",
    )
    task: str | None = shared.task()
    last_layer: str | None = option(
        None,
        "Name of the last linear layer, or identity to use the logits as features. Default: the last linear "
        "layer that the network calls.",
        metavar="NAME",
        group="Network",
        is_rare=True,
    )
    output: str | None = option(
        None,
        "Name or index of the output that holds the logits, if the network has several outputs.",
        metavar="NAME",
        group="Network",
        is_rare=True,
    )
    state: str | None = option(
        None,
        "Which weights to take from a checkpoint with several sets: a key that inspect lists, or ema for the "
        "averaged ones.",
        metavar="NAME",
        group="Network",
    )
    mean: str | None = shared.mean()
    std: str | None = shared.std()
    resize: int | None = shared.resize()
    crop: int | None = shared.crop()
    no_exif: bool = shared.no_exif()
    background: str | None = shared.background()
    rotate: float | None = option(
        None,
        "Rotate the images in the splits given here counter-clockwise by this angle, and fill the corners with black.",
        minimum=-360,
        maximum=360,
        metavar="DEGREES",
        group="Images",
        is_rare=True,
    )
    corrupt: str | None = option(
        None, _corrupt_help, metavar="KIND:SEVERITY", check=check_corruption, group="Images", is_rare=True
    )
    dtype: str = option(
        "float32", "Storage type of the features.", choices=("float32", "float16"), group="Computation", is_rare=True
    )
    autocast: str | None = option(
        None,
        "Run the network in lower precision (torch.autocast). The summary reports the difference in logits.",
        choices=("bf16", "fp16"),
        group="Computation",
        is_rare=True,
    )
    batch_size: int = option(256, "Inputs per batch.", minimum=1, numeric=False, group="Computation")
    num_workers: int = shared.num_workers()

    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Computation"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every batch.",
        minimum=0,
        numeric=False,
        group="Computation",
        is_rare=True,
    )

    @property
    def has_network(self) -> bool:
        """True where a network computes the features, False for ready features and flattened inputs."""
        return self.from_npz is None and self.model != NO_NETWORK

    @cached_property
    def class_names(self) -> tuple[str, ...] | None:
        """Return the names given by --classes, or None. Raises UsageError for fewer than two names, or a name twice."""
        return None if self.classes is None else _class_names(self.classes)

    def __post_init__(self) -> None:
        super().__post_init__()
        shared.check_skipped(self.skip_unreadable, self.max_skipped)
        if self.classes is not None and self.from_npz is not None:
            raise UsageError("\0classes\0 needs \0model\0: labels in \0from_npz\0 are numbers")
        if self.model is not None and self.from_npz is not None:
            raise UsageError(EITHER)
        if self.model is not None and ":" not in self.model:
            if has_name("models", self.model):
                raise UsageError(
                    f"\0model\0: expected {declaration('models', self.model, 'FORM').text}; got {self.model!r}"
                )
            others = [*list_forms("models"), "package.module:factory", "file.py:factory"]
            check_name("networks", self.model, option="\0model\0", also=others)
        given = [name for name in ("base_model", "feature_node", "allow_download") if getattr(self, name)]
        if self.model is not None and given and not has_name("models", self.model.partition(":")[0]):
            raise UsageError(f"\0{given[0]}\0 needs a saved model: \0model\0 {', '.join(list_forms('models'))}")
        if self.autocast is not None and self.model in (None, NO_NETWORK):
            raise UsageError("\0autocast\0 needs a network")
        if self.model == NO_NETWORK and self.state is not None:
            raise UsageError("\0state\0 needs a network whose checkpoint has several sets of weights")
        for name in ("last_layer", "output"):
            if self.model == NO_NETWORK and getattr(self, name) is not None:
                raise UsageError(f"\0{name}\0 needs a network; with \0model\0 {NO_NETWORK} the inputs are the features")
        if self.model is not None and not (self.data or self.ood):
            raise UsageError("\0data\0: give at least one split, such as \0data\0 train=npz:train.npz")


def _class_names(text: str) -> tuple[str, ...]:
    """Read names from a file, one per line, or from a comma-separated list. Raises UsageError for fewer than two, or one twice."""
    path = Path(text).expanduser()
    if "\n" not in text and path.is_file():
        with convert_read_errors(path):
            text = path.read_text(encoding="utf-8-sig", errors="replace")
        lines = text.splitlines()
    else:
        lines = text.split("\n" if "\n" in text else ",")
    names = tuple(name for line in lines if (name := line.strip()))
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if len(names) < 2 or twice:
        found = f"{quote_name(twice[0])} twice" if twice else format_names(names) or "none"
        raise UsageError(
            f"\0classes\0: expected the names of at least two classes, in the order of the network's outputs; got {found}",
            hint="give a file with one name per line, or a,b,c",
        )
    return names


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


def execute(run: Run, options: ExtractFeaturesOptions) -> Result:
    """Write a feature file for every split, and the network as trained as the posterior `map`."""
    from bnncli.commands.extract_features.arrays import extract_from_arrays
    from bnncli.commands.extract_features.network import lend_to_first
    from bnncli.commands.extract_features.splits import fill_in_recorded, open_saved_model, suggest_own_model

    options = fill_in_recorded(run, options)
    saved = open_saved_model(run, options)
    has_own = own_files(saved, Path(run.arguments["ckpt"])) is not None
    run.is_named = options.from_npz is not None or options.model == NO_NETWORK or has_own
    if options.from_npz is not None:
        result = extract_from_arrays(run, options)
        _report_fits(run, result, lambda name: "features or a head of another network")
        return result
    others = worker_pool()
    if others is not None and not others.is_leader:
        return lend_to_first(run, options, saved, others)
    with suggest_own_model(run, options), suggest_skipping(options):
        result = _from_network(run, options, saved)
    if others is not None:
        end(others)
    return result


def _from_network(run: Run, options: ExtractFeaturesOptions, saved: SavedModel | None) -> Result:
    """Run the network over the splits, and write it as the posterior `map`."""
    from bnncli.commands.extract_features.arrays import make_map
    from bnncli.commands.extract_features.network import NetworkExtraction
    from bnncli.commands.extract_features.splits import note_changed

    def map_of(first: FeatureFile, recorded: dict[str, Any] | None) -> list[Result]:
        return [] if options.model == NO_NETWORK else [make_map(run, options, first, recorded)]

    extraction = NetworkExtraction(run, options, saved)
    note_changed(run, extraction.requests)
    result = extraction.result(also=map_of)
    _report_fits(run, result, partial(_list_causes, extraction))
    return result


def _report_fits(run: Run, result: Result, causes: Callable[[str], str]) -> None:
    """Report how well the network fits each labelled split. Warn where it probably misreads inputs or labels.

    Args:
        causes: returns what may be wrong with the inputs of a split.
    """
    written = (
        []
        if run.write.dry_run
        else [Path(one["path"]) for one in result.outputs if one["role"] not in ("map", "skipped")]
    )
    found = {path.stem: fit for path in written if (fit := read_recorded_fit(read_header(path))) is not None}
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


def _list_causes(extraction: NetworkExtraction, name: str) -> str:
    """Return what may be wrong with the inputs of a split."""
    split = next(one for one in extraction.splits if one.name == name)
    if split.preprocess.transform is None:
        first = next(iter(split.take(np.arange(1)).batches(1))).inputs
        if not isinstance(first, Mapping) and first.ndim == 4:
            better = extraction.better_scaling(name)
            found = "\0mean\0 or \0std\0 missing or wrong" + (f" ({better})" if better else "")
            return f"{found}, channels in another order (RGB, BGR), pixels from 0 to 255 instead of 0 to 1"
    return "inputs preprocessed differently than in training"
