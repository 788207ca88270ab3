"""Decide what to do at an output path (compute, skip, replace or refuse), and whether an artifact is stale."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bnncli.artifacts.atomic import publish_bytes, write_error
from bnncli.artifacts.exports import EXPORT_MAGIC
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, parse_json
from bnncli.artifacts.provenance import Source, params_hash
from bnncli.errors import NOT_OF_CONTENT, BnnError, DataError, MissingInput, OutputExists, UsageError
from bnncli.names import printable
from bnncli.numerics.digests import canonical_json, file_sha256, json_sha256
from bnncli.system.input_files import read_error

# Parameters shared by all splits.
SHARED_PARAMS = (
    "model", "model_arg", "last_layer", "output", "base_model", "feature_node", "state", "transform", "mean", "std",
    "resize", "crop", "no_exif", "background", "autocast", "classes", "task",
)  # fmt: skip


def differing_names(theirs: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters in which a split differs from those shared by all splits of a run."""
    return [name for name in shared if theirs.get(name) != shared[name]]


def partial_replacement(header: Header) -> Header | None:
    """Return the header of a split that a command recomputed without completing this one; None if there is none."""
    wanted = companion_requests(header)
    for name, digest in wanted.items():
        found = _read(header, name)
        if found is not None and own_digest(found) == digest:
            return found
    return None


def find_mismatched_split(header: Header) -> tuple[Header, str] | None:
    """Return the newest other split of the run that does not match this one, and why.

    Splits of another checkpoint are stale for that reason; imported features (--from-npz) have no such parameters.
    """
    params = header.provenance["params"]
    if "model" not in params:
        return None
    shared, found = {name: params.get(name) for name in SHARED_PARAMS}, []
    for path in sorted(header.path.parent.glob("[!.]*.h5")):
        other = _read(header, path.stem)
        if other is None or other.kind != "features" or other.weights_digest != header.weights_digest:
            continue
        theirs = other.provenance["params"]
        if "model" in theirs and differing_names(theirs, shared):
            found.append(other)
    if not found:
        return None
    newest = max(found, key=lambda other: str(other.provenance.get("created_at")))
    name = differing_names(newest.provenance["params"], shared)[0]
    there, here = (_format_value(one.provenance["params"].get(name)) for one in (newest, header))
    return (
        newest,
        f"split {newest.path.stem!r} used \0{name}\0 {there}, split {header.path.stem!r} used {here}",
    )


def _format_value(value: Any) -> str:
    return "none" if value in (None, [], "") else str(value)


def _read(header: Header, name: str) -> Header | None:
    """Return the header of another split of the run; None if none is usable."""
    path = header.path.with_name(f"{name}.h5")
    if "/" in name or path.name == header.path.name:
        return None
    try:
        return read_header(path)
    except NOT_OF_CONTENT:
        raise
    except BnnError:  # reported when that split is used
        return None


SCHEMA = "bnncli.newer-request/1"
UNFINISHED = "it did not finish"
_MAX_REASON = 500


def note_path(target: Path) -> Path:
    """Return the path of the note about an artifact."""
    return target.with_name(f".{target.name}.newer-request.json")


def request_digest(params: Mapping[str, Any], sources: Iterable[Source]) -> str:
    """Return a digest of a request: its parameters and the content of its inputs."""
    return _digest(params_hash(params), {source.role: source.content_digest for source in sources})


def write_note(target: Path, *, reason: str, request: str | None, together: Mapping[str, str] | None = None) -> None:
    """Note that a newer request for an artifact has not completed.

    Args:
        reason: why not, in words.
        request: its request_digest; None if unknown.
        together: request_digest by stem of every artifact published together with this one.

    Raises:
        OutputExists, WriteError: as in publish.
    """
    document: dict[str, Any] = {"schema": SCHEMA, "reason": printable(reason)[:_MAX_REASON], "request": request}
    document |= {} if together is None else {"together": dict(together)}
    publish_bytes(note_path(target), canonical_json(document).encode() + b"\n", may_replace=True, poll=False)


