"""Which labels a likelihood takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.likelihoods import Likelihood


def label_shape(likelihood: Likelihood) -> str:
    """Of the labels of N examples, as check_shapes takes it: (N,), or (N, C) where there are several an example."""
    return "N" if likelihood.is_exclusive else f"N {likelihood.num_classes}"


def check_labels(labels: Tensor, likelihood: Likelihood) -> None:
    """Pass when there are labels, of this shape, and each is a class, or 0 or 1 where there are several an example.

    Raises:
        DataError: there are none, or one is something else.
    """
    if len(labels) == 0:
        raise DataError("the training split has no examples")
    lowest, highest = int(labels.min()), int(labels.max())
    most = likelihood.num_classes - 1 if likelihood.is_exclusive else 1
    if lowest < 0 or highest > most:
        raise DataError(
            f"expected labels from 0 to {most}, got {lowest} to {highest}",
            hint="are these labels from another data set?",
        )
