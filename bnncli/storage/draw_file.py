"""Raw draws of an unfinished run: records (C, P) in float32, one a transition (see record_file)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.storage.record_file import BUFFER_BYTES, RecordFile
from bnncli.storage.resume import draws_path

if TYPE_CHECKING:
    from torch import Tensor


class DrawFile(RecordFile):
    """The draws of the run that will make `artifact`.

    Args:
        artifact: what the draws are for; they lie beside it.
        num_chains, num_params: C and P of a record.
        buffer_bytes: as of RecordFile.
    """

    def __init__(self, artifact: Path, *, num_chains: int, num_params: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        shape = (num_chains, num_params)
        path = draws_path(artifact)
        super().__init__(path, artifact, shape=shape, dtype=torch.float32, what="draws", buffer_bytes=buffer_bytes)

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of every chain; raises as `extend` does."""
        self.extend(theta.unsqueeze(0))

    def draws(self) -> Tensor:
        """All draws (C, T, P), mapped from the file; changing them changes nothing on disk."""
        return self.records().transpose(0, 1)
