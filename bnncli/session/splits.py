"""Splits that a user names: opened, checked, compared with each other, and what each has been used for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bnncli.artifacts.features import read_sample_ids
from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.run_folder import RunFolder
from bnncli.data.labels import check_same_classes, match_classes
from bnncli.data.pixels import Preprocess
from bnncli.data.shift import Shift
from bnncli.data.splits import InputSplit, Memory, hold_out, load_split, parse_split
from bnncli.errors import DataError, UsageError
from bnncli.likelihoods import why_unfit
from bnncli.models import SavedModel, is_kind
from bnncli.numerics.digests import file_sha256
from bnncli.numerics.random import stream_seed
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import ModelFiles, Run
from bnncli.system import user_code

_OF_IMAGE_FILES = ("no_exif", "background")  # options that not every command has


class InputSpecs(Protocol):
    """Options that name a network and what goes into it."""

    @property
    def model(self) -> str | None:
        """The network."""

    @property
    def model_arg(self) -> list[str]:
        """Its arguments, each as KEY=VALUE."""

    @property
    def data(self) -> list[str]:
        """Splits, each as SPLIT=SPEC."""

    @property
    def hold_out(self) -> list[str]:
        """What moves rows from one to another."""

    @property
    def mean(self) -> str | None:
        """Of the channels."""

    @property
    def std(self) -> str | None:
        """Of the channels."""

    @property
    def resize(self) -> int | None:
        """Pixels."""

    @property
    def crop(self) -> int | None:
        """Pixels."""


def open_splits(
    options: InputSpecs,
    saved: SavedModel | None,
    *,
    seed: int,
    memory: Callable[[str], Memory | None],
    ood: Sequence[str] = (),
    shift: Shift | None = None,
    classes: tuple[str, ...] | None = None,
) -> list[InputSplit]:
    """Every split that --data, --ood and --hold-out name, opened and checked; train first.

    Args:
        seed: chooses the rows that --hold-out moves.
        memory: of the data of a split, by its name.
        ood: splits without labels, each as SPLIT=SPEC.
        shift: what is done to the images of all of them.
        classes: names of the network's outputs; None: those that the saved model has.

    Raises:
        UsageError: a name twice, a malformed spec.
        MissingInput, DataError: as the data's readers say; classes that the model does not have, or that differ between splits.
    """
    of_files = {name: value for name in _OF_IMAGE_FILES if (value := getattr(options, name, None))}
    preprocess = Preprocess.parse(
        **of_files,
        mean=options.mean,
        std=options.std,
        resize=options.resize,
        crop=options.crop,
        transform=None if saved is None else saved.transform,
    )
    if classes is None and saved is not None:
        classes = saved.classes
    splits: dict[str, InputSplit] = {}
    for flag, texts in (("\0data\0", options.data), ("\0ood\0", ood)):
        for text in texts:
            name, spec = parse_split(text, option=flag)
            if name in splits:
                raise UsageError(f"{flag}: two splits are called {name!r}")
            split = load_split(spec, name=name, preprocess=preprocess, takes_any_labels=True, memory=memory(name))
            split = replace(split.as_ood() if flag == "\0ood\0" else split, shift=shift)
            splits[name] = match_classes(split, classes)
    for text in options.hold_out:
        splits = hold_out(splits, text, seed=seed)
    found = sorted(splits.values(), key=lambda split: split.name != "train")
    if classes is None:
        named = "name all classes in the order of the network's outputs: \0classes\0 FILE or a,b,c"
        check_same_classes(found, hint=named if hasattr(options, "classes") else "use the same classes for every split")
    return found


def shift_of(params: Mapping[str, Any]) -> Shift | None:
    """What a split's parameters say is done to its images; None for nothing.

    Args:
        params: rotate and corrupt where they are given, and the seed of the command.
    """
    rotate, corrupt = params.get("rotate"), params.get("corrupt")
    if rotate is None and corrupt is None:
        return None
    return Shift(rotate, corrupt, stream_seed(params.get("seed") or 0, "extract-features/corrupt"))


def shift_params(shift: Shift | None) -> dict[str, Any]:
    """What is recorded of it, where there is any."""
    found = {} if shift is None else {"rotate": shift.rotate, "corrupt": shift.corrupt}
    return {name: value for name, value in found.items() if value is not None}


def check_outputs(task: str | None, likelihood: str | None, num_outputs: int) -> None:
    """Pass where a head of so many outputs can be for the task that was said, or for what the labels are.

    Raises:
        UsageError: it cannot be for the task.
        DataError: it cannot be for the labels.
    """
    asked = task or likelihood
    why = None if asked is None else why_unfit(asked, num_outputs)
    if why is None:
        return
    if task is None:
        raise DataError(f"examples have several labels, but {why}", code="bad_labels")
    raise UsageError(f"\0task\0 {task}: {why}")


def check_network_file(options: InputSpecs) -> None:
    """Raise what building the network would where the file of its code is missing, before PyTorch is imported for it.

    Raises:
        MissingInput: the file does not exist.
        UsageError: what comes after it is no name.
    """
    model = options.model or ""
    code = Path(model.rpartition(":")[0])
    can_be_told = all(
        text.find("=") > 0 for text in options.model_arg
    )  # else that is told first, where the network is built
    if can_be_told and code.suffix == ".py" and not code.is_file() and not is_kind(model):
        user_code.load_factory(model, option="\0model\0")


def user_sources(options: InputSpecs, split: InputSplit, saved: SavedModel | None) -> list[Source]:
    """What of the user's own the features of a split are made from: the examples, and the files of the network."""
    place = Path(split.spec.partition(":")[2])
    sources = [Source(f"data.{split.name}", place, split.order_digest, is_artifact=False)]
    if saved is not None:
        return [*sources, *_model_source(saved.files)]
    code = Path((options.model or "").rpartition(":")[0])
    if code.suffix == ".py" and code.is_file():
        sources.append(Source("model", code, f"sha256:{file_sha256(code)}", is_artifact=False))
    return sources


