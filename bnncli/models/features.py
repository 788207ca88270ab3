"""Extract the features and logits of a network over a split: the input and output of its last layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from bnncli.data.labels import FROM_1
from bnncli.data.pixels import ImageCounts
from bnncli.data.splits import Batch, Inputs, InputSplit
from bnncli.errors import BnnError, DataError, DeviceError, NumericError
from bnncli.lazy import torch
from bnncli.models.head import (
    Head,
    HeadForm,
    advise_layer,
    choose_output,
    forward,
    head_of,
    is_vector,
    linear_layers,
    plain_copy,
    prove_head,
    run_network,
)
from bnncli.names import percent, quote_name
from bnncli.options.shared import IDENTITY
from bnncli.progress import SILENT, Progress
from bnncli.system.devices import has_float64
from bnncli.system.memory import budget

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.models.tape import Call

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}  # names of dtypes of torch


class PrecisionLoss(NamedTuple):
    """Change of the logits of some examples under lower precision, relative to float32.

    Attributes:
        num_rows: number of examples compared.
        largest: largest difference of a logit.
        spread: standard deviation of the float32 logits about their mean over classes; for a single logit about zero.
        num_same: number of examples with the same predicted class.
    """

    num_rows: int
    largest: float
    spread: float
    num_same: int

    @classmethod
    def between(cls, logits: Tensor, exact: Tensor) -> PrecisionLoss:
        """Compare logits (n, K) with those of float32 (n, K)."""
        is_single = exact.shape[1] == 1
        centered = exact if is_single else exact - exact.mean(dim=1, keepdim=True)
        classes = [one[:, 0] > 0 if is_single else one.argmax(dim=1) for one in (logits, exact)]
        return cls(
            len(exact),
            float((logits - exact).abs().max()),
            float(centered.double().square().mean().sqrt()),
            int((classes[0] == classes[1]).sum()),
        )

    def __str__(self) -> str:
        return (
            f"on the first {self.num_rows} rows, logits differ from float32 by at most {self.largest:.2g} "
            f"(spread of the logits: {self.spread:.2g}); {self.num_same} of {self.num_rows} predicted classes "
            "are the same"
        )


Read: TypeAlias = "Callable[[Inputs], tuple[Tensor, Tensor]]"
_CPU_BYTES = 2**29  # of activations at once; more does not speed up a CPU
_SHARE = 2  # one part in this many of a GPU's free memory
_FEW = 2  # examples to measure on


class FeatureComputation:
    """Computes features (n, D) and output of a batch like `read`: texts of similar lengths together, in parts that fit into memory.

    Args:
        read: one forward pass; its outputs have one row per example.
        device: device of the computation.
        is_padded: whether the inputs are texts that were padded to the longest of a batch.
    """

    def __init__(self, read: Read, device: torch.device, *, is_padded: bool = False) -> None:
        self.read, self.device, self.is_padded = read, device, is_padded
        self._bytes: dict[tuple[torch.Size, ...], int] = {}

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return features and output for inputs (n, ...), or a dictionary of them."""
        if not self.is_padded or not isinstance(inputs, Mapping):
            return self._in_parts(inputs)
        groups = _groups_of_texts(inputs, self.device)
        if len(groups) < 2:
            return self._in_parts(inputs)
        parts = []
        for rows, positions in groups:
            parts.append(self._in_parts(_trim(inputs, rows, positions)))
            if parts[0][0].ndim != 2:  # no features: the caller's check reports it
                return self._in_parts(inputs)
        back = torch.cat([rows for rows, _ in groups]).argsort()
        with torch.inference_mode():
            features, output = (torch.cat(found)[back.to(found[0].device)] for found in zip(*parts, strict=True))
        return features, output

    def _in_parts(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        count = len(next(iter(_tensors(inputs))))
        size = self._at_once(inputs, count)
        if count <= size:
            return self.read(inputs)
        parts = [self.read(_part_rows(inputs, start, start + size)) for start in range(0, count, size)]
        with torch.inference_mode():
            features, output = (torch.cat(found) for found in zip(*parts, strict=True))
        return features, output

    def _at_once(self, inputs: Inputs, count: int) -> int:
        """Return how many examples of this shape fit into memory."""
        room = _CPU_BYTES if self.device.type == "cpu" else budget(self.device) // _SHARE
        if (
            count <= _FEW
            or count * sum(one[0].numel() * _estimate_activation_bytes(one) for one in _tensors(inputs)) <= room
        ):
            return count
        shapes = tuple(one.shape[1:] for one in _tensors(inputs))
        if shapes not in self._bytes:
            self._bytes[shapes] = self._measured(inputs)
        return max(_FEW, room // max(1, self._bytes[shapes]))

    def _measured(self, inputs: Inputs) -> int:
        """Return the peak bytes per example; 0 if the network does not accept a few examples, and so no part of a batch."""
        try:
            from bnncli.parameters.tensor_bytes import peak_bytes  # it imports torch

            return peak_bytes(lambda: self.read(_part_rows(inputs, 0, _FEW))) // _FEW
        except DataError:
            return 0


def _estimate_activation_bytes(values: Tensor) -> int:
    """Return bytes of activations per input value that a network rarely exceeds: for pixels, or for tokens."""
    return 64 if values.is_floating_point() else 2**15


def _tensors(inputs: Inputs) -> Iterator[Tensor]:
    yield from inputs.values() if isinstance(inputs, Mapping) else (inputs,)


def _part_rows(inputs: Inputs, start: int, stop: int) -> Inputs:
    if isinstance(inputs, Mapping):
        return {name: value[start:stop] for name, value in inputs.items()}
    return inputs[start:stop]


MASK = "attention_mask"  # the usual name of the input that marks a text's own positions
_SIMILAR = 1.25  # lengths of texts that are computed together
_FEWEST_TEXTS = {"cpu": 8}  # that are computed together; more on a GPU
_PAYS = 0.8  # of the positions of a batch: above it, its texts stay together


def _groups_of_texts(inputs: Mapping[str, Tensor], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the rows of texts of similar lengths and the positions that they use, group by group.

    None if dividing the batch saves little. The mask is copied to the CPU once.
    """
    mask = inputs.get(MASK)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or len(mask) < 2:
        return []
    is_used = mask.bool().cpu()
    lengths, order = is_used.sum(dim=1).sort(stable=True)
    sizes, begin, fewest = lengths.tolist(), 0, _FEWEST_TEXTS.get(device.type, 32)
    bounds = []
    for place, size in enumerate(sizes):
        if place - begin >= fewest and size > _SIMILAR * max(1, sizes[begin]) and len(sizes) - place >= fewest:
            bounds.append((begin, place))
            begin = place
    bounds.append((begin, len(sizes)))
    taken = sum((stop - start) * sizes[stop - 1] for start, stop in bounds)
    if taken > _PAYS * mask.numel():
        return []
    groups = [order[start:stop] for start, stop in bounds]
    return [(rows.to(mask.device), is_used[rows].any(dim=0).nonzero()[:, 0].to(mask.device)) for rows in groups]


def _trim(inputs: Mapping[str, Tensor], rows: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the inputs of some rows (m,) at some positions."""
    shape = inputs[MASK].shape
    return {
        name: value[rows].index_select(1, positions) if value.shape[:2] == shape else value[rows]
        for name, value in inputs.items()
    }


MUCH = 1e-3  # of the largest feature; rounding is smaller
# values of clips in one pass, a minute at 16 kHz: the first layers expand them to hundreds of channels
AT_ONCE = 1 << 20


def padding_effect(read: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, features: Tensor) -> float | None:
    """Return how far the most padded text's features are from those without padding, relative to the largest feature.

    Args:
        read: computes features (n, D) and output.
        inputs: of a batch, by name, with an attention mask (n, L) of zeros and ones, or (n, 2, L) for pairs of texts;
            None is returned for others.
        features: of the batch, (n, D).
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 3) or not isinstance(inputs, Mapping):
        return None
    used = mask.bool() if mask.ndim == 2 else mask.bool().any(dim=1)
    lengths = used.sum(dim=1)
    row = int(lengths.argmin())
    if not 0 < int(lengths[row]) < mask.shape[-1]:
        return None
    own, axis = used[row].nonzero()[:, 0], mask.ndim - 1
    alone = {
        name: value[row : row + 1].index_select(axis, own)
        if value.shape[: axis + 1] == mask.shape
        else value[row : row + 1]
        for name, value in inputs.items()
    }
    found = read(alone)[0][0].double()
    with torch.inference_mode():
        scale = found.abs().max().clamp(min=1e-30)
        return float((features[row].double() - found).abs().max() / scale)


def describe_padding_effect(split: str, effect: float | None) -> str | None:
    """Return a warning for a `padding_effect`; None if it is rounding, or nothing was padded."""
    if effect is None or effect <= MUCH:
        return None
    return (
        f"{split}: padding changes the features: for one text they differ by {percent(effect, '.2g')} from its "
        "unpadded features (\0batch_size\0 1 pads least)"
    )


def read_unpadded(
    read: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, lengths: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Compute features (n, D) and output (n, K) of padded examples as if each were alone.

    Examples of equal length form one pass, up to `AT_ONCE` values since clips are long.

    Args:
        lengths: of each example along the second axis; None if the network takes the batch as it is.
    """
    if lengths is None:
        return read(inputs)
    named = inputs if isinstance(inputs, Mapping) else {"": inputs}
    longest = max(lengths)
    order: list[int] = []
    parts: list[tuple[Tensor, Tensor]] = []
    for length in sorted({*lengths}):
        same = [row for row, own in enumerate(lengths) if own == length]
        for rows in _passes(same, next(iter(named.values()))[0, :length].numel()):
            own = {name: _cut(value[rows], length, longest) for name, value in named.items()}
            parts.append(read(own if isinstance(inputs, Mapping) else own[""]))
            order += rows
    if parts[0][0].ndim != 2:  # no features: the caller's check reports it
        return parts[0]
    back = torch.tensor(order).argsort()
    with torch.inference_mode():
        features, output = (torch.cat(found) for found in zip(*parts, strict=True))
        return features[back.to(features.device)], output[back.to(output.device)]


def _passes(rows: list[int], num_values: int) -> list[list[int]]:
    """Divide rows of num_values values each into passes through the network."""
    size = max(1, AT_ONCE // num_values)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _cut(value: Tensor, length: int, longest: int) -> Tensor:
    return value[:, :length] if value.ndim > 1 and value.shape[1] == longest else value


_ROWS_SUMMED, _VALUES = 64, 1 << 18  # rows and values of a batch that are read, at most
_NUM_TOKENS = 256  # number of most frequent tokens to record
_MOST_CHANNELS = 16
_SUM, _SQUARES, _ABSOLUTE, _NEGATIVE, _ZERO, _COUNT, _MIN, _MAX = range(8)


class InputSums(NamedTuple):
    """Sums over some examples, on the CPU.

    Attributes:
        shape: of one example, int64; without the length for token ids.
        table: (8, C) float64: per channel, or over all values without channels; C = 0 without real numbers.
        tokens: (2, U) int64, token ids and their counts; U = 0 without token ids.
    """

    num_rows: int
    shape: Tensor
    table: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> InputSums:
        """Compute the sums of a batch; of several inputs, prefer real numbers to token ids."""
        named: Mapping[str, Tensor] = inputs if isinstance(inputs, dict) else {"": inputs}
        num_rows = len(next(iter(named.values())))
        real = next((one for one in named.values() if one.is_floating_point()), None)
        with torch.inference_mode():
            if real is not None:
                shape = torch.tensor(real.shape[1:], dtype=torch.int64)
                return cls(num_rows, shape, _table(real), torch.zeros(2, 0, dtype=torch.int64))
            ids = named.get("input_ids", next(iter(named.values())))
            mask = named.get(MASK)
            kept = ids[mask != 0] if mask is not None and mask.shape == ids.shape else ids.flatten()
            found = torch.stack(torch.unique(kept.long(), return_counts=True)).cpu()
            return cls(num_rows, torch.zeros(0, dtype=torch.int64), torch.zeros(8, 0, dtype=torch.float64), found)

    def plus(self, other: InputSums | None) -> InputSums:
        """Return the sums over the examples of both; of the first if they differ in kind."""
        if other is None or self.table.shape != other.table.shape:
            return self
        table = self.table + other.table
        table[_MIN] = torch.minimum(self.table[_MIN], other.table[_MIN])
        table[_MAX] = torch.maximum(self.table[_MAX], other.table[_MAX])
        both = torch.cat([self.tokens, other.tokens], dim=1)
        ids, places = torch.unique(both[0], return_inverse=True)
        counts = torch.zeros_like(ids).index_add(0, places, both[1])
        return InputSums(self.num_rows + other.num_rows, self.shape, table, torch.stack([ids, counts]))

    def statistics(self) -> dict[str, Any]:
        """Return the recorded statistics: mean and std per channel, shares of values; the most frequent token ids."""
        found: dict[str, Any] = {"num_rows": self.num_rows}
        if self.table.shape[1]:
            count = self.table[_COUNT]
            mean = self.table[_SUM] / count
            variance = (self.table[_SQUARES] / count - mean**2).clamp(min=0)
            total = float(count.sum())
            shares = {"zeros": _ZERO, "negative": _NEGATIVE}
            found |= {
                "shape": self.shape.tolist(),
                "min": _round_to_six_digits(float(self.table[_MIN].min())),
                "max": _round_to_six_digits(float(self.table[_MAX].max())),
                "mean": [_round_to_six_digits(value) for value in mean.tolist()],
                "std": [_round_to_six_digits(value) for value in variance.sqrt().tolist()],
                "mean_absolute": _round_to_six_digits(float(self.table[_ABSOLUTE].sum()) / total),
                **{
                    name: _round_to_six_digits(float(self.table[place].sum()) / total) for name, place in shares.items()
                },
            }
        if self.tokens.shape[1]:
            ids, counts = self.tokens
            order = torch.argsort(counts, descending=True, stable=True)[:_NUM_TOKENS]  # ties by ascending id
            found["tokens"] = {
                "num": int(counts.sum()),
                "commonest": ids[order].tolist(),
                "counts": counts[order].tolist(),
            }
        return found


def _table(inputs: Tensor) -> Tensor:
    """Return (8, C) for images (n, C, H, W), or (8, 1) for other real inputs (n, ...)."""
    size = max(1, min(_ROWS_SUMMED, _VALUES // max(1, inputs[0].numel())))
    some = inputs[:: -(-len(inputs) // size)]
    has_channels = some.ndim == 4 and some.shape[1] <= _MOST_CHANNELS
    values = some.transpose(0, 1).flatten(1) if has_channels else some.reshape(1, -1)
    if not bool(values.sum().isfinite()):
        values = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    each = torch.full((len(values),), values.shape[1], device=values.device)
    counts = [(values < 0).sum(dim=1), each - values.count_nonzero(dim=1), each]
    sums = [values.sum(dim=1, dtype=torch.float64), values.double().square().sum(dim=1)]
    found: list[Tensor] = [*sums, values.abs().sum(dim=1, dtype=torch.float64), *counts, *values.aminmax(dim=1)]
    return torch.stack([one.double() for one in found]).cpu()


def _round_to_six_digits(value: float) -> float:
    return float(f"{value:.6g}")


_ROWS_REPEATED = 8
_MUCH_OF_EPS = 8  # in the network's lowest precision, if larger than MUCH
_MUCH_OF_8_BITS = 0.1  # quantised networks may scale by the largest value of a batch


class _Cause(NamedTuple):
    """Cause of features that are random or depend on the batch, and what to do."""

    text: str
    hint: str


def check_repeats(model: nn.Module, read: Read, batch: Batch, features: Tensor) -> None:
    """Check that some rows of a batch get the same features in a smaller batch, twice.

    Args:
        read: computes features (n, D) and output.
        batch: the batch of `features` (N, D).

    Raises:
        DataError: they differ by more than rounding; names the module if it can be found.
    """
    rows = _some_rows(batch, len(features))
    few = _repeat_rows(batch, rows)
    first, second = (read_unpadded(read, few.inputs, few.lengths)[0] for _ in range(2))
    with torch.inference_mode():
        change = _difference(first, second)
        is_random = change > _tolerance(model, first)
        if not is_random:
            change = _difference(first, features[rows])
        is_same = change <= _tolerance(model, first)
    if is_same and len(features) > 1:
        return
    calls = _calls(model, partial(read_unpadded, read, few.inputs, few.lengths), few.inputs)
    if is_same:  # a single example cannot depend on the batch
        if any(_uses_batch_statistics(call) for call in calls):
            raise _batch_error("", _batch_cause(model, calls))
        return
    if not is_random and change <= _MUCH_OF_8_BITS and any("quantize" in call.operation for call in calls):
        return
    differ = f": features of the same rows differ by {percent(change, '.3g')}"
    if not is_random:
        raise _batch_error(f"{differ} between batches", _batch_cause(model, calls))
    cause = _random_cause(model, calls)
    message = f"the network is random in evaluation mode{differ} between two passes; {cause.text}"
    raise DataError(message, code="random_network", hint=cause.hint)


def explain_refusal(model: nn.Module, first: Callable[[int], Inputs], error: DataError) -> DataError:
    """Return the error for a network that does not accept a single example, naming the module responsible if known.

    Args:
        first: returns the inputs (n, ...) of the first n examples.
    """
    calls: list[Call] = []
    with suppress(BnnError):  # report the first error
        several = first(2)
        calls = _calls(model, lambda: run_network(model, several), several)
    found = next((call for call in calls if _uses_batch_statistics(call)), None)
    return error if found is None else _batch_error("", _batch_cause(model, [found]))


def _batch_error(differ: str, cause: _Cause) -> DataError:
    message = f"in evaluation mode, an example's features depend on the rest of the batch{differ}; {cause.text}"
    return DataError(message, code="depends_on_batch", hint=cause.hint)


def _some_rows(batch: Batch, count: int) -> list[int]:
    """Return rows spread over the batch, at most half of them; for clips processed by length, of a single length."""
    among = list(range(count))
    if batch.lengths is not None:
        commonest = max(batch.lengths, key=batch.lengths.count)
        among = [row for row, length in enumerate(batch.lengths) if length == commonest]
    num = min(_ROWS_REPEATED, max(1, len(among) // 2))
    return [among[place * len(among) // num] for place in range(num)]


def _repeat_rows(batch: Batch, rows: list[int]) -> Batch:
    """Return some examples of the batch unchanged; with lengths, of equal length."""
    lengths = batch.lengths
    named: Mapping[str, Tensor] = batch.inputs if isinstance(batch.inputs, dict) else {"": batch.inputs}
    chosen = {name: value[rows] for name, value in named.items()}
    if lengths is not None:
        own, longest = lengths[rows[0]], max(lengths)
        chosen = {
            name: value[:, :own] if value.ndim > 1 and value.shape[1] == longest else value
            for name, value in chosen.items()
        }
        lengths = (own,) * len(rows)
    return Batch(chosen if isinstance(batch.inputs, dict) else chosen[""], None, lengths=lengths)


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest feature; infinite if a feature is not finite."""
    scale = one.abs().max().double().clamp(min=1e-30)
    found = (one.double() - other.double()).abs().max() / scale
    return float(found.nan_to_num(nan=float("inf")))


def _tolerance(model: nn.Module, features: Tensor) -> float:
    """Return the tolerance for rounding in the lowest precision of the network's weights."""
    dtypes = {features.dtype, *(one.dtype for one in model.parameters() if one.is_floating_point())}
    return max(MUCH, _MUCH_OF_EPS * max(torch.finfo(dtype).eps for dtype in dtypes))


def _calls(model: nn.Module, run: Callable[[], Any], inputs: Inputs) -> list[Call]:
    """Return the operations of one pass; none if they cannot be recorded."""
    from bnncli.models.tape import Tape

    with suppress(Exception), Tape(model, inputs) as tape:  # only used to name a cause
        run()
        return tape.calls
    return []


def _random_cause(model: nn.Module, calls: list[Call]) -> _Cause:
    hint = "pass training=self.training to dropout in forward, and leave every module in evaluation mode"
    found = next((call for call in calls if _is_random(call)), None)
    if found is None:
        return _Cause("the forward pass is random", hint)
    what = f"{found.operation.partition('::')[2]} in {_module(model, found)}"
    return _Cause(f"{what} draws random numbers", hint)


def _batch_cause(model: nn.Module, calls: list[Call]) -> _Cause:
    found = next((call for call in calls if _uses_batch_statistics(call)), None)
    if found is None:
        return _Cause(
            "the forward pass mixes the examples of a batch", "compute every example independently of its batch"
        )
    return _Cause(
        f"{_module(model, found)} normalises with batch statistics",
        "use running statistics (track_running_stats=True, updated in train mode on the training data), save "
        "the checkpoint again, and leave every module in evaluation mode",
    )


def _is_random(call: Call) -> bool:
    """Return whether an operation draws random numbers; dropout with probability 0 does not."""
    if torch.Tag.nondeterministic_seeded not in call.function.tags:
        return False
    given = _arguments(call)
    is_off = given.get("train") is False or given.get("training") is False or given.get("dropout_p") == 0
    return not (is_off or given.get("p") == 0)


def _uses_batch_statistics(call: Call) -> bool:
    return "batch_norm" in call.operation and _arguments(call).get("training") is True


def _arguments(call: Call) -> dict[str, Any]:
    names = [argument.name for argument in call.function._schema.arguments]
    defaults = {one.name: one.default_value for one in call.function._schema.arguments if one.has_default_value()}
    return {**defaults, **dict(zip(names, call.args, strict=False)), **call.kwargs}


def _module(model: nn.Module, call: Call) -> str:
    """Describe the module that called an operation."""
    name = call.modules[-1] if call.modules else ""
    module = dict(model.named_modules()).get(name)
    if module is None or name == "":
        return "the network's forward method"
    kind = type(module).__name__
    if getattr(module, "track_running_stats", True) is False or getattr(module, "running_mean", 0) is None:
        return f"{quote_name(name)} ({kind} without running statistics)"
    return f"{quote_name(name)} ({kind}{' in training mode' if module.training else ''})"


__all__ = ["ExtractedFeatures", "Head", "collect", "extract", "head_of", "prove_head", "track_batches"]


class ExtractedFeatures(NamedTuple):
    """Features (n, D) in the storage type, labels (n,), (n, L) or None, and logits (m, K) float32 of the first rows."""

    features: Tensor
    logits: Tensor | None
    labels: Tensor | None
    num_truncated: int = 0  # number of truncated texts or clips
    loss: PrecisionLoss | None = None  # of the first batch, if the network runs in lower precision
    padding: float | None = None  # of the first batch, if texts are padded: see padding_effect
    num_converted: int = 0  # number of converted clips: see bnncli.data.Transformed
    inputs: InputSums | None = None
    images: ImageCounts = ImageCounts()

    def detached(self) -> ExtractedFeatures:
        """Return a copy without the memory that the tensors are views of, to send to another process."""
        return self._replace(
            features=self.features.clone(),
            logits=None if self.logits is None else self.logits.clone(),
            labels=None if self.labels is None else self.labels.clone(),
        )


def extract(
    model: nn.Module,
    head: Head | None,
    split: InputSplit,
    *,
    batch_size: int = 512,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    first_row: int = 0,
    num_logits: int | None = None,
    autocast: str | None = None,
    turns: slice = slice(None),
    num_checked: int = 0,
) -> Iterator[ExtractedFeatures]:
    """Yield features, logits and labels of a split on the CPU, batch by batch in order.

    The first two batches also prove the head (see `prove_head`); some rows of the first are repeated (see
    `check_repeats`).

    Args:
        model: the network; moved to the device and put in evaluation mode.
        head: its last layer; None if the model's output are the features.
        batch_size: examples per forward pass.
        dtype: type of the returned features, float32 (the default) or float16.
        first_row: skip rows before it.
        num_logits: number of first rows whose logits (n, K) to return; None for all. Other logits are not copied, nor
            computed if the network returns something else.
        autocast: one of AUTOCAST, precision of the network; the head is proved in float32, and logits are features
            times head. None for float32.
        turns: which batches from first_row on to read, by index; their contents do not depend on this.
        num_checked: size of the batches that the network is known to repeat: 0, 1, or 2 for several.

    Raises:
        DataError: features are not finite or not (n, D), the head is not the last step, labels are not classes of the
            head, or the network is random or depends on the batch.
        NumericError: features exceed the range of float16.
        DeviceError: there is not enough memory for a batch.
    """
    device = torch.device(device)
    model = move_network(model, device).eval()
    where = f"split {split.name or split.spec}"
    one_pass = _reader(model, head)
    transform = split.preprocess.transform
    read = FeatureComputation(
        one_pass if has_float64(device) else _pass_on(device, one_pass),
        device,
        is_padded=transform is not None and transform.takes in ("texts", "words"),
    )
    passes = _Passes(read, model, head, device, autocast, where, num_checked)
    if first_row == len(split):
        return
    rest = split.take(np.arange(first_row, len(split))) if first_row else split
    around = device if has_float64(device) else "cpu"  # of what is computed with inputs and features beside the passes
    batches = rest.batches(batch_size, device=around, num_workers=num_workers, turns=turns)
    starts = range(first_row, len(split), batch_size)
    for batch, number in zip(batches, range(len(starts))[turns], strict=True):
        start = starts[number]
        num_wanted = (len(split) if num_logits is None else num_logits) - start
        found = passes.over(batch, number=number, first_row=start, wants_logits=num_wanted > 0)
        if head is not None:
            _check_labels(batch, head, where=where, first_row=start)
        stored = _store(found.features, dtype or torch.float32, where)
        kept = None if found.logits is None or num_wanted <= 0 else plain_copy(found.logits[:num_wanted])
        counts = (batch.num_truncated, found.loss, found.padding, batch.num_converted)
        yield ExtractedFeatures(stored, kept, batch.labels, *counts, InputSums.of(batch.inputs), batch.images)


def track_batches(
    batches: Iterable[ExtractedFeatures], split: InputSplit, *, first_row: int = 0, progress: Progress = SILENT
) -> Iterator[ExtractedFeatures]:
    """Yield the batches of a split from first_row on, reporting progress."""
    task = progress.task(f"extract {split.name or split.spec}".strip(), len(split))
    if first_row:
        task.advance(first_row)
    for batch in batches:
        yield batch
        task.advance(len(batch.features))


class _BatchOutput(NamedTuple):
    """One batch: features (n, D), logits (n, K) if wanted, and findings of the first batch."""

    features: Tensor
    logits: Tensor | None
    loss: PrecisionLoss | None = None
    padding: float | None = None


class _Passes(NamedTuple):
    """Forward passes over the batches of one split.

    Args:
        read: computes features and output.
        autocast: one of AUTOCAST, or None for float32.
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

    def over(self, batch: Batch, *, number: int, first_row: int, wants_logits: bool) -> _BatchOutput:
        """Process the `number`th batch; the first two prove the head in float32, regardless of autocast."""
        is_compared = self.autocast is not None and first_row == 0
        has_logits = wants_logits or is_compared
        exact: _BatchOutput | None = None
        if self.autocast is None or number < 2:
            exact = self._exact(batch, number=number, first_row=first_row, has_logits=has_logits)
        if self.autocast is None:
            assert exact is not None
            return exact
        features = self._lowered_features(batch, self.autocast, first_row=first_row)
        logits = self.head.logits(features) if self.head is not None and has_logits else None
        padding = None if exact is None else exact.padding
        if exact is None or exact.logits is None or logits is None or not is_compared:
            return _BatchOutput(features, logits, None, padding)
        return _BatchOutput(features, logits, PrecisionLoss.between(logits, exact.logits), padding)

    def _exact(self, batch: Batch, *, number: int, first_row: int, has_logits: bool) -> _BatchOutput:
        """Process a batch in float32; the first two prove the head, the first measures the effect of padding."""
        features, output = read_unpadded(self.read, batch.inputs, batch.lengths)
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
        return _BatchOutput(features, logits, None, padding)

    def _lowered_features(self, batch: Batch, autocast: str, *, first_row: int) -> Tensor:
        """Return features (n, D), float32, computed in lower precision."""
        with torch.autocast(self.device.type, dtype=getattr(torch, AUTOCAST[autocast])):
            features = read_unpadded(self.read, batch.inputs, batch.lengths)[0].float()
        _check_features(features, where=self.where, first_row=first_row)
        return features


def collect(batches: Iterable[ExtractedFeatures], num_rows: int) -> ExtractedFeatures:
    """Concatenate all batches, allocating each array once; logits as far as there are any."""
    whole: dict[str, Tensor] = {}
    num_logits = 0
    start, num_truncated, num_converted, loss, padding, inputs = 0, 0, 0, None, None, None
    images = ImageCounts()
    for batch in batches:
        images = images.plus(batch.images)
        inputs = batch.inputs if inputs is None else inputs.plus(batch.inputs)
        loss, padding = loss or batch.loss, batch.padding if padding is None else padding
        parts = {name: part for name, part in batch._asdict().items() if isinstance(part, torch.Tensor)}
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
    return ExtractedFeatures(whole["features"], logits, whole.get("labels"), *counts, inputs, images)


def move_network(model: nn.Module, device: torch.device) -> nn.Module:
    """Move the network to the device, unless it is there: torch's traversal takes a fifth of one input's pass.

    Raises:
        DeviceError: it has float64 weights, and the device has no float64.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device.type == device.type and device.index in (None, tensor.device.index) for tensor in tensors):
        return model
    if not has_float64(device) and any(tensor.dtype == torch.float64 for tensor in tensors):
        raise DeviceError(f"the network has float64 weights, and {device} has no float64", hint="use \0device\0 cpu")
    return model.to(device)


def _pass_on(device: torch.device, read: Read) -> Read:
    """Return `read` for inputs on the CPU and a network on the device, with features and output on the CPU."""

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        if isinstance(inputs, Mapping):
            features, output = read({name: value.to(device) for name, value in inputs.items()})
        else:
            features, output = read(inputs.to(device))
        return features.cpu(), output.cpu()

    return run


def _reader(model: nn.Module, head: Head | None) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """Return a function that computes features (n, D) and output in one forward pass."""
    if head is None:
        return lambda inputs: (forward(model, inputs),) * 2
    form = head.form
    if form is None:
        layer = linear_layers(model)[head.name]
        return lambda inputs: _pass_layer(layer, partial(forward, model, inputs))
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    weight, bias = (None if one is None else one.to(device) for one in (head.weight, head.bias))
    assert weight is not None
    return lambda inputs: _pass_form(model, form, weight, bias, partial(run_network, model, inputs))


def pass_to_head(head: Head, model: nn.Module, call: Callable[[], Any], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the input of the head, (n, D), during a forward pass by `call`, given the head's weight and bias in that pass."""
    if head.form is None:
        return _pass_layer(linear_layers(model)[head.name], call)[0]
    return _pass_form(model, head.form, weight, bias, call)[0]


def _pass_form(
    model: nn.Module, form: HeadForm, weight: Tensor, bias: Tensor | None, call: Callable[[], Any]
) -> tuple[Tensor, Tensor]:
    passed, returned = form.run(model, call)
    with torch.inference_mode():
        output = choose_output(returned, form.output)
        output = output.reshape(-1, len(weight))
        return form.features(passed, output, weight, bias), output


def _pass_layer(layer: nn.Linear, call: Callable[[], Any]) -> tuple[Tensor, Any]:
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
    """Prove the head, or raise an error that names the layers that could be it."""
    try:
        prove_head(head, features, output)
    except DataError as error:
        has_logits = head.name != IDENTITY and is_vector(output, len(features))
        raise advise_layer(error, model, has_logits=has_logits) from None


def _logits(output: Tensor, head: Head, features: Tensor) -> Tensor:
    """Return the output as (n, K), also for a single logit (n,); if the output is not the logits, features times head."""
    if head.form is not None and head.form.changes_logits:
        return head.logits(features)
    return output.unsqueeze(1) if output.ndim == 1 and head.weight.shape[0] == 1 else output


def _check_features(features: Tensor, *, where: str, first_row: int) -> None:
    if features.ndim != 2:
        raise DataError(
            f"{where}: the input of the last layer has shape {tuple(features.shape)}, expected (N, D): one "
                "vector per example",
            code="bad_shape", hint="networks that classify every position or patch are not supported, except the token classifiers "
                "of \0model\0 hf:DIR",
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
    """Return features on the CPU in the storage type. Raises NumericError if float16 would overflow."""
    largest = torch.finfo(dtype).max
    if dtype != torch.float32 and float(features.abs().max()) > largest:
        raise NumericError(
            f"{where}: a feature has magnitude {float(features.abs().max()):.3g}, which exceeds {largest:.3g}, "
                f"the maximum of {str(dtype).removeprefix('torch.')}",
            hint="store features with \0dtype\0 float32",
        )  # fmt: skip
    return plain_copy(features, dtype)
