"""`torchvision:NAME:ROOT[:split]`: a torchvision dataset on disk, read without torchvision.

NAME is the class, ROOT its `root`, the split as torchvision calls it (train and test where its class asks `train=True`). Nothing is
ever downloaded. Class names are those of the set; digits are called 0 to 9.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bnncli.data import _torchvision_arrays as arrays
from bnncli.data import _torchvision_images as images
from bnncli.data._arrays import ArrayDataset
from bnncli.data._preprocess import Preprocess
from bnncli.data.images import ImageDataset
from bnncli.errors import MissingInput, UsageError
from bnncli.names import quoted
from bnncli.options.parts import Form

FORM = Form("torchvision:NAME:ROOT[:split]", 80, "A torchvision.datasets dataset on disk.")

_BOTH = ("train", "test")
_Dataset = ArrayDataset | ImageDataset


class _Set(NamedTuple):
    """The splits of a set, none where it has no such division, and what opens one of them."""

    splits: tuple[str, ...]
    open: Callable[[Path, str, Preprocess], _Dataset]


def _arrays(read: Callable[[Path, str], ArrayDataset]) -> Callable[[Path, str, Preprocess], ArrayDataset]:
    return lambda root, split, preprocess: read(root, split)


def _folders(*within: str) -> Callable[[Path, str, Preprocess], ImageDataset]:
    """Class folders in a folder of ROOT, of the split where it is named {split}."""
    return lambda root, split, preprocess: images.folders(
        root.joinpath(*(name.format(split=split) for name in within)), preprocess
    )


_SETS = {
    "MNIST": _Set(_BOTH, _arrays(partial(arrays.mnist, "MNIST", arrays.DIGITS))),
    "FashionMNIST": _Set(_BOTH, _arrays(partial(arrays.mnist, "FashionMNIST", arrays.FASHION))),
    "KMNIST": _Set(_BOTH, _arrays(partial(arrays.mnist, "KMNIST", arrays.KUZUSHIJI))),
    "CIFAR10": _Set(_BOTH, _arrays(arrays.cifar10)),
    "CIFAR100": _Set(_BOTH, _arrays(arrays.cifar100)),
    "SVHN": _Set(("train", "test", "extra"), _arrays(arrays.svhn)),
    "STL10": _Set(("train", "test", "unlabeled"), _arrays(arrays.stl10)),
    "Flowers102": _Set(("train", "val", "test"), images.flowers102),
    "OxfordIIITPet": _Set(("trainval", "test"), images.pets),
    "Food101": _Set(_BOTH, images.food101),
    "DTD": _Set(("train", "val", "test"), images.textures),
    "GTSRB": _Set(_BOTH, images.traffic_signs),
    "Country211": _Set(("train", "valid", "test"), _folders("country211", "{split}")),
    "EuroSAT": _Set((), _folders("eurosat", "2750")),
    "ImageNet": _Set(("train", "val"), _folders("{split}")),
    "ImageFolder": _Set((), _folders()),
}


def exists(place: str) -> bool:
    """Whether the text names a set and a folder as it stands."""
    name, _, root = place.partition(":")
    return name in _SETS and Path(root).expanduser().is_dir()


def open_dataset(place: str, preprocess: Preprocess) -> _Dataset:
    """A split of a set.

    Raises:
        UsageError: another set, or a split that it does not have, or none of several.
        MissingInput: no such folder, or not the files that torchvision puts there.
        DataError: a file is damaged or no file of the set.
        Untrusted: a pickle that is no file of the set would call something.
    """
    name, _, rest = place.partition(":")
    if name not in _SETS or not rest:
        raise UsageError(
            f"\0data\0 torchvision: expected NAME:ROOT[:split], where NAME is one of {', '.join(_SETS)}; got {place!r}"
        )
    root, _, split = (rest, "", "") if Path(rest).expanduser().is_dir() else rest.rpartition(":")
    root, split = (root, split) if root else (split, "")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise MissingInput(f"no folder {quoted(root, limit=300)}", path=folder)
    known = _SETS[name].splits
    if known and split not in known:
        came = f"got {split!r}" if split else "got none"
        raise UsageError(
            f"\0data\0 torchvision:{name}: expected one of the splits {', '.join(known)}, such as "
            f"{name}:{root}:{known[-1]}; {came}"
        )
    if split and not known:
        folder = folder / split
    return _SETS[name].open(folder, split, preprocess)
