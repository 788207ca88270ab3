"""The examples of a split with their labels, as one tensor on a device."""

from __future__ import annotations

from bnncli.data.splits import InputSplit
from bnncli.errors import DataError
from bnncli.inference.map_training import Examples
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress
from bnncli.system import memory

_READ = 1024  # examples at once


def labelled_inputs(
    split: InputSplit, device: torch.device, *, num_workers: int = 0, progress: Progress = SILENT
) -> Examples:
    """Inputs (N, ...), as a network takes them, and labels of a split.

    Raises:
        DataError: an example is no single tensor, has no label, or has NaN or infinite values.
        DeviceError: they do not fit into the device's memory.
    """
    task = progress.task(f"read {split.name}", len(split))
    inputs = labels = torch.empty(0)
    start = 0
    for batch in split.batches(_READ, num_workers=num_workers):
        if isinstance(batch.inputs, dict):
            raise DataError(
                f"split {split.name} has several inputs per example ({', '.join(batch.inputs)}); expected one "
                    "tensor per example",
                code="wrong_inputs", hint="train takes images, rows of numbers, and sounds that all have the same length",
            )  # fmt: skip
        if batch.labels is None:
            raise DataError(f"split {split.name}: {split.spec} has no labels", code="no_labels")
        if start == 0:
            one = batch.inputs[0]
            memory.require(
                len(split) * one.nbytes, device, what=f"split {split.name}", hint="use fewer examples: SPEC@N"
            )
            inputs = torch.empty((len(split), *one.shape), dtype=one.dtype, device=device)
            labels = torch.empty((len(split), *batch.labels.shape[1:]), dtype=batch.labels.dtype, device=device)
        _check_finite(split, start, batch.inputs)
        end = start + len(batch.inputs)
        inputs[start:end], labels[start:end] = batch.inputs.to(device), batch.labels.to(device)
        task.advance(end - start)
        start = end
    return Examples(inputs, labels)


def _check_finite(split: InputSplit, start: int, inputs: torch.Tensor) -> None:
    """Pass when inputs (n, ...) of the examples from `start` on are finite, while they are still on the CPU.

    Raises:
        DataError: naming the first row that is not.
    """
    if not inputs.is_floating_point() or bool(
        torch.isfinite(inputs.sum())
    ):  # NaN or infinity makes the sum NaN or infinite
        return
    bad = (~torch.isfinite(inputs.flatten(1))).any(dim=1).nonzero()
    if len(bad):
        row = int(split.rows[start + int(bad[0])])
        raise DataError(
            f"split {split.name}: expected finite inputs; row {row} of {split.spec} has NaN or infinite values",
            code="not_finite", hint="fix these values, or drop the rows that have them",
        )  # fmt: skip
