"""The splits a user named on extract-features, whatever they come from: data through a network, or ready features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bnncli import data
from bnncli.errors import BnnError, DataError, UsageError
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.options import ExtractFeaturesOptions
from bnncli.storage.provenance import Source


@dataclass(frozen=True)
class NamedSplit:
    """One split asked for.

    Attributes:
        source: the text that named it.
        content_digest: of the examples in it; None where that cannot be told without running user code.
        held_out: the --hold-out that made it or took rows from it, or None.
    """

    name: str
    content: data.InputSplit
    source: str
    content_digest: str | None
    is_ood: bool
    held_out: str | None

    @property
    def order_digest(self) -> str:
        """Identity of the examples and their order."""
        return self.content_digest or json_sha256([self.source, self.content.rows.tolist()])


def open_splits(
    options: ExtractFeaturesOptions,
    stream: Callable[[str], torch.Generator],
    *,
    unreadable: Callable[[str, BnnError], None],
) -> list[NamedSplit]:
    """Every split that --data, --ood and --hold-out name, opened and checked; train first.

    Args:
        unreadable: told the names of the splits whose data cannot be read, and why, before that is raised.

    Raises:
        UsageError: a name twice, a malformed spec.
        MissingInput, DataError: as the data's readers say.
    """
    preprocess = data.Preprocess.parse(mean=options.mean, std=options.std, resize=options.resize, crop=options.crop)
    splits: dict[str, data.InputSplit] = {}
    outside = []
    for flag, texts in (("--data", options.data), ("--ood", options.ood)):
        for text in texts:
            name, spec = data.parse_split(text, option=flag)
            if name in splits:
                raise UsageError(f"{flag}: split {name!r} is named twice")
            try:
                split = data.load_split(spec, preprocess=preprocess)
            except BnnError as error:
                for one in (name, *(held.split("=")[0] for held in options.hold_out if f"={name}:" in held)):
                    unreadable(one, error)
                raise
            splits[name] = split.without_labels() if flag == "--ood" else split
            outside += [name] if flag == "--ood" else []
    held: dict[str, str] = {}
    for text in options.hold_out:
        splits = data.hold_out(splits, text, generator=stream("extract-features/hold-out"))
        new, old = text.split("=")[0], text.split("=")[1].split(":")[0]
        held |= {new: text, old: text}
        outside += [new] if old in outside else []
    return [
        NamedSplit(name, split, split.spec, split.content_digest(), name in outside, held.get(name))
        for name, split in sorted(splits.items(), key=lambda item: item[0] != "train")
    ]


def class_names(splits: list[NamedSplit], num_classes: int) -> list[str]:
    """Names of the classes: the data's own where they have names, else 0, 1, 2, ...

    Raises:
        DataError: the data name another number of classes than the network has, or differ in their names.
    """
    named = {split.name: list(split.content.classes) for split in splits if split.content.classes and not split.is_ood}
    for name, names in named.items():
        first_name, first = next(iter(named.items()))
        if names != first:
            odd = sorted({*names} ^ {*first})[:5]
            raise DataError(
                f"splits {first_name!r} and {name!r} have different classes (first differences: {odd})",
                code="class_mismatch",
            )
        if len(names) != num_classes:
            raise DataError(
                f"split {name!r} has {len(names)} classes, the network has {num_classes}", code="class_mismatch"
            )
    return next(iter(named.values()), [str(index) for index in range(num_classes)])


def model_identity(options: ExtractFeaturesOptions) -> dict[str, Any]:
    """What of the network's definition changes numbers: its name, arguments and layer."""
    return {
        "model": options.model,
        "model_arg": sorted(options.model_arg),
        "last_layer": options.last_layer,
    }


def user_sources(options: ExtractFeaturesOptions, split: NamedSplit) -> list[Source]:
    """What of the user's own the features of a split are made from: the examples, and the file of the network."""
    place = Path(split.source.partition(":")[2])
    sources = [Source(f"data.{split.name}", place, split.order_digest, is_artifact=False)]
    code = Path((options.model or "").rpartition(":")[0])
    if code.suffix == ".py" and code.is_file():
        sources.append(Source("model", code, f"sha256:{file_sha256(code)}", is_artifact=False))
    return sources
