"""What provenance says of the checkpoint that features are made with; PyTorch is not imported to say it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnncli.artifacts.files import read_header
from bnncli.errors import BnnError
from bnncli.models.sharded import checkpoint_sha256
from bnncli.run.model_files import ModelFiles
from bnncli.run.revisions import is_another
from bnncli.run.session import Run
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from bnncli.models.checkpoints import Checkpoint

_READ = ("file_sha256", "weights_digest", "format", "selected_key", "stripped_prefixes", "size")


def record_of(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """The record of the run's checkpoint, once it was read."""
    read = {name: getattr(checkpoint, name) for name in _READ}
    return {"path": run.checkpoint_path.name, **read, "stripped_prefixes": list(checkpoint.stripped_prefixes)}


def record_of_files(run: Run, files: ModelFiles, *, kind: str, file_sha256: str, weights_digest: str) -> dict[str, Any]:
    """The record of a model with weights of its own, once it was built.

    Args:
        kind: of the model, hf or another.
        file_sha256: of its files, before they were read.
        weights_digest: of the built network's state dict and that.
    """
    digests = {"file_sha256": file_sha256, "weights_digest": weights_digest}
    read: dict[str, Any] = {"format": kind, "selected_key": None, "stripped_prefixes": [], "size": files.size}
    return {**files.to_json(run.folder.root), **digests, **read}


def recorded_checkpoint(run: Run, files: ModelFiles | None, *, state: str | None) -> dict[str, Any] | None:
    """The record of the run's checkpoint by features that were made with a file of the same bytes; None without any.

    Features that came with warnings do not count: some may be about the checkpoint, and are to be said again.

    Args:
        files: of a model with weights of its own, which are the checkpoint then.
        state: which of the checkpoint's weights the features are of.

    Raises:
        MissingInput, DeviceError, ReadError: the checkpoint cannot be read, as open_regular says.
    """
    if files is not None:
        records = _records(run, files.to_json(run.folder.root), state)
        digest = files.sha256(run.console) if records else None
    else:
        if not run.checkpoint_path.is_dir():
            with open_regular(run.checkpoint_path):
                pass
        records = _records(run, {"path": run.checkpoint_path.name}, state)
        digest = checkpoint_sha256(run.checkpoint_path, run.console) if records else None
    return next((record for record in records if record["file_sha256"] == digest), None)


def _records(run: Run, place: dict[str, Any], state: str | None) -> list[dict[str, Any]]:
    """The records in the run's features that say all that reading the checkpoint again would, with its place as it is now."""
    found = []
    for name in run.folder.splits():
        try:
            header = read_header(run.folder.features(name))
            is_of_use = header.kind == "features" and header.provenance.get("warnings") == [] and not is_another(header)
        except BnnError:  # said where that split is asked for
            continue
        record = header.provenance.get("checkpoint")
        is_of_use = is_of_use and header.provenance["params"].get("state") == state
        if is_of_use and record and {*_READ} <= record.keys() and ("files" in record) == ("files" in place):
            found.append(place | {name: record[name] for name in _READ})
    return found
