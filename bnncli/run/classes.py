"""The classes of a run: the names that any of its splits brought, for all of them, in whatever order they came.

A split of unlabelled data, or of arrays, names no classes: its file has the numbers 0, 1, 2, ... in their place. It is
predicted all the same, under the names that another split of the same head has.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from bnncli.artifacts.features import FeatureFile, SplitClasses, head_digest, read_classes
from bnncli.artifacts.headers import Header
from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import NOT_OF_CONTENT, BnnError, DataError

_HINT = "extract all splits in one command with \0force\0, or use another \0run_dir\0"


class RunClasses(NamedTuple):
    """Names of the classes, index = label, and the feature file that they stand in; None for the split's own."""

    names: list[str]
    path: Path | None


def run_classes(
    folder: RunFolder, split: FeatureFile, *, weights_digest: str | None, without: Collection[str] = ()
) -> RunClasses:
    """The classes of the run that a split belongs to.

    Args:
        weights_digest: of the checkpoint that the split was made from; None without one.
        without: splits of the run that are not asked, because they are being made anew.

    Raises:
        DataError: the split has other class names than the run, or a label that is no class of it.
    """
    path = folder.features(split.name)
    own = SplitClasses(split.classes, split.labels is not None and not split.is_ood)
    asked = {path: own} | _others(folder, split, weights_digest, {*without, split.name})
    source = _source(asked)
    names = asked[source].names
    if not own.is_numbered and own.names != names:
        odd = sorted({*own.names} ^ {*names})[:5]
        differs = f"first differences: {odd}" if odd else "the same names in a different order"
        raise DataError(
            f"splits {source.stem!r} and {split.name!r} of this run have different classes ({differs})",
            code="class_mismatch",
            hint=_HINT,
            path=path,
        )
    if split.labels is not None and split.labels.ndim == 2 and split.labels.shape[1] != len(names):
        raise DataError(
            f"split {split.name!r} has {split.labels.shape[1]} labels per example, but split {source.stem!r} of "
            f"this run has {len(names)} classes",
            code="class_mismatch",
            hint=_HINT,
            path=path,
        )
    if split.labels is not None and split.labels.ndim == 1 and int(split.labels.max()) >= len(names):
        raise DataError(
            f"split {split.name!r} has labels up to {int(split.labels.max())}, but split {source.stem!r} of this "
            f"run has {len(names)} classes",
            code="class_mismatch",
            hint=_HINT,
            path=path,
        )
    return RunClasses(names, None if names == own.names else source)


def posterior_classes(folder: RunFolder, header: Header) -> list[str]:
    """The classes of a posterior: those it was fitted to; where these are numbers, the names that a split has brought since."""
    own = SplitClasses([str(name) for name in header.meta.get("classes", [])], is_labeled=True)
    for name in folder.splits() if own.is_numbered else []:
        try:
            theirs, classes = read_classes(folder.features(name))
        except NOT_OF_CONTENT:
            raise
        except BnnError:  # said where that split is asked for
            continue
        is_kin = theirs.weights_digest == header.weights_digest and len(classes.names) == len(own.names)
        if is_kin and not classes.is_numbered:
            return classes.names
    return own.names


def _source(asked: dict[Path, SplitClasses]) -> Path:
    """The file whose classes are the run's: the first with names, else that of labels, train before all others."""
    order = sorted(asked, key=lambda one: (one.stem != "train", one.name))
    for one in order:
        if not asked[one].is_numbered:
            return one
    labeled = [one for one in order if asked[one].is_labeled] or order
    return labeled[0] if labeled[0].stem == "train" else max(labeled, key=lambda one: len(asked[one].names))


def _others(
    folder: RunFolder, split: FeatureFile, weights_digest: str | None, without: Collection[str]
) -> dict[Path, SplitClasses]:
    """What the run's other splits say of the classes, of those that have the same head."""
    digest, found = head_digest(split), {}
    for name in folder.splits():
        if name in without:
            continue
        try:
            header, classes = read_classes(folder.features(name))
        except NOT_OF_CONTENT:
            raise
        except BnnError:  # said where that split is asked for
            continue
        if _is_kin(header, digest, weights_digest):
            found[folder.features(name)] = classes
    return found


def _is_kin(header: Header, digest: str, weights_digest: str | None) -> bool:
    return header.weights_digest == weights_digest and header.meta.get("head_digest") == digest
