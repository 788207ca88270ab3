"""Features as they come out of a network: in memory while they are few, else in a file, and what an interrupted run goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from bnncli.artifacts.resume import BUFFER_BYTES, RecordFile, remove_state, rows_path
from bnncli.data.pixels import ImageCounts
from bnncli.errors import Interrupted
from bnncli.lazy import torch
from bnncli.models.features import Extracted, InputSums, PrecisionLoss
from bnncli.run.produce import Request
from bnncli.run.resumable import Resumable, State
from bnncli.run.session import Run

if TYPE_CHECKING:
    from torch import Tensor


class FeatureStore:
    """The features of one split, with labels and what logits the batches have.

    A state is stored when it is due, when the run is interrupted, and at the end of a split where the command has gone on
    for as long: what is complete is not done again when a later split is interrupted.

    Args:
        run, request: what the features are for; a state of another request is refused.
        dtype: the features' own.
        batch_size: of the network: sums depend on it, so that a run goes on with the same one alone.
        resume: whether a state that is there is to be continued.
        save_every: seconds between states; 0 saves one after every batch.
        buffer_bytes: features kept in memory; where there are no more of them no file is made.
    """

    def __init__(
        self,
        run: Run,
        request: Request,
        *,
        dtype: torch.dtype,
        batch_size: int,
        resume: bool,
        save_every: float,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        also = {"device": run.device.type, "batch size": str(batch_size)}
        self._resumable = Resumable(run, request, resume=resume, save_every=save_every, also=also)
        self._run, self._target, self._dtype, self._save_every = run, request.target, dtype, save_every
        self._buffer_bytes = buffer_bytes
        self._rows: RecordFile | None = None
        self._parts: dict[str, list[Tensor]] = {}
        self._num_truncated = self._num_converted = 0
        self._loss: PrecisionLoss | None = None
        self._padding: float | None = None
        self._inputs: InputSums | None = None
        self._images = ImageCounts()
        self.num_rows = 0

    def restore(self) -> int:
        """How many rows an interrupted run has left, with --resume; 0 to start afresh.

        Raises:
            DataError: what is there is damaged, or of another request.
        """
        state = self._resumable.restore(lambda state: f" after {int(state['num_rows'])} rows of {self._target.stem}")
        if state is not None:
            self.num_rows, self._num_truncated = int(state["num_rows"]), int(state["num_truncated"])
            self._num_converted = int(state["num_converted"])
            self._images = ImageCounts(*(int(state[name]) for name in ImageCounts._fields))
            self._rows = self._file(int(state["num_features"]))
            self._rows.continue_from(self.num_rows, bytes(state["digest"].tolist()))
            self._parts = {name: [state[name]] for name in ("logits", "labels") if name in state}
            sums = [state[f"inputs.{name}"] for name in InputSums._fields[1:]]
            self._inputs = InputSums(self.num_rows, *sums)
        return self.num_rows

    def collect(self, batches: Iterator[Extracted]) -> Extracted:
        """All rows, those of an interrupted run before those of the batches; logits of those that have them.

        Raises:
            OutputExists, WriteError: what does not stay in memory cannot be written.
            Interrupted: with the command that goes on.
        """
        with self._resumable.hint():
            try:
                for batch in batches:
                    self._add(batch)
                    self._resumable.offer(self._state)
            except Interrupted:
                if self._rows is not None:
                    self._resumable.offer(self._state, is_last=True)
                raise
            if self._save_every and self._run.seconds >= self._save_every:
                self._resumable.offer(self._state, is_last=True)
            assert self._rows is not None  # no split is empty
            parts = {name: torch.cat(found) for name, found in self._parts.items()}
            rows, labels = self._rows.collected(), parts.get("labels")
            return Extracted(
                rows,
                parts.get("logits"),
                labels,
                self._num_truncated,
                self._loss,
                self._padding,
                self._num_converted,
                self._inputs,
                self._images,
            )

    def close(self) -> None:
        """No more rows come: keep their file as long as a state needs it, and not otherwise."""
        if self._rows is not None:
            self._rows.close()
            if not self._resumable.is_stored:
                self._rows.remove()

    def remove(self) -> None:
        """The features are published: neither the state nor the file is needed."""
        self._resumable.remove()
        if self._rows is not None:
            self._rows.remove()
        with suppress(OSError):
            remove_state(rows_path(self._target))  # of an earlier run that nobody went on with

    def _add(self, batch: Extracted) -> None:
        if self._rows is None:
            self._rows = self._file(batch.features.shape[1])
        if batch.logits is not None:
            self._parts.setdefault("logits", []).append(batch.logits)
        if batch.labels is not None:
            self._parts.setdefault("labels", []).append(batch.labels)
        self._rows.extend(batch.features)
        self.num_rows += len(batch.features)
        self._num_truncated += batch.num_truncated
        self._num_converted += batch.num_converted
        self._images = self._images.plus(batch.images)
        self._loss = self._loss or batch.loss
        self._inputs = batch.inputs if self._inputs is None else self._inputs.plus(batch.inputs)
        self._padding = batch.padding if self._padding is None else self._padding

    def _state(self) -> State:
        """What an interrupted run goes on from; the rows that it counts are on disk first."""
        assert self._rows is not None
        assert self._inputs is not None
        self._rows.flush()
        numbers = {
            "num_rows": self.num_rows,
            "num_features": self._rows.shape[0],
            "num_truncated": self._num_truncated,
            "num_converted": self._num_converted,
            **self._images._asdict(),
        }
        return {
            **{name: torch.tensor(number) for name, number in numbers.items()},
            **{name: torch.cat(found) for name, found in self._parts.items()},
            **{f"inputs.{name}": value for name, value in self._inputs._asdict().items() if name != "num_rows"},
            "digest": torch.frombuffer(bytearray(self._rows.digest), dtype=torch.uint8),
        }

    def _file(self, num_features: int) -> RecordFile:
        return RecordFile(
            rows_path(self._target),
            self._target,
            shape=(num_features,),
            dtype=self._dtype,
            what="features",
            buffer_bytes=self._buffer_bytes,
        )
