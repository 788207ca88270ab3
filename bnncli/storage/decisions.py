"""Decision files: a rule that calibrate fitted, with the predictions it was fitted on; safetensors like posteriors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.decisions.rules import Rule, from_arrays, to_arrays
from bnncli.errors import DataError
from bnncli.storage.headers import Header
from bnncli.storage.posteriors import read_tensors, write_tensors

KIND = "decision"


@dataclass(frozen=True)
class DecisionFile:
    """A rule and what its file says of it."""

    rule: Rule
    header: Header

    @property
    def name(self) -> str:
        """Of the rule: that of its file."""
        return self.header.path.stem


def write_decision(
    target: Path, rule: Rule, *, meta: Mapping[str, Any], provenance: Mapping[str, Any], may_replace: bool
) -> str:
    """Publish a rule and return its content digest; meta has rule (the kind), classes, settings and the numbers of the fit."""
    import torch

    arrays, known = to_arrays(rule)
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return write_tensors(
        target, tensors, kind=KIND, meta={**meta, "fitted": known}, provenance=provenance, may_replace=may_replace
    )


def read_decision(path: Path) -> DecisionFile:
    """The rule in a file, after a full check. Raises MissingInput, DataError as read_posterior."""
    tensors, header = read_tensors(path, kind=KIND)
    try:
        arrays = {name: values.numpy() for name, values in tensors.items()}
        rule = from_arrays(str(header.meta["rule"]), arrays, header.meta["fitted"], len(header.meta["classes"]))
    except (KeyError, TypeError, ValueError) as error:
        message = f"{path} is damaged: {' '.join(str(error).split())[:120]}"
        raise DataError(message, code="damaged", hint="make it again", path=path) from None
    return DecisionFile(rule, header)
