"""Options that say what goes into a network, and what it is made of: the same for all commands that run one from the start."""

from __future__ import annotations

from typing import Any

from bnncli.likelihoods import TASKS
from bnncli.options.declaration import option
from bnncli.options.parts import forms

NO_NETWORK = "flatten"
IDENTITY = "identity"  # as the name of a last layer: an identity layer on the network's own logits


def model_arg() -> Any:
    """Arguments of the network."""
    return option([], "Argument of the network.", metavar="KEY=VALUE", group="Network")


def data() -> Any:
    """Splits."""
    return option([], _data_help, metavar="SPLIT=SPEC", group="Data")


def _data_help() -> str:
    return f"A split and where to read it: {', '.join(forms())}; @N takes the first N examples."


def hold_out() -> Any:
    """What moves rows from one split into another."""
    return option(
        [],
        "Move N random examples from one split to another, such as val=test:2000. Validation examples must not "
        "be training examples.",
        metavar="NEW=OLD:N",
        group="Data",
    )


def task() -> Any:
    """What labels are."""
    return option(
        None,
        "Type of the labels; multilabel is an (N, L) array of zeros and ones. Default: inferred.",
        choices=TASKS,
        group="Data",
        is_rare=True,
    )


def mean() -> Any:
    """Of the channels."""
    return option(None, "Mean of each channel, to normalise inputs in [0, 1].", metavar="M[,M,M]", group="Images")


def std() -> Any:
    """Of the channels."""
    return option(None, "Standard deviation of each channel.", metavar="S[,S,S]", group="Images")


def resize() -> Any:
    """Of images, before they are cropped."""
    return option(None, "Resize the shorter side of images to this many pixels.", minimum=1, group="Images")


def crop() -> Any:
    """Of images."""
    return option(None, "Crop the centre square of this many pixels.", minimum=1, group="Images")


def no_exif() -> Any:
    """Of images."""
    return option(
        False,
        "Ignore the EXIF orientation of images. Use this option if training ignored it too.",
        group="Images",
        is_rare=True,
    )


def background() -> Any:
    """Of images."""
    return option(
        None,
        "Colour behind transparent pixels. Default: white.",
        choices=("white", "black"),
        group="Images",
        is_rare=True,
    )


def num_workers() -> Any:
    """That read."""
    return option(
        0,
        "Number of processes that read data, decode images and tokenise text.",
        minimum=0,
        maximum=256,
        numeric=False,
        group="Computation",
        is_rare=True,
    )
