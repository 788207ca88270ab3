"""Which posteriors are of networks of which weights are out, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bnncli.artifacts.files import read_header
from bnncli.errors import UsageError
from bnncli.evaluation.scores import input_numbers
from bnncli.posteriors import LATENT_BINARY, SPARSE
from bnncli.session.predictions import PredictionGroup
from bnncli.session.predictor import type_of


def is_latent(path: Path | None) -> bool:
    """Whether the posterior in a file is a latent binary network."""
    return path is not None and path.is_file() and type_of(read_header(path)) == LATENT_BINARY


def has_density(path: Path | None) -> bool:
    """Whether the posterior in a file is a network of which weights are out."""
    return path is not None and path.is_file() and type_of(read_header(path)) in (LATENT_BINARY, SPARSE)


def check_true_inputs(groups: Sequence[PredictionGroup], true_inputs: str | None) -> None:
    """Raise UsageError unless every group is of a latent binary network of one layer and a single logit with such inputs."""
    numbers = input_numbers(true_inputs)
    for group in groups if numbers else ():
        path = group.posterior_path
        sizes: list[int] = read_header(path).meta["sizes"] if path is not None and is_latent(path) else []
        if len(sizes) != 2 or sizes[1] != 1:
            raise UsageError(
                "--true-inputs: expected fit-lbbnn posteriors with one layer and a single logit; "
                f"{group.posterior} is not one",
                hint="name one with --posterior",
                code="wrong_type",
            )
        if max(numbers) > sizes[0]:
            raise UsageError(
                f"--true-inputs: {group.posterior} has {sizes[0]} inputs, which are numbered from 1; got {max(numbers)}"
            )
