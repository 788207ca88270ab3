"""Features and logits of a network over a split: what goes into its last layer, and what comes out.

The split between features and head is proven, not assumed: on the rows of the first two batches, features times head must
give the network's output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bnncli.data._labels import FROM_1
from bnncli.data._preprocess import ImageCounts
from bnncli.data._split import Batch, Inputs, InputSplit
from bnncli.errors import DataError, NumericError
from bnncli.extraction.autocast import AUTOCAST, PrecisionLoss
from bnncli.extraction.form import HeadForm
from bnncli.extraction.head import (
    Head,
    advise_layer,
    chosen_output,
    forward,
    head_of,
    is_vector,
    linear_layers,
    plain_copy,
    prove_head,
    run_network,
)
from bnncli.extraction.input_sums import InputSums
from bnncli.extraction.padding import padding_effect, unpadded
from bnncli.extraction.parts import InParts
from bnncli.extraction.repeats import check_repeats
from bnncli.options.extract_features import IDENTITY
from bnncli.progress import SILENT, Progress

__all__ = ["Extracted", "Head", "collect", "counted", "extract", "head_of", "prove_head"]


class Extracted(NamedTuple):
    """Features (n, D) in the storage type, labels (n,), (n, L) or None, and logits (m, K) float32 of the first rows."""

    features: Tensor
    logits: Tensor | None
    labels: Tensor | None
    num_truncated: int = 0  # of the texts or clips
    loss: PrecisionLoss | None = None  # of the first batch, where the network runs in lower precision
    padding: float | None = None  # of the first batch, where texts are padded: see padding_effect
    num_converted: int = 0  # of the clips: see bnncli.data.Transformed
    inputs: InputSums | None = None
    images: ImageCounts = ImageCounts()


def extract(
    model: nn.Module,
    head: Head | None,
    split: InputSplit,
    *,
    batch_size: int = 512,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    first_row: int = 0,
    num_logits: int | None = None,
    autocast: str | None = None,
    turns: slice = slice(None),
    num_checked: int = 0,
) -> Iterator[Extracted]:
    """Features, logits and labels of a split, batch by batch in the split's order, on the CPU.

    The first two batches also prove the head, as `prove_head` does; some rows of the first go through again, as `check_repeats` does.

    Args:
        model: the network; it is moved to the device and put in evaluation mode.
        head: its last layer; None when the model's output are the features.
        batch_size: examples a forward pass.
        dtype: what features are returned in, float32 or float16.
        first_row: rows before it are left out.
        num_logits: of how many of the split's first rows the logits (n, K) are wanted; None for all. Those of the others are
            neither made where the network returns something else, nor copied.
        autocast: of AUTOCAST, what the network may compute in; the head is proved in float32, and logits are features
            times head. None for float32.
        turns: which of the batches from first_row on, by their place; no other is read. Each is what it is among all.
        num_checked: examples of a batch by which the network is known to repeat itself: 0, 1, or 2 for several.

    Raises:
        DataError: features that are not finite or not (n, D), a head that is not the last step, labels that are not
            classes of the head, a network that is random or depends on the batch.
        NumericError: features beyond the range of float16.
        DeviceError: not enough memory for a batch.
    """
    model = _placed(model, torch.device(device)).eval()
    where = f"split {split.name or split.spec}"
    read = InParts(_reader(model, head), torch.device(device))
    passes = _Passes(read, model, head, torch.device(device), autocast, where, num_checked)
    if first_row == len(split):
        return
    rest = split.take(np.arange(first_row, len(split))) if first_row else split
    batches = rest.batches(batch_size, device=device, num_workers=num_workers, turns=turns)
    starts = range(first_row, len(split), batch_size)
    for batch, number in zip(batches, range(len(starts))[turns], strict=True):
        start = starts[number]
        num_wanted = (len(split) if num_logits is None else num_logits) - start
        found = passes.over(batch, number=number, first_row=start, wants_logits=num_wanted > 0)
        if head is not None:
            _check_labels(batch, head, where=where, first_row=start)
        stored = _store(found.features, dtype, where)
        kept = None if found.logits is None or num_wanted <= 0 else plain_copy(found.logits[:num_wanted])
        counts = (batch.num_truncated, found.loss, found.padding, batch.num_converted)
        yield Extracted(stored, kept, batch.labels, *counts, InputSums.of(batch.inputs), batch.images)


def counted(
    batches: Iterable[Extracted], split: InputSplit, *, first_row: int = 0, progress: Progress = SILENT
) -> Iterator[Extracted]:
    """The batches of a split from first_row on; tells progress of each when the next is asked for."""
    task = progress.task(f"extract {split.name or split.spec}".strip(), len(split))
    if first_row:
        task.advance(first_row)
    for batch in batches:
        yield batch
        task.advance(len(batch.features))


class _Passed(NamedTuple):
    """Of one batch: features (n, D), logits (n, K) where they are wanted, and what is found out on the first."""

    features: Tensor
    logits: Tensor | None
    loss: PrecisionLoss | None = None
    padding: float | None = None


class _Passes(NamedTuple):
    """Forward passes over the batches of one split.

    Args:
        read: gives the features and the network's output for inputs.
        autocast: of AUTOCAST, or None for float32.
        where: names the split.
        num_checked: see `extract`.
    """

    read: Callable[[Inputs], tuple[Tensor, Tensor]]
    model: nn.Module
    head: Head | None
    device: torch.device
    autocast: str | None
    where: str
    num_checked: int = 0

    def over(self, batch: Batch, *, number: int, first_row: int, wants_logits: bool) -> _Passed:
        """One batch, the `number`th; the first two prove the head in float32, whatever the network computes in."""
        is_compared = self.autocast is not None and first_row == 0
        has_logits = wants_logits or is_compared
        exact: _Passed | None = None
        if self.autocast is None or number < 2:
            exact = self._exact(batch, number=number, first_row=first_row, has_logits=has_logits)
        if self.autocast is None:
            assert exact is not None
            return exact
        features = self._lowered_features(batch, self.autocast, first_row=first_row)
        logits = self.head.logits(features) if self.head is not None and has_logits else None
        padding = None if exact is None else exact.padding
        if exact is None or exact.logits is None or logits is None or not is_compared:
            return _Passed(features, logits, None, padding)
        return _Passed(features, logits, PrecisionLoss.between(logits, exact.logits), padding)

    def _exact(self, batch: Batch, *, number: int, first_row: int, has_logits: bool) -> _Passed:
        """The pass in float32; the proof of the head with the first two, the effect of padding with the first."""
        features, output = unpadded(self.read, batch.inputs, batch.lengths)
        _check_features(features, where=self.where, first_row=first_row)
        padding, logits = None, None
        if number == 0 and self.head is not None and min(len(features), 2) > self.num_checked:
            check_repeats(self.model, self.read, batch, features)
        if number == 0 and batch.lengths is None:
            padding = padding_effect(self.read, batch.inputs, features)
        if self.head is not None and number < 2:
            _prove_head(self.model, self.head, features, output)
        if self.head is not None and has_logits:
            logits = _logits(output, self.head, features)
        return _Passed(features, logits, None, padding)

    def _lowered_features(self, batch: Batch, autocast: str, *, first_row: int) -> Tensor:
        """Features (n, D), float32, that the network computes in lower precision."""
        with torch.autocast(self.device.type, dtype=AUTOCAST[autocast]):
            features = unpadded(self.read, batch.inputs, batch.lengths)[0].float()
        _check_features(features, where=self.where, first_row=first_row)
        return features


def collect(batches: Iterable[Extracted], num_rows: int) -> Extracted:
    """All batches as one, each array allocated once; logits as far as there are."""
    whole: dict[str, Tensor] = {}
    num_logits = 0
    start, num_truncated, num_converted, loss, padding, inputs = 0, 0, 0, None, None, None
    images = ImageCounts()
    for batch in batches:
        images = images.plus(batch.images)
        inputs = batch.inputs if inputs is None else inputs.plus(batch.inputs)
        loss, padding = loss or batch.loss, batch.padding if padding is None else padding
        parts = {name: part for name, part in batch._asdict().items() if isinstance(part, Tensor)}
        for name, part in parts.items():
            if name not in whole:
                whole[name] = part.new_empty((num_rows, *part.shape[1:]))
            whole[name][start : start + len(part)] = part
        start += len(batch.features)
        num_logits += 0 if batch.logits is None else len(batch.logits)
        num_truncated += batch.num_truncated
        num_converted += batch.num_converted
    logits = whole["logits"][:num_logits] if num_logits else None
    counts = (num_truncated, loss, padding, num_converted)
    return Extracted(whole["features"], logits, whole.get("labels"), *counts, inputs, images)


def _placed(model: nn.Module, device: torch.device) -> nn.Module:
    """The network on the device; not gone through by torch where it is there, which takes a fifth of one input's pass."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return model if all(tensor.device == device for tensor in tensors) else model.to(device)


