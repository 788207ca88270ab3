"""Decision files: a rule that calibrate fitted, with the predictions it was fitted on; safetensors like posteriors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bnncli.decisions.rules import Rule, from_arrays, to_arrays
from bnncli.errors import DAMAGED_HINT, DataError
from bnncli.storage.headers import Header
from bnncli.storage.posteriors import read_posterior_header, read_tensors, write_tensors

KIND = "decision"


@dataclass(frozen=True)
class DecisionFile:
    """What a file says of a rule, and the rule, which is read and checked when it is first looked at."""

    header: Header

    @property
    def name(self) -> str:
        """Of the rule: that of its file."""
        return self.header.path.stem

    @property
    def kind(self) -> str:
        """Of the rule: sets, risk, ood or shift."""
        return str(self.header.meta["rule"])

    @cached_property
    def rule(self) -> Rule:
        """Raises MissingInput, DataError as read_posterior."""
        tensors, header = read_tensors(self.header.path, kind=KIND)
        try:
            arrays = {name: values.numpy() for name, values in tensors.items()}
            return from_arrays(self.kind, arrays, header.meta["fitted"], len(header.meta["classes"]))
        except (KeyError, TypeError, ValueError) as error:
            message = f"{header.path} is damaged: {' '.join(str(error).split())[:120]}"
            raise DataError(message, code="damaged", hint=DAMAGED_HINT, path=header.path) from None


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
    """The file of a rule, which is no other. Raises MissingInput, DataError as read_header."""
    header = read_posterior_header(path)
    if header.kind != KIND:
        raise DataError(f"{path}: expected a {KIND}, got {header.kind}", code="wrong_kind", path=path)
    return DecisionFile(header)
