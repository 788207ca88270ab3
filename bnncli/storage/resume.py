"""Resume states: what an unfinished run needs to go on, as one safetensors file beside the artifact it would have made.

A state says what it belongs to: the parameters' hash, the seed, the digests of the inputs. It continues exactly that
run or none. Draws and features that are too many to be written again with every state lie in a raw file of their own beside it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import BnnError, DataError
from bnncli.machine.input_files import reading
from bnncli.machine.team import is_leader
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.storage.atomic import publish_bytes, published_at_once
from bnncli.storage.headers import SCHEMA, with_digest
from bnncli.storage.posteriors import METADATA_KEY, read_document
from bnncli.storage.provenance import Source, params_hash

if TYPE_CHECKING:
    from torch import Tensor

KIND = "resume"
_STATE, _DRAWS, _ROWS = ".resume.safetensors", ".resume.draws", ".resume.rows"


def state_path(artifact: Path) -> Path:
    """.<name>.resume.safetensors beside the artifact."""
    return artifact.with_name(f".{artifact.stem}{_STATE}")


def draws_path(artifact: Path) -> Path:
    """.<name>.resume.draws beside the artifact: raw draws, as long as they are not an artifact."""
    return artifact.with_name(f".{artifact.stem}{_DRAWS}")


def rows_path(artifact: Path) -> Path:
    """.<name>.resume.rows beside the artifact: raw features, as long as they are not an artifact."""
    return artifact.with_name(f".{artifact.stem}{_ROWS}")


def leftovers(folder: Path) -> list[Path]:
    """Every resume state and file of raw draws or features under a folder, sorted."""
    return sorted(path for suffix in (_STATE, _DRAWS, _ROWS) for path in folder.rglob(f".*{suffix}") if path.is_file())


def artifact_stem(leftover: Path) -> str:
    """The name of the artifact that a path of `leftovers` belongs to."""
    name = leftover.name.removeprefix(".")
    return name.removesuffix(_STATE).removesuffix(_DRAWS).removesuffix(_ROWS)


def identity_of(
    params: Mapping[str, Any],
    *,
    algo_rev: int,
    seed: int,
    sources: Sequence[Source],
    weights_digest: str | None,
) -> dict[str, Any]:
    """What a state belongs to: equal for two runs exactly when one may continue the other."""
    return {
        "params_hash": params_hash(params),
        "algo_rev": algo_rev,
        "seed": seed,
        "inputs": {source.role: source.content_digest for source in sources},
        "weights_digest": weights_digest,
    }


def write_state(path: Path, tensors: Mapping[str, Tensor], identity: Mapping[str, Any]) -> None:
    """Replace the state at `path`; a kill leaves the old one or the new one. A signal that has come does not stop it.

    Args:
        tensors: everything the run needs, any device; counters and random states as tensors too.
        identity: from identity_of.

    Raises:
        OutputExists, WriteError: as publish does.
    """
    from safetensors.torch import save

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    document = {
        "kind": KIND,
        "schema": SCHEMA,
        "content_digest": tensor_digest(stored),
        "identity": dict(identity),
    }
    metadata = {METADATA_KEY: canonical_json(with_digest(document))}
    with published_at_once():  # it is no part of what the command is to make
        publish_bytes(path, save(stored, metadata=metadata), may_replace=True, poll=False)


def read_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The tensors of the state at `path`; None where there is none.

    Raises:
        DataError: it is damaged, or belongs to another request; the message says what differs, the hint how to discard it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not path.exists():
        return None
    with reading(path):
        content = path.read_bytes()
    try:
        document = read_document(path)
        tensors = load(content)
    except (DataError, SafetensorError, ValueError, KeyError) as error:
        raise unusable(path, " ".join(str(error).removeprefix(str(path)).strip(": ").split())[:120]) from None
    if document.get("kind") != KIND or document.get("schema") != SCHEMA:
        raise unusable(path, "it is not a resume state of this version")
    if tensor_digest(tensors) != document.get("content_digest"):
        raise unusable(path, "its content does not match its digest")
    differing = _differences(document.get("identity"), dict(identity))
    if differing:
        raise unusable(path, f"it was saved with {differing}", code="resume_mismatch")
    return tensors


def recorded_choice(path: Path, name: str) -> Any:
    """What the state at `path` says of a choice that its run made, by name; None where it says nothing, or cannot be read."""
    try:
        identity = read_document(path)["identity"]
        return identity.get(name)
    except (BnnError, AttributeError, KeyError):
        return None  # what is wrong with it is told by read_state


def remove_state(path: Path) -> None:
    """Remove a state (or raw draws or features); nothing when there is none, or it is another worker's to remove."""
    if not is_leader():
        return
    with contextlib.suppress(OSError):
        path.unlink()


def unusable(path: Path, why: str, *, code: str = "damaged") -> DataError:
    """The error for a state that cannot be continued."""
    hint = f"start over without \0resume\0; to discard the state: rm {shlex.quote(str(path))}"
    return DataError(f"cannot resume from {path}: {why}", hint=hint, code=code, path=path)


class SaveClock:
    """Tells when the next state is due: `every` seconds after the last one, at once for 0."""

    def __init__(self, every: float) -> None:
        self.every = every
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """True when a state should be saved now; the caller saves it, and the clock starts again."""
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True


_WORDS = {
    "params_hash": "other options",
    "algo_rev": "another revision of the algorithm",
    "seed": "another seed",
    "weights_digest": "another checkpoint",
    "groups": "networks grouped into different batches (with workers or \0shards\0 they are separate; otherwise they form "
    "one batch)",
}


def _differences(there: Any, asked: Mapping[str, Any]) -> str:
    """What differs between two identities, in words; empty when nothing does."""
    if not isinstance(there, dict):
        return "no identity"
    keys = [key for key in {**asked, **there} if key != "inputs"]
    words = [_WORDS.get(key, f"another {key}") for key in keys if there.get(key) != asked.get(key)]
    old, new = there.get("inputs"), asked.get("inputs", {})
    old = old if isinstance(old, dict) else {}
    words += [f"another {role}" for role in sorted({*old, *new}) if old.get(role) != new.get(role)]
    return ", ".join(words) or ("another identity" if there != asked else "")