def _model_source(files: tuple[Path, ...]) -> list[Source]:
    """The files of a saved model; nothing where it has none."""
    if not files:
        return []
    found = ModelFiles.of(files)
    return [Source("model", found.folder, f"sha256:{found.sha256()}", is_artifact=False)]


FITTED_ON = {"train", "val"}


def shared_rows(folder: RunFolder, names: Collection[str] | None = None) -> list[str]:
    """A warning for every two in-distribution splits, of those named or of all, that hold the same rows of the same source.

    A rotated or corrupted copy stands beside what it is a copy of without one, unless that is for training or tuning.
    """
    sources, shifted = {}, set()
    for name in (split for split in folder.splits() if names is None or split in names):
        header = read_header(folder.features(name))
        if not header.meta.get("is_ood"):
            params = header.provenance.get("params", {})
            shifted |= {name} if {"rotate", "corrupt"} & {*params} else set()
            sources[name] = re.sub(r"@\d+$", "", str(header.provenance.get("source")))
    found = []
    for first, second in combinations(sources, 2):
        is_copy = {first, second} & shifted and not {first, second} & FITTED_ON
        if sources[first] != sources[second] or is_copy:
            continue
        ids, others = (read_sample_ids(folder.features(name)) for name in (first, second))
        count = len(np.intersect1d(ids, others))
        if count:
            found.append(
                f"splits {first!r} and {second!r} share {count} rows of {sources[first]}: scores on one depend "
                "on what was fitted or tuned on the other"
            )
    return found


_FEATURES = "features"
_FRESH = "calib"  # what a split that chooses nothing is called, where nothing else is said
_ALWAYS = ("train",)  # the network was trained on it, whatever else was


def require_unused(run: Run, group: PredictionGroup, header: Header) -> None:
    """Pass where a split, whose predictions these are, has chosen nothing of what made them.

    Raises:
        DataError: it has, with what, and the command that makes a split that has not.
    """
    split = str(header.meta["split"])
    uses = dict(_uses(run, group, header))
    why = f"the network was trained on it (as {split!r})" if split in _ALWAYS else uses.get(split)
    if why is None:
        known = [name for name in dict.fromkeys([*_ALWAYS, *uses]) if name in run.folder.splits()]
        shared = [text for name in known for text in shared_rows(run.folder, (name, split))]
        why = shared[0].partition(":")[0] if shared else None
    if why is None:
        return
    message = f"split {split!r} cannot calibrate {group.name}: {why}, so results on it look better than they are"
    raise DataError(message, code="split_was_used", hint=fresh_split(run, split), path=header.path)


def _uses(run: Run, group: PredictionGroup, header: Header) -> Iterator[tuple[str, str]]:
    """Every split that predictions go back to, but as their own inputs, and why."""
    own = f"{_FEATURES}.{header.meta['split']}"
    yield from _followed(header, {own, "classes"}, set())
    path = run.folder.recommended
    if not path.is_file():
        return
    try:
        found = read_metrics(path)
        chosen = next(row for row in found.meta["rows"] if row["is_recommended"])
        is_this = (chosen["posterior"], chosen["integrator"]) == (group.posterior, group.integrator)
    except (DataError, StopIteration, KeyError, TypeError):
        return
    if is_this:
        for entry in found.inputs:
            role, _, name = entry["role"].partition(".")
            if role == _FEATURES:
                yield name, f"auto used it to recommend {group.name}"


def _followed(header: Header, skipped: set[str], seen: set[Path]) -> Iterator[tuple[str, str]]:
    """The splits among the inputs of an artifact, and of what these were made from."""
    for entry in header.inputs:
        if entry["role"] in skipped or not entry.get("is_artifact", True):
            continue
        role, _, name = entry["role"].partition(".")
        if role == _FEATURES:
            yield name, f"{_titled(header)} was fitted or chosen with this split"
            continue
        path = header.input_path(entry)
        if path.resolve() not in seen and path.is_file():
            seen.add(path.resolve())
            yield from _followed(read_header(path), set(), seen)


def _titled(header: Header) -> str:
    if header.kind == "predictions":
        return f"its integrator {header.meta['integrator']}"
    return f"the {header.kind} {header.path.stem!r}"


def fresh_split(run: Run, split: str) -> str:
    """The command that makes a split that chose nothing: that of the run's test split, holding a part of it out."""
    there = run.folder.splits()
    if _FRESH in there and split != _FRESH:
        return f"calibrate on split {_FRESH} (\0split\0 {_FRESH})"
    name = _FRESH if split in there and _FRESH not in there else split if split not in there else f"{split}2"
    path = run.folder.features("test")
    if path.is_file():
        header = read_header(path)
        line = run.made_by(header)
        if line is not None and line.command == "extract-features" and split != "test":
            count = max(1, min(2000, int(header.meta.get("num_examples", 0)) // 2))
            held = [value for option, value in line.parts if option == "hold_out"]
            asked = [*held, f"{name}=test:{count}"]
            return f"{line.having('hold_out', asked).having('force', True).pasted()}, and predict again"
    return (
        f"extract again with a split that is not used to choose anything, such as \0hold_out\0 {name}=test:2000, "
        "with \0force\0, then predict"
    )