def _reader(model: nn.Module, head: Head | None) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """What gives the features (n, D) and the network's output for inputs, of one forward pass."""
    if head is None:
        return lambda inputs: (forward(model, inputs),) * 2
    form = head.form
    if form is None:
        layer = linear_layers(model)[head.name]
        return lambda inputs: _of_layer(layer, partial(forward, model, inputs))
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    weight, bias = (None if one is None else one.to(device) for one in (head.weight, head.bias))
    assert weight is not None
    return lambda inputs: _of_form(model, form, weight, bias, partial(run_network, model, inputs))


def pass_to_head(head: Head, model: nn.Module, call: Callable[[], Any], weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the head takes, (n, D), in a forward pass that `call` makes; weight and bias are the head's in that pass."""
    if head.form is None:
        return _of_layer(linear_layers(model)[head.name], call)[0]
    return _of_form(model, head.form, weight, bias, call)[0]


def _of_form(
    model: nn.Module, form: HeadForm, weight: Tensor, bias: Tensor | None, call: Callable[[], Any]
) -> tuple[Tensor, Tensor]:
    passed, returned = form.run(model, call)
    with torch.inference_mode():
        output = chosen_output(returned, form.output)
        output = output.reshape(-1, len(weight))
        return form.features(passed, output, weight, bias), output


def _of_layer(layer: nn.Linear, call: Callable[[], Any]) -> tuple[Tensor, Any]:
    captured: list[Tensor] = []

    def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.append(args[0] if args else kwargs["input"])

    hook = layer.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        output = call()
    finally:
        hook.remove()
    if len(captured) != 1:
        raise DataError(
            f"the last linear layer is called {len(captured)} times in one forward pass, expected once",
            code="not_the_head", hint="choose another layer with \0last_layer\0",
        )  # fmt: skip
    return captured[0], output


def _prove_head(model: nn.Module, head: Head, features: Tensor, output: Tensor) -> None:
    """Nothing, when the head is what it should be; names the layers that could be it."""
    try:
        prove_head(head, features, output)
    except DataError as error:
        has_logits = head.name != IDENTITY and is_vector(output, len(features))
        raise advise_layer(error, model, has_logits=has_logits) from None


def _logits(output: Tensor, head: Head, features: Tensor) -> Tensor:
    """The output as (n, K); a network with one logit may return (n,). Where it is not the logits, features times head."""
    if head.form is not None and head.form.changes_logits:
        return head.logits(features)
    return output.unsqueeze(1) if output.ndim == 1 and head.weight.shape[0] == 1 else output


def _check_features(features: Tensor, *, where: str, first_row: int) -> None:
    if features.ndim != 2:
        raise DataError(
            f"{where}: the input of the last layer has shape {tuple(features.shape)}, expected (N, D): one "
                "vector per example",
            code="bad_shape", hint="networks that classify every position or patch are not supported",
        )  # fmt: skip
    if bool(torch.isfinite(features.sum())):
        return
    bad = (~torch.isfinite(features)).nonzero()
    if len(bad):
        raise DataError(
            f"{where}: {len(bad)} feature values are NaN or infinite in this batch; the first is in row "
                f"{first_row + int(bad[0, 0])}",
            code="not_finite", hint="check that input, \0mean\0 and \0std\0",
        )  # fmt: skip


def _check_labels(batch: Batch, head: Head, *, where: str, first_row: int) -> None:
    num_classes = head.layout.num_classes
    if batch.labels is None:
        return
    if batch.labels.ndim == 2:
        if batch.labels.shape[1] != head.layout.num_outputs:
            raise DataError(
                f"{where}: each example has {batch.labels.shape[1]} labels, but the head has "
                    f"{head.layout.num_outputs} outputs",
                code="bad_labels", hint="pass data with other labels as \0ood\0, which stores no labels",
            )  # fmt: skip
        return
    bad = (batch.labels >= num_classes).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        if head.layout.num_outputs < head.layout.num_classes:
            raise DataError(
                f"{where}: row {first_row + row} has label {int(batch.labels[row])}, but a head with one output "
                    "expects labels 0 and 1",
                code="bad_labels", hint="is this a regression? bnncli supports only classifiers",
            )  # fmt: skip
        raise DataError(
            f"{where}: row {first_row + row} has label {int(batch.labels[row])}, but the head has classes 0 to "
                f"{num_classes - 1}",
            code="bad_labels", hint=FROM_1 if int(batch.labels[row]) == num_classes and int(batch.labels.min()) > 0
            else "pass data with other classes as \0ood\0, which stores no labels",
        )  # fmt: skip


def _store(features: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Features on the CPU in the storage type. Raises NumericError where float16 would overflow."""
    largest = torch.finfo(dtype).max
    if dtype != torch.float32 and float(features.abs().max()) > largest:
        raise NumericError(
            f"{where}: a feature has magnitude {float(features.abs().max()):.3g}, which exceeds {largest:.3g}, "
                f"the maximum of {str(dtype).removeprefix('torch.')}",
            hint="store features with \0dtype\0 float32",
        )  # fmt: skip
    return plain_copy(features, dtype)
