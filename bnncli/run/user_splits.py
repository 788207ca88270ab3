"""The splits that a user names by --data and --hold-out, opened and checked, and what of the user's own a network is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from bnncli import data
from bnncli.artifacts.provenance import Source
from bnncli.errors import DataError, UsageError
from bnncli.likelihoods import why_unfit
from bnncli.models import SavedModel, is_kind
from bnncli.numerics.digests import file_sha256
from bnncli.numerics.random import stream_seed
from bnncli.run.model_files import ModelFiles
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
    memory: Callable[[str], data.Memory | None],
    ood: Sequence[str] = (),
    shift: data.Shift | None = None,
    classes: tuple[str, ...] | None = None,
) -> list[data.InputSplit]:
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
    preprocess = data.Preprocess.parse(
        **of_files,
        mean=options.mean,
        std=options.std,
        resize=options.resize,
        crop=options.crop,
        transform=None if saved is None else saved.transform,
    )
    if classes is None and saved is not None:
        classes = saved.classes
    splits: dict[str, data.InputSplit] = {}
    for flag, texts in (("\0data\0", options.data), ("\0ood\0", ood)):
        for text in texts:
            name, spec = data.parse_split(text, option=flag)
            if name in splits:
                raise UsageError(f"{flag}: two splits are called {name!r}")
            split = data.load_split(spec, name=name, preprocess=preprocess, takes_any_labels=True, memory=memory(name))
            split = replace(split.as_ood() if flag == "\0ood\0" else split, shift=shift)
            splits[name] = data.matched_to(split, classes)
    for text in options.hold_out:
        splits = data.hold_out(splits, text, seed=seed)
    found = sorted(splits.values(), key=lambda split: split.name != "train")
    if classes is None:
        named = "name all classes in the order of the network's outputs: \0classes\0 FILE or a,b,c"
        data.check_same_classes(
            found, hint=named if hasattr(options, "classes") else "use the same classes for every split"
        )
    return found


def shift_of(params: Mapping[str, Any]) -> data.Shift | None:
    """What a split's parameters say is done to its images; None for nothing.

    Args:
        params: rotate and corrupt where they are given, and the seed of the command.
    """
    rotate, corrupt = params.get("rotate"), params.get("corrupt")
    if rotate is None and corrupt is None:
        return None
    return data.Shift(rotate, corrupt, stream_seed(params.get("seed") or 0, "extract-features/corrupt"))


def shift_params(shift: data.Shift | None) -> dict[str, Any]:
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


def user_sources(options: InputSpecs, split: data.InputSplit, saved: SavedModel | None) -> list[Source]:
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