def remove_note(target: Path) -> None:
    """Remove the note: the artifact is the last one requested. Raises WriteError on failure."""
    try:
        note_path(target).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, note_path(target)) from None


def newer_request(header: Header) -> str | None:
    """Return why an artifact is not the last one requested; None if it is, as far as known."""
    note = _read_note(header)
    if note is None or note.get("request") == own_digest(header):
        return None
    what = "other data" if "together" not in note else "other splits"
    return f"the last extract-features, for {what}, failed ({note.get('reason', UNFINISHED)})"


def companion_requests(header: Header) -> dict[str, str]:
    """Return the artifacts to be published with the one in the note: request digests by stem; empty without a note."""
    note = _read_note(header)
    together = {} if note is None or note.get("request") == own_digest(header) else note.get("together")
    pairs = together.items() if isinstance(together, dict) else ()
    return {stem: digest for stem, digest in pairs if isinstance(stem, str) and isinstance(digest, str)}


def own_digest(header: Header) -> str:
    """Return the request_digest of the request that created an artifact."""
    return _digest(header.provenance["params_hash"], {one["role"]: one["content_digest"] for one in header.inputs})


def _read_note(header: Header) -> dict[str, Any] | None:
    """Read the note about an artifact; None without one, empty if it is invalid."""
    path = note_path(header.path)
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise read_error(error, path) from None
    try:
        note = parse_json(path, text)
    except BnnError as error:
        note = {"reason": error.message}
    return note if isinstance(note, dict) else {}


def _digest(params: str, inputs: Mapping[str, str]) -> str:
    return json_sha256([params, dict(inputs)])


REPLACE = "add \0force\0 to replace it"  # how a hint begins on a file that the command may replace
_KEEP_BOTH = {
    "features": ", or \0run_dir\0 DIR to keep both",
    "metrics": "",
    "checkpoint": ", or give another CKPT to keep both",
}  # they have no --name
_ANOTHER_REVISION = "made by another revision of the algorithm"
_MARKS = (
    (0, b"\x89HDF\r\n\x1a\n", b"bnncli_"),
    (8, b"{", b'"bnncli"'),
    (0, b"{", b'"bnncli.'),
    *((0, magic, b'"bnncli.provenance/') for magic in EXPORT_MAGIC),
)
_MARK_WINDOW = 1 << 20


@dataclass(frozen=True)
class Decision:
    """Action to take: compute, skip or replace; `why` is for people, `header` is of the existing file."""

    action: str
    why: str = ""
    header: Header | None = None


def decide(
    target: Path,
    *,
    kind: str,
    params: Mapping[str, Any],
    algo_rev: int,
    sources: Sequence[Source],
    weights_digest: str | None,
    force: bool,
    why_anew: Callable[[Mapping[str, Any]], str | None] = lambda recorded: None,
    another: str = "\0name\0 NAME",
) -> Decision:
    """Decide what a request means for the file at `target`.

    Args:
        why_anew: returns why a file with these other parameters is recomputed, for people; None if it is not.
        another: option that selects another output.

    Raises:
        UsageError: the target is one of the inputs.
        OutputExists: the existing file has other parameters, is not bnncli's, or is not readable.
    """
    for source in sources:
        if is_same_file(target, source.path):
            raise UsageError(f"the output {target} is also an input; choose another file with \0name\0 or \0out\0")
    if not target.exists() and not target.is_symlink():
        return Decision("compute")
    header = _header_or_refuse(target, kind, force)
    if header is None or force:
        return Decision("replace", "\0force\0", header)
    recorded = _upgrade_params(header)
    if params_hash(_select_user_params(recorded)) != params_hash(_select_user_params(params)):
        why = why_anew(_select_user_params(recorded))
        if why is not None:
            return Decision("replace", why, header)
        different = differences(recorded, params)
        raise OutputExists(
            f"{target} already exists with other options ({different})",
            path=target,
            hint=REPLACE + _KEEP_BOTH.get(kind, f", or {another} to keep both"),
        )
    changes = _changes(header, algo_rev, sources, weights_digest)
    if recorded.get("transform") != params.get("transform"):
        changes.append("the model's preprocessing has changed")
    return Decision("replace", "; ".join(changes), header) if changes else Decision("skip", "up to date", header)


