"""Read and write safetensors artifacts: posteriors, decision rules, trained checkpoints.

The single metadata entry of such a file is one canonical JSON document."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.headers import (
    SCHEMA,
    Header,
    check_header,
    check_is_file,
    parse_document,
    parse_json,
    with_digest,
)
from bnncli.decisions.rules import Rule, from_arrays, to_arrays
from bnncli.errors import DAMAGED_HINT, BnnError, DataError
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.system.input_files import reading

if TYPE_CHECKING:
    from torch import Tensor


METADATA_KEY = "bnncli"
MAX_HEADER_BYTES = 100_000_000


def write_posterior(
    target: Path,
    tensors: Mapping[str, Tensor],
    *,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a posterior file and return its content digest.

    Args:
        tensors: everything numeric, any device; stored on the CPU, contiguous.
        meta: type, method, param_layout and the numbers of the fit.
    """
    return write_tensors(target, tensors, kind="posterior", meta=meta, provenance=provenance, may_replace=may_replace)


def write_tensors(
    target: Path,
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a safetensors artifact of any kind and return its content digest; the rest as of write_posterior."""
    from safetensors.torch import save

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    digest = _digest(stored, meta)
    document = {
        "kind": kind,
        "schema": SCHEMA,
        "content_digest": digest,
        "provenance": dict(provenance),
        "meta": dict(meta),
    }
    publish_bytes(
        target, save(stored, metadata={METADATA_KEY: canonical_json(with_digest(document))}), may_replace=may_replace
    )
    return digest


def read_posterior(path: Path) -> tuple[dict[str, Tensor], Header]:
    """Tensors and header of a posterior file, after a full check.

    Raises:
        MissingInput: no such file.
        DataError: truncated, duplicate names, wrong digest, values that are not finite, two priors.
    """
    tensors, header = read_tensors(path, kind="posterior")
    _check_prior(path, tensors, header)
    return tensors, header


def read_tensors(path: Path, *, kind: str) -> tuple[dict[str, Tensor], Header]:
    """Tensors and header of a safetensors artifact of one kind, after a full check of both; raises as read_posterior."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    header = read_posterior_header(path)
    if header.kind != kind:
        raise DataError(f"{path}: expected a {kind}, got {header.kind}", code="wrong_kind", path=path)
    with reading(path):
        content = path.read_bytes()
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())[:120]}", code="damaged", path=path) from None
    if _digest(tensors, header.meta) != header.content_digest:
        raise DataError(
            f"{path}: its content does not match its digest",
            code="digest_mismatch",
            hint=DAMAGED_HINT,
            path=path,
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DataError(f"{path}: {name!r} has values that are not finite", code="not_finite", path=path)
    return tensors, header


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a safetensors artifact, without reading the others or checking the digest. Raises DataError without it."""
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())[:120]}", code="damaged", path=path) from None
    return tensor


def _check_prior(path: Path, tensors: Mapping[str, Tensor], header: Header) -> None:
    """Pass where the header and the tensors say the same prior, or none: commands read the one or the other."""
    from bnncli.parameters.prior import Prior

    try:
        stored = Prior.found_in(tensors)
        stated = Prior.from_meta(header.meta, mean=None if stored is None else stored.mean)
    except (ValueError, RuntimeError) as error:
        raise DataError(f"{path} is damaged: {error}", code="damaged", hint=DAMAGED_HINT, path=path) from None
    if stated != stored and not (stated and stored and stated.is_close(stored)):
        message = f"its header has prior precision {stated or 'none'}, but its tensors have {stored or 'none'}"
        raise DataError(f"{path} is damaged: {message}", code="damaged", hint=DAMAGED_HINT, path=path)


def read_posterior_header(path: Path) -> Header:
    """The header of a posterior file; tensors are not read."""
    document = read_document(path)
    fields = ("kind", "schema", "content_digest", "provenance", "meta")
    return check_header(path, *(document.get(name) for name in fields))


def read_document(path: Path) -> dict[str, Any]:
    """What a safetensors file of ours says of itself, once its sizes are known to add up; tensors are not read.

    Raises:
        MissingInput: no such file.
        DataError: truncated, damaged, or without our metadata.
    """
    check_is_file(path)
    with reading(path), open(path, "rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise DataError(f"{path} is truncated, or not safetensors", code="truncated", hint=DAMAGED_HINT, path=path)
        raw = stream.read(length)
    entries = parse_json(path, raw)
    metadata = entries.get("__metadata__", {}) if isinstance(entries, dict) else {}
    if not isinstance(metadata, dict) or METADATA_KEY not in metadata:
        raise DataError(
            f"{path}: not a bnncli artifact (a safetensors file without a bnncli header)",
            code="wrong_kind",
            path=path,
        )
    text = str(metadata[METADATA_KEY])
    document = parse_document(path, text)
    # Two texts can be the same number in their last digit: what is read must be what was written, byte for byte.
    if '"document_sha256"' in text and canonical_json(with_digest(document)) != text:
        raise DataError(f"{path}: its header does not match its digest", code="bad_header", path=path)
    try:
        ends = [int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"]
    except (TypeError, KeyError, IndexError, ValueError):
        raise DataError(f"{path}: its header is damaged", code="bad_header", path=path) from None
    if 8 + length + max(ends, default=0) != size:
        raise DataError(f"{path} is truncated", code="truncated", hint=DAMAGED_HINT, path=path)
    return document


def _digest(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    import torch  # slow to import, and headers are read without it

    described = torch.frombuffer(bytearray(canonical_json(meta).encode()), dtype=torch.uint8)
    return tensor_digest({**tensors, "//description": described})


def tensor_shapes(path: Path) -> dict[str, str]:
    """Name to type and shape of every tensor, without reading data."""
    with reading(path), open(path, "rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        entries = json.loads(stream.read(length))
    return {
        name: f"{entry['dtype']} {tuple(entry['shape'])}"
        for name, entry in sorted(entries.items())
        if name != "__metadata__"
    }


RULE_KIND = "decision"


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
        tensors, header = read_tensors(self.header.path, kind=RULE_KIND)
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
        target, tensors, kind=RULE_KIND, meta={**meta, "fitted": known}, provenance=provenance, may_replace=may_replace
    )


def read_decision(path: Path) -> DecisionFile:
    """The file of a rule, which is no other. Raises MissingInput, DataError as read_header."""
    header = read_posterior_header(path)
    if header.kind != RULE_KIND:
        raise DataError(f"{path}: expected a {RULE_KIND}, got {header.kind}", code="wrong_kind", path=path)
    return DecisionFile(header)


TRAINED_KIND = "checkpoint"
# The options of train that say which network it is and what is done to its inputs.
PREPROCESSING = ("mean", "std", "resize", "crop")
RECORDED_NETWORK = ("model", "model_arg", *PREPROCESSING)
RAW, AVERAGED = "model.", "model_ema."  # stand before the names where there are both, which --state tells apart


def write_trained(
    target: Path,
    state: Mapping[str, Tensor],
    *,
    averaged: Mapping[str, Tensor] | None,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a trained network's state dict, with the averaged one where it is there, and return its content digest."""
    tensors = dict(state)
    if averaged is not None:
        tensors = {f"{RAW}{name}": value for name, value in state.items()}
        tensors |= {f"{AVERAGED}{name}": value for name, value in averaged.items()}
    return write_tensors(target, tensors, kind=TRAINED_KIND, meta=meta, provenance=provenance, may_replace=may_replace)


def read_trained(path: Path) -> tuple[dict[str, Tensor], Header]:
    """All tensors of such a checkpoint and its header, after a full check; raises as read_posterior."""
    return read_tensors(path, kind=TRAINED_KIND)


def trained_header(path: Path) -> Header | None:
    """What a checkpoint says of its training; None for one that train did not write, or nothing that can be read."""
    try:
        with open(path, "rb") as stream:
            is_safetensors = stream.read(9)[8:] == b"{"
        header = read_posterior_header(path) if is_safetensors else None
    except (BnnError, OSError):  # whoever reads the weights says what is wrong with it
        return None
    return header if header is not None and header.kind == TRAINED_KIND else None


def gradient_passes(path: Path) -> int | None:
    """How often training went over its data with gradients, to the end of which the checkpoint is; None where it does not say."""
    header = trained_header(path)
    return None if header is None else header.meta.get("gradient_passes")
