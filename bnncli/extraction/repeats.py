"""Whether a network in evaluation mode gives an example the same features each time, whatever else is in its batch.

Dropout that is always on and batch normalisation by the batch's own statistics do not. A posterior on such features would
be one of the batches that they were made in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from bnncli.data._split import Batch, Inputs
from bnncli.errors import BnnError, DataError
from bnncli.extraction.head import run_network
from bnncli.extraction.padding import MUCH, unpadded
from bnncli.extraction.tape import Call, Tape
from bnncli.lazy import torch
from bnncli.names import percent, quoted

if TYPE_CHECKING:
    from torch import Tensor, nn

_ROWS = 8
_MUCH_OF_EPS = 8  # of the network's lowest precision, where that is more than MUCH
_MUCH_OF_8_BITS = 0.1  # quantised networks may scale by the largest value of a batch

Read: TypeAlias = "Callable[[Inputs], tuple[Tensor, Tensor]]"


class _Cause(NamedTuple):
    """What makes features random or dependent on the batch, and what to do about it."""

    text: str
    hint: str


def check_repeats(model: nn.Module, read: Read, batch: Batch, features: Tensor) -> None:
    """Pass when some rows of a batch have the same features in a smaller batch, twice.

    Args:
        read: gives features (n, D) and the output for inputs.
        batch: that gave `features` (N, D).

    Raises:
        DataError: they differ by more than rounding; names the module where it can be found.
    """
    rows = _some_rows(batch, len(features))
    few = _rows(batch, rows)
    first, second = (unpadded(read, few.inputs, few.lengths)[0] for _ in range(2))
    with torch.inference_mode():
        change = _difference(first, second)
        is_random = change > _tolerance(model, first)
        if not is_random:
            change = _difference(first, features[rows])
        is_same = change <= _tolerance(model, first)
    if is_same and len(features) > 1:
        return
    calls = _calls(model, partial(unpadded, read, few.inputs, few.lengths), few.inputs)
    if is_same:  # one example has no batch to differ from
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
    """Return the error of a network that takes no single example, with the module that needs several where there is one.

    Args:
        first: gives the inputs (n, ...) of the first n examples.
    """
    calls: list[Call] = []
    with suppress(BnnError):  # the first error is the one to tell
        several = first(2)
        calls = _calls(model, lambda: run_network(model, several), several)
    found = next((call for call in calls if _uses_batch_statistics(call)), None)
    return error if found is None else _batch_error("", _batch_cause(model, [found]))


def _batch_error(differ: str, cause: _Cause) -> DataError:
    message = f"in evaluation mode, an example's features depend on the rest of the batch{differ}; {cause.text}"
    return DataError(message, code="depends_on_batch", hint=cause.hint)


def _some_rows(batch: Batch, count: int) -> list[int]:
    """Rows spread over the batch, half of them at most; of clips that go through by their lengths, those of one length."""
    among = list(range(count))
    if batch.lengths is not None:
        commonest = max(batch.lengths, key=batch.lengths.count)
        among = [row for row, length in enumerate(batch.lengths) if length == commonest]
    num = min(_ROWS, max(1, len(among) // 2))
    return [among[place * len(among) // num] for place in range(num)]


def _rows(batch: Batch, rows: list[int]) -> Batch:
    """Some examples, as they are in the batch; of one length where there are lengths."""
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
    """The largest difference in units of the largest feature; infinite where a feature is not finite."""
    scale = one.abs().max().double().clamp(min=1e-30)
    found = (one.double() - other.double()).abs().max() / scale
    return float(found.nan_to_num(nan=float("inf")))


def _tolerance(model: nn.Module, features: Tensor) -> float:
    """What rounding explains, in the lowest precision of the network's weights."""
    dtypes = {features.dtype, *(one.dtype for one in model.parameters() if one.is_floating_point())}
    return max(MUCH, _MUCH_OF_EPS * max(torch.finfo(dtype).eps for dtype in dtypes))


def _calls(model: nn.Module, run: Callable[[], Any], inputs: Inputs) -> list[Call]:
    """The operations of one pass; none where they cannot be recorded."""
    with suppress(Exception), Tape(model, inputs) as tape:  # it names a cause, and no more
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
    """Whether an operation draws random numbers: dropout that is off does not."""
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
    """The module that called an operation, with what is special about it."""
    name = call.modules[-1] if call.modules else ""
    module = dict(model.named_modules()).get(name)
    if module is None or name == "":
        return "the network's forward method"
    kind = type(module).__name__
    if getattr(module, "track_running_stats", True) is False or getattr(module, "running_mean", 0) is None:
        return f"{quoted(name)} ({kind} without running statistics)"
    return f"{quoted(name)} ({kind}{' in training mode' if module.training else ''})"
