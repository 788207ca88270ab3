"""Which feature files of a run belong together: those of one checkpoint, made by one network with one preprocessing.

Each says in its parameters what it was made with, so that splits may be added at any time. A command that replaces several
is killed between two names at the worst: what it leaves is told by what the files say, and by the notes beside those that
it had not come to (see newer_request).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.errors import NOT_OF_CONTENT, BnnError
from bnncli.storage.artifacts import read_header
from bnncli.storage.headers import Header
from bnncli.storage.newer_request import own_digest, published_meanwhile

# Parameters that all splits share.
SHARED_PARAMS = (
    "model", "model_arg", "last_layer", "output", "base_model", "feature_node", "state", "transform", "mean", "std",
    "resize", "crop", "no_exif", "background", "autocast", "classes", "task",
)  # fmt: skip


def differences(theirs: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
    """The names of the parameters in which a split's differ from what all splits of a run share."""
    return [name for name in shared if theirs.get(name) != shared[name]]


def replaced_in_part(header: Header) -> Header | None:
    """The header of a split that a command has made anew which was to make this one too, and has not; None without one."""
    wanted = published_meanwhile(header)
    for name, digest in wanted.items():
        found = _read(header, name)
        if found is not None and own_digest(found) == digest:
            return found
    return None


def of_another_recipe(header: Header) -> tuple[Header, str] | None:
    """Another split of the run that does not belong with this one, the newest if there are several; and why not, in words.

    Splits of another checkpoint are stale for that reason, and ready features (--from-npz) have no such parameters.
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
        if "model" in theirs and differences(theirs, shared):
            found.append(other)
    if not found:
        return None
    newest = max(found, key=lambda other: str(other.provenance.get("created_at")))
    name = differences(newest.provenance["params"], shared)[0]
    there, here = (_said(one.provenance["params"].get(name)) for one in (newest, header))
    return (
        newest,
        f"split {newest.path.stem!r} used \0{name}\0 {there}, split {header.path.stem!r} used {here}",
    )


def _said(value: Any) -> str:
    return "none" if value in (None, [], "") else str(value)


def _read(header: Header, name: str) -> Header | None:
    """The header of another split of the same run; None where there is none that can be used."""
    path = header.path.with_name(f"{name}.h5")
    if "/" in name or path.name == header.path.name:
        return None
    try:
        return read_header(path)
    except NOT_OF_CONTENT:
        raise
    except BnnError:  # said where that split is asked for
        return None
