"""Open, check and compare the splits that a user names, and find what each has been used for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bnncli.artifacts.features import read_groups, read_sample_ids
from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.run_folder import RunFolder
from bnncli.data.labels import check_same_classes, match_classes
from bnncli.data.pixels import Preprocess
from bnncli.data.shift import Shift
from bnncli.data.splits import InputSplit, Memory, hold_out, load_split, parse_split
from bnncli.errors import DataError, UsageError
from bnncli.likelihoods import explain_unfit_outputs
from bnncli.models import SavedModel, is_kind
from bnncli.names import count_noun
from bnncli.numerics.digests import file_sha256
from bnncli.numerics.random import stream_seed
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import ModelFiles, Run
from bnncli.session.unreadable import SkippedExamples
from bnncli.system import user_code

_OF_IMAGE_FILES = ("no_exif", "background")  # options that only some commands have


class InputSpecs(Protocol):
    """Options that select a network and its inputs."""

    @property
    def model(self) -> str | None:
        """The network."""

    @property
    def model_arg(self) -> list[str]:
        """Arguments of the network, each as KEY=VALUE."""

    @property
    def data(self) -> list[str]:
        """Splits, each as SPLIT=SPEC."""

    @property
    def hold_out(self) -> list[str]:
        """Rows to move from one split to another."""

    @property
    def mean(self) -> str | None:
        """Mean of each channel."""

    @property
    def std(self) -> str | None:
        """Standard deviation of each channel."""

    @property
    def resize(self) -> int | None:
        """Size in pixels."""

    @property
    def crop(self) -> int | None:
        """Size in pixels."""


def open_splits(
    options: InputSpecs,
    saved: SavedModel | None,
    *,
    seed: int,
    memory: Callable[[str], Memory | None],
    ood: Sequence[str] = (),
    shift: Shift | None = None,
    classes: tuple[str, ...] | None = None,
    skipped: SkippedExamples | None = None,
) -> list[InputSplit]:
    """Open and check every split of --data, --ood and --hold-out; train first.

    Args:
        seed: selects the rows that --hold-out moves.
        memory: returns the memory for a split's data, by name.
        ood: splits without labels, each as SPLIT=SPEC.
        shift: applied to the images of all of these splits.
        classes: names of the network's outputs; None for those of the saved model.
        skipped: leaves out and notes the examples that cannot be read; None to leave none out.

    Raises:
        UsageError: a repeated name or a malformed spec.
        MissingInput, DataError: see the data's readers; also if classes are unknown to the model, or differ between splits.
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
            if skipped is not None:
                split = skipped.leave_out(split)
            splits[name] = match_classes(split, classes)
    for text in options.hold_out:
        splits = hold_out(splits, text, seed=seed)
    found = sorted(splits.values(), key=lambda split: split.name != "train")
    if classes is None:
        named = "name all classes in the order of the network's outputs: \0classes\0 FILE or a,b,c"
        check_same_classes(found, hint=named if hasattr(options, "classes") else "use the same classes for every split")
    return found


def shift_of(params: Mapping[str, Any]) -> Shift | None:
    """Return the recorded shift of a split's images; None without one.

    Args:
        params: rotate and corrupt if given, and the command's seed.
    """
    rotate, corrupt = params.get("rotate"), params.get("corrupt")
    if rotate is None and corrupt is None:
        return None
    return Shift(rotate, corrupt, stream_seed(params.get("seed") or 0, "extract-features/corrupt"))


def shift_params(shift: Shift | None) -> dict[str, Any]:
    """Return what to record of a shift; empty without one."""
    found = {} if shift is None else {"rotate": shift.rotate, "corrupt": shift.corrupt}
    return {name: value for name, value in found.items() if value is not None}


def check_outputs(task: str | None, likelihood: str | None, num_outputs: int) -> None:
    """Check that a head with this many outputs fits the given task and the likelihood of the labels.

    Raises:
        UsageError: it does not fit the task.
        DataError: it does not fit the labels.
    """
    asked = task or likelihood
    why = None if asked is None else explain_unfit_outputs(asked, num_outputs)
    if why is None:
        return
    if task is None:
        raise DataError(f"examples have several labels, but {why}", code="bad_labels")
    raise UsageError(f"\0task\0 {task}: {why}")


def check_network_file(options: InputSpecs) -> None:
    """Check that a network's code file exists, before PyTorch is imported.

    Raises:
        MissingInput: the file does not exist.
        UsageError: it is followed by something other than a name.
    """
    model = options.model or ""
    code = Path(model.rpartition(":")[0])
    can_be_told = all(
        text.find("=") > 0 for text in options.model_arg
    )  # otherwise that is reported when the network is built
    if can_be_told and code.suffix == ".py" and not code.is_file() and not is_kind(model):
        user_code.load_factory(model, option="\0model\0")


