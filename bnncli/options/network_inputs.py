"""Options that say what goes into a network, and what it is made of: the same for all commands that run one from the start."""

from __future__ import annotations

from typing import Any

from bnncli.likelihoods import TASKS
from bnncli.options.declaration import option
from bnncli.options.parts import forms


def model_arg() -> Any:
    """Arguments of the network."""
    return option([], "Argument of the network, as key=value; repeatable.", metavar="KEY=VALUE")


def data() -> Any:
    """Splits."""
    return option([], _data_help, metavar="SPLIT=SPEC")


def _data_help() -> str:
    return (
        f"A split whose labels are the network's classes: {', '.join(forms())}; @N takes the first N rows. Repeatable."
    )


def hold_out() -> Any:
    """What moves rows from one split into another."""
    return option(
        [],
        "Move N random rows (seeded) of one split into another, as val=test:2000. Validation rows must be rows that the network was not trained on.",
        metavar="NEW=OLD:N",
    )


def task() -> Any:
    """What labels are."""
    return option(
        None,
        "What labels are: multiclass, binary, or multilabel, zeros and ones (N, L) of which each column is a label by itself. "
        "Found where labels are zeros and ones with several ones in a row.",
        choices=TASKS,
    )


def mean() -> Any:
    """Of the channels."""
    return option(None, "Mean of each channel, to normalise inputs in [0, 1].", metavar="M[,M,M]")


def std() -> Any:
    """Of the channels."""
    return option(None, "Standard deviation of each channel.", metavar="S[,S,S]")


def resize() -> Any:
    """Of images, before they are cropped."""
    return option(None, "Resize the shorter side of images to this many pixels.", minimum=1)


def crop() -> Any:
    """Of images."""
    return option(None, "Crop the centre square of this many pixels.", minimum=1)


def no_exif() -> Any:
    """Of images."""
    return option(
        False,
        "Leave images as they are stored. Without it they are turned as their EXIF orientation says, as photographs are shown; "
        "give it for networks that were trained without that.",
    )


def background() -> Any:
    """Of images."""
    return option(
        None,
        "Colour that shows through transparent pixels of images; white where none is given.",
        choices=("white", "black"),
    )


def num_workers() -> Any:
    """That read."""
    return option(0, "Processes that read, decode images and tokenise texts.", minimum=0, maximum=256, numeric=False)