def is_same_file(one: Path, other: Path) -> bool:
    """Return whether both paths exist and are the same file, through any path or link."""
    return one.exists() and other.exists() and os.path.samefile(one, other)


def _header_or_refuse(target: Path, kind: str, force: bool) -> Header | None:
    """Return the header of the existing file; None for a damaged artifact that --force may replace."""
    try:
        header = read_header(target)
    except NOT_OF_CONTENT:
        raise
    except BnnError as error:
        if force and carries_our_mark(target):
            return None
        hint = REPLACE if carries_our_mark(target) else f"move it away, or {_advise_other_place(kind)}"
        raise OutputExists(
            f"{target} already exists and cannot be used: {error.message}", hint=hint, path=target
        ) from None
    if header.kind != kind:
        raise OutputExists(
            f"{target} already exists and is of kind {header.kind}, expected {kind}",
            hint=_advise_other_place(kind),
            path=target,
        )
    return header


def _advise_other_place(kind: str) -> str:
    """Return how to write an artifact of a kind to another place."""
    places = {"checkpoint": "give another CKPT", "features": "use \0run_dir\0", "metrics": "use \0run_dir\0"}
    return places.get(kind, "use \0name\0 or \0out\0")


def carries_our_mark(target: Path) -> bool:
    """Return whether a file is bnncli's, damaged or not, or an empty leftover; foreign files are never replaced."""
    if not target.is_file() or target.is_symlink():
        return False
    size = target.stat().st_size
    with open(target, "rb") as stream:
        head = stream.read(_MARK_WINDOW)
        stream.seek(max(0, size - _MARK_WINDOW))
        tail = stream.read()
    return size == 0 or any(
        head.startswith(magic, offset) and (mark in head or mark in tail) for offset, magic, mark in _MARKS
    )


def _upgrade_params(header: Header) -> Mapping[str, Any]:
    """Return the parameters of an artifact as they would be recorded today.

    Feature files once recorded the number of rows, a property of the data; requested rows (@N) are part of the source.
    Draws of hmc had only float32 gradients at first.
    """
    params = dict(header.provenance["params"])
    if header.kind == "features" and params.pop("num_examples", None) is not None:
        asked = re.search(r"@(\d+)$", str(header.provenance.get("source")))
        params |= {"first_rows": int(asked[1])} if asked else {}
    if header.meta.get("method") == "hmc":
        params.setdefault("gradients", "float32")
    return params


def _select_user_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters chosen by the user; a model's preprocessing changes with its files."""
    return {name: value for name, value in params.items() if name != "transform"}


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, labels: tuple[str, str] = ("existing", "requested")
) -> str:
    """Return the options that differ with both values, such as `mean: existing=none, requested='0.1918'`."""
    first, second = labels
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    found = (f"{name}: {first}={_format_option(old, name)}, {second}={_format_option(new, name)}" for name in names)
    return "; ".join(found) or "other options"


def _format_option(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_format_option(value, key)}" for key in value)
    return "none" if value in (None, [], "") else str(value) if not isinstance(value, str) else repr(value)


def _changes(header: Header, algo_rev: int, sources: Sequence[Source], weights_digest: str | None) -> list[str]:
    changes = []
    if header.provenance.get("algo_rev") != algo_rev:
        changes.append(_ANOTHER_REVISION)
    if header.weights_digest != weights_digest:
        changes.append("the checkpoint has changed")
    then = {entry["role"]: entry["content_digest"] for entry in header.inputs}
    now = {source.role: source.content_digest for source in sources}
    changes += [f"{role} has changed" for role in sorted({*then, *now}) if then.get(role) != now.get(role)]
    return changes


@dataclass(frozen=True)
class Stale:
    """Reason why an artifact is stale.

    Attributes:
        maker: an artifact whose command, with --force, recomputes the splits of the run; None for the artifact's own.
    """

    why: str
    maker: Header | None = None


# Known facts about files: (real path, weights digest) -> (content digest, whether and why it is stale).
Followed = dict[tuple[Path, str | None], tuple[str | None, Stale | None]]