def user_sources(options: InputSpecs, split: InputSplit, saved: SavedModel | None) -> list[Source]:
    """Return the user's inputs of a split's features: the examples and the network's files."""
    place = Path(split.spec.partition(":")[2])
    sources = [Source(f"data.{split.name}", place, split.order_digest, is_artifact=False)]
    if saved is not None:
        return [*sources, *_model_source(saved.files)]
    code = Path((options.model or "").rpartition(":")[0])
    if code.suffix == ".py" and code.is_file():
        sources.append(Source("model", code, f"sha256:{file_sha256(code)}", is_artifact=False))
    return sources


def _model_source(files: tuple[Path, ...]) -> list[Source]:
    """Return the source of a saved model's files; empty if it has none."""
    if not files:
        return []
    found = ModelFiles.of(files)
    return [Source("model", found.folder, f"sha256:{found.sha256()}", is_artifact=False)]


FIT_SPLITS = {"train", "val"}


def describe_shared_rows(folder: RunFolder, names: Collection[str] | None = None) -> list[str]:
    """Return a warning for every two in-distribution splits, named or all, with the same rows or groups.

    Rows and numbered groups are those of the same source; groups with names are the same in every source. A rotated or corrupted copy may accompany its original, unless it is used for training or tuning.
    """
    sources, shifted = {}, set()
    for name in (split for split in folder.splits() if names is None or split in names):
        header = read_header(folder.features(name))
        if not header.meta.get("is_ood"):
            params = header.provenance.get("params", {})
            shifted |= {name} if {"rotate", "corrupt"} & {*params} else set()
            sources[name] = re.sub(r"@\d+$", "", str(header.provenance.get("source")))
    groups, found = {name: read_groups(folder.features(name)) for name in sources}, []
    for first, second in combinations(sources, 2):
        is_copy = {first, second} & shifted and not {first, second} & FIT_SPLITS
        if is_copy:
            continue
        is_same_source = sources[first] == sources[second]
        if count := _count_shared(groups[first], groups[second], is_same_source=is_same_source):
            found.append(
                f"splits {first!r} and {second!r} share {count_noun(count, 'group')}: scores on one depend on "
                "what was fitted or tuned on the other"
            )
            continue
        if not is_same_source:
            continue
        ids, others = (read_sample_ids(folder.features(name)) for name in (first, second))
        count = len(np.intersect1d(ids, others))
        if count:
            found.append(
                f"splits {first!r} and {second!r} share {count} rows of {sources[first]}: scores on one depend "
                "on what was fitted or tuned on the other"
            )
    return found


def _count_shared(groups: np.ndarray | None, others: np.ndarray | None, *, is_same_source: bool) -> int:
    """Return the number of groups that two splits share: of one source all, else those identified by a name."""
    if groups is None or others is None:
        return 0
    shared = np.intersect1d(groups, others)
    return len(shared) if is_same_source else int((shared < 0).sum())


_FEATURES = "features"
_FRESH = "calib"  # default name for a split that has not been used
_ALWAYS = ("train",)  # always used to train the network


def require_unused(run: Run, group: PredictionGroup, header: Header) -> None:
    """Check that the split of these predictions was not used to create them.

    Raises:
        DataError: it was; says for what, and names the command that creates an unused split.
    """
    split = str(header.meta["split"])
    uses = dict(_uses(run, group, header))
    why = f"the network was trained on it (as {split!r})" if split in _ALWAYS else uses.get(split)
    if why is None:
        known = [name for name in dict.fromkeys([*_ALWAYS, *uses]) if name in run.folder.splits()]
        shared = [text for name in known for text in describe_shared_rows(run.folder, (name, split))]
        why = shared[0].partition(":")[0] if shared else None
    if why is None:
        return
    message = f"split {split!r} cannot calibrate {group.name}: {why}, so results on it look better than they are"
    raise DataError(message, code="split_was_used", hint=fresh_split(run, split), path=header.path)


def _uses(run: Run, group: PredictionGroup, header: Header) -> Iterator[tuple[str, str]]:
    """Yield every split used for the predictions, except their own inputs, with the reason."""
    own = f"{_FEATURES}.{header.meta['split']}"
    yield from _walk_inputs(header, {own, "classes"}, set())
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


def _walk_inputs(header: Header, skipped: set[str], seen: set[Path]) -> Iterator[tuple[str, str]]:
    """Yield the splits among an artifact's inputs and, recursively, the inputs of these."""
    for entry in header.inputs:
        if entry["role"] in skipped or not entry.get("is_artifact", True):
            continue
        role, _, name = entry["role"].partition(".")
        if role == _FEATURES:
            yield name, f"{_format_title(header)} was fitted or chosen with this split"
            continue
        path = header.input_path(entry)
        if path.resolve() not in seen and path.is_file():
            seen.add(path.resolve())
            yield from _walk_inputs(read_header(path), set(), seen)


def _format_title(header: Header) -> str:
    if header.kind == "predictions":
        return f"its integrator {header.meta['integrator']}"
    return f"the {header.kind} {header.path.stem!r}"


def fresh_split(run: Run, split: str) -> str:
    """Return the command that creates an unused split by holding out part of the run's test split."""
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
