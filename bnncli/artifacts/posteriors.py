"""Read and write safetensors artifacts: posteriors, decision rules, trained checkpoints.

The only metadata entry of such a file is one canonical JSON document.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.headers import SCHEMA, Header, add_digest, check_header, check_is_file, parse_document, parse_json
from bnncli.errors import DAMAGED_HINT, BnnError, DataError
from bnncli.evaluation.decisions import Rule, from_arrays, to_arrays
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.system.input_files import convert_read_errors

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
        tensors: all numeric content, on any device; stored contiguous from the CPU.
        meta: type, method, param_layout and numbers of the fit.
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
    """Publish a safetensors artifact of any kind and return its content digest; otherwise as write_posterior."""
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
        target, save(stored, metadata={METADATA_KEY: canonical_json(add_digest(document))}), may_replace=may_replace
    )
    return digest


def read_posterior(path: Path) -> tuple[dict[str, Tensor], Header]:
    """Read tensors and header of a posterior file, after a full check.

    Raises:
        MissingInput: there is no such file.
        DataError: the file is truncated, has duplicate names, a wrong digest, non-finite values, or two priors.
    """
    tensors, header = read_tensors(path, kind="posterior")
    _check_prior(path, tensors, header)
    return tensors, header


def read_tensors(path: Path, *, kind: str) -> tuple[dict[str, Tensor], Header]:
    """Read tensors and header of a safetensors artifact of one kind, after a full check; raises as read_posterior does."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    header = read_posterior_header(path)
    if header.kind != kind:
        raise DataError(f"{path}: expected a {kind}, got {header.kind}", code="wrong_kind", path=path)
    with convert_read_errors(path):
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
    """Read one tensor of a safetensors artifact, without checking the digest. Raises DataError if it is missing."""
    from safetensors import SafetensorError, safe_open

    try:
        with convert_read_errors(path), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())[:120]}", code="damaged", path=path) from None
    return tensor


def _check_prior(path: Path, tensors: Mapping[str, Tensor], header: Header) -> None:
    """Check that header and tensors have the same prior, or none, since commands read either."""
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
    """Read the header of a posterior file, but no tensors."""
    document = read_document(path)
    fields = ("kind", "schema", "content_digest", "provenance", "meta")
    return check_header(path, *(document.get(name) for name in fields))


def read_document(path: Path) -> dict[str, Any]:
    """Read the document of a safetensors artifact after checking its sizes, but no tensors.

    Raises:
        MissingInput: there is no such file.
        DataError: it is truncated, damaged, or without our metadata.
    """
    check_is_file(path)
    with convert_read_errors(path), open(path, "rb") as stream:
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
    # Two texts can encode the same number: the text must be byte for byte as written.
    if '"document_sha256"' in text and canonical_json(add_digest(document)) != text:
        raise DataError(f"{path}: its header does not match its digest", code="bad_header", path=path)
    try:
        ends = [int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"]
    except (TypeError, KeyError, IndexError, ValueError):
        raise DataError(f"{path}: its header is damaged", code="bad_header", path=path) from None
    if 8 + length + max(ends, default=0) != size:
        raise DataError(f"{path} is truncated", code="truncated", hint=DAMAGED_HINT, path=path)
    return document


def _digest(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    import torch  # slow import; headers are read without it

    described = torch.frombuffer(bytearray(canonical_json(meta).encode()), dtype=torch.uint8)
    return tensor_digest({**tensors, "//description": described})


def tensor_shapes(path: Path) -> dict[str, str]:
    """Return type and shape of every tensor by name, without reading data."""
    with convert_read_errors(path), open(path, "rb") as stream:
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
    """The file of a decision rule; the rule is read and checked on first use."""

    header: Header

    @property
    def name(self) -> str:
        """Name of the rule, from its file."""
        return self.header.path.stem

    @property
    def kind(self) -> str:
        """Kind of the rule: sets, risk, ood or shift."""
        return str(self.header.meta["rule"])

    @cached_property
    def rule(self) -> Rule:
        """The rule. Raises MissingInput or DataError as read_posterior does."""
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
    """Publish a rule and return its content digest; meta has rule (the kind), classes, settings and numbers of the fit."""
    import torch

    arrays, known = to_arrays(rule)
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return write_tensors(
        target, tensors, kind=RULE_KIND, meta={**meta, "fitted": known}, provenance=provenance, may_replace=may_replace
    )


def read_decision(path: Path) -> DecisionFile:
    """Open the file of a decision rule. Raises MissingInput or DataError as read_header does."""
    header = read_posterior_header(path)
    if header.kind != RULE_KIND:
        raise DataError(f"{path}: expected a {RULE_KIND}, got {header.kind}", code="wrong_kind", path=path)
    return DecisionFile(header)


TRAINED_KIND = "checkpoint"
# The options of train that define the network and its preprocessing.
PREPROCESSING = ("mean", "std", "resize", "crop")
RECORDED_NETWORK = ("model", "model_arg", *PREPROCESSING)
RAW, AVERAGED = "model.", "model_ema."  # prefixes of names if both exist, distinguished by --state


def write_trained(
    target: Path,
    state: Mapping[str, Tensor],
    *,
    averaged: Mapping[str, Tensor] | None,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a trained network's state dict, and the averaged one if given, and return its content digest."""
    tensors = dict(state)
    if averaged is not None:
        tensors = {f"{RAW}{name}": value for name, value in state.items()}
        tensors |= {f"{AVERAGED}{name}": value for name, value in averaged.items()}
    return write_tensors(target, tensors, kind=TRAINED_KIND, meta=meta, provenance=provenance, may_replace=may_replace)


def read_trained(path: Path) -> tuple[dict[str, Tensor], Header]:
    """Read all tensors and the header of a trained checkpoint, after a full check; raises as read_posterior does."""
    return read_tensors(path, kind=TRAINED_KIND)


def read_trained_header(path: Path) -> Header | None:
    """Return the header of a trained checkpoint; None if train did not write it, or it is unreadable."""
    try:
        with open(path, "rb") as stream:
            is_safetensors = stream.read(9)[8:] == b"{"
        header = read_posterior_header(path) if is_safetensors else None
    except (BnnError, OSError):  # reading the weights reports what is wrong
        return None
    return header if header is not None and header.kind == TRAINED_KIND else None


def gradient_passes(path: Path) -> int | None:
    """Return the gradient passes over the data up to this checkpoint; None if not recorded."""
    header = read_trained_header(path)
    return None if header is None else header.meta.get("gradient_passes")
