"""What provenance says of the checkpoint that features are made with; PyTorch is not imported to say it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnncli.errors import BnnError
from bnncli.machine.input_files import open_regular
from bnncli.numerics.digests import file_sha256
from bnncli.run.revisions import is_another
from bnncli.run.session import Run
from bnncli.storage.artifacts import read_header

if TYPE_CHECKING:
    from bnncli.checkpoints.load import Checkpoint

_READ = ("file_sha256", "weights_digest", "format", "selected_key", "stripped_prefixes", "size")


def record_of(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """The record of the run's checkpoint, once it was read."""
    read = {name: getattr(checkpoint, name) for name in _READ}
    return {"path": run.checkpoint_path.name, **read, "stripped_prefixes": list(checkpoint.stripped_prefixes)}


def recorded_checkpoint(run: Run) -> dict[str, Any] | None:
    """The record of the run's checkpoint by features that were made with a file of the same bytes; None without any.

    Features that came with warnings do not count: some may be about the checkpoint, and are to be said again.

    Raises:
        MissingInput, DeviceError, ReadError: the checkpoint cannot be read, as open_regular says.
    """
    with open_regular(run.checkpoint_path) as stream:
        records = _records(run)
        digest = file_sha256(stream, run.console) if records else None
    return next((record for record in records if record["file_sha256"] == digest), None)


def _records(run: Run) -> list[dict[str, Any]]:
    """The records in the run's features that say all that reading the checkpoint again would."""
    found = []
    for name in run.folder.splits():
        try:
            header = read_header(run.folder.features(name))
            is_of_use = header.kind == "features" and header.provenance.get("warnings") == [] and not is_another(header)
        except BnnError:  # said where that split is asked for
            continue
        record = header.provenance.get("checkpoint")
        if is_of_use and record and {*_READ} <= record.keys():
            found.append({"path": run.checkpoint_path.name} | {name: record[name] for name in _READ})
    return found