def staleness(
    header: Header,
    *,
    is_another: Callable[[Header], bool],
    weights_digest: str | None = None,
    followed: Followed | None = None,
) -> Stale | None:
    """Return why an artifact is stale, or None if it is fresh; follows its inputs recursively.

    Args:
        is_another: whether an artifact was created by another revision of its algorithm.
        weights_digest: of the current checkpoint; None to skip the comparison.
        followed: cache of known inputs, which is extended; artifacts of a run share most inputs.

    Raises:
        MissingInput: an input exists but cannot be read.
    """
    followed = {} if followed is None else followed
    if weights_digest is not None and header.weights_digest not in (None, weights_digest):
        return Stale("the checkpoint has changed")
    alone = _staleness_of_features(header) if header.kind == "features" else None
    if alone is not None:
        return alone
    for entry in header.inputs:
        path = header.input_path(entry)
        if not entry.get("is_artifact", True):
            if _is_edited_network(header, entry["role"], path, entry["content_digest"]):
                return Stale(f"model ({path.name}) has changed")
            continue
        if not path.is_file():
            return Stale(f"{entry['role']} ({path.name}) is missing")
        key = path.resolve(), weights_digest
        if key not in followed:
            try:
                current = read_header(path)
                why = staleness(current, is_another=is_another, weights_digest=weights_digest, followed=followed)
            except (*NOT_OF_CONTENT, MissingInput):
                raise
            except BnnError as error:
                return Stale(f"{entry['role']}: {error.message}")
            followed[key] = (current.content_digest, why)
        digest, deeper = followed[key]
        if digest != entry["content_digest"]:
            return Stale(f"{entry['role']} ({path.name}) has changed")
        if deeper is not None:
            return Stale(f"{entry['role']} ({path.name}) is stale: {deeper.why}", deeper.maker)
    return Stale(_ANOTHER_REVISION) if is_another(header) else None


def _is_edited_network(header: Header, role: str, path: Path, digest: str) -> bool:
    """Return whether an input of a posterior over other layers is its network's file, and has changed.

    A missing file is reported when it is needed. Features and their derivatives remain valid.
    """
    is_its_network = role == "model" and header.meta.get("layers") is not None
    return is_its_network and path.is_file() and f"sha256:{file_sha256(path)}" != digest


def _staleness_of_features(header: Header) -> Stale | None:
    """Return why features are stale themselves: newer ones were requested, or the run's splits do not match."""
    newer = newer_request(header)
    if newer is not None:
        return Stale(newer, partial_replacement(header))
    mixed = find_mismatched_split(header)
    if mixed is None:
        return None
    other, why = mixed
    newest = max(header, other, key=lambda one: str(one.provenance.get("created_at")))
    return Stale(f"the splits of the run are inconsistent: {why}", newest)


class Remake(Protocol):
    """Returns the command that created an artifact, to paste; None if unknown."""

    def __call__(self, header: Header, /, *, force: bool = False) -> str | None:
        """Return the command; `force` replaces existing files."""


def refresh_command(header: Header, stale: Stale, remake: Remake) -> str | None:
    """Return the command that refreshes a stale artifact or the splits it depends on; None if unknown."""
    return remake(header) if stale.maker is None else remake(stale.maker, force=True)


UNKNOWN_MAKER = "run the command that created it again; its header records no bnncli command"


def check_fresh(
    header: Header,
    *,
    is_another: Callable[[Header], bool],
    weights_digest: str | None,
    remake: Remake,
    followed: Followed | None = None,
) -> None:
    """Raise DataError if the artifact is stale, with the command that recreates it.

    Args:
        is_another, weights_digest, followed: as in staleness.
        remake: returns that command.
    """
    stale = staleness(header, is_another=is_another, weights_digest=weights_digest, followed=followed)
    if stale is not None:
        raise DataError(
            f"{header.path} is stale: {stale.why}",
            code="stale_input",
            hint=refresh_command(header, stale, remake) or UNKNOWN_MAKER,
            path=header.path,
        )
