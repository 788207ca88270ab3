"""The head of a network: the map, linear in features, that one of its outputs is given by.

Where the linear layer that is called last gives the output as it is, that is it. Otherwise the output is followed back,
operation by operation, to the products with weights that it comes from; what lies between may scale and shift each logit and
average or choose positions, a softmax or sigmoid at the end is undone, and all must give what the network returned.
Where a network has no such map, its logits may be called features, under an identity layer: that is done only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.data._split import Inputs
from bnncli.errors import DataError, UsageError
from bnncli.extraction.affine import Traced, trace
from bnncli.extraction.form import LINKS, HeadForm, Tap
from bnncli.extraction.head import (
    IDENTITY_HINT,
    Head,
    chosen_output,
    head_of,
    is_vector,
    last_linear,
    logits_of,
    no_head,
    outputs_of,
    plain_copy,
    run_network,
)
from bnncli.extraction.repeats import explain_refusal
from bnncli.extraction.tape import LINK_OF, Tape, tap_number
from bnncli.lazy import torch
from bnncli.names import listed, quoted
from bnncli.options.extract_features import IDENTITY

if TYPE_CHECKING:
    from torch import Tensor, nn

_VIEWS = {
    *("aten::view", "aten::reshape", "aten::flatten", "aten::squeeze", "aten::unsqueeze", "aten::_unsafe_view"),
    *("aten::contiguous", "aten::clone", "aten::detach", "aten::alias", "aten::to", "aten::_to_copy"),
}
IDENTITY_NOTE = (
    "the head is an identity layer on the network's logits: the posterior covers a scale, mixing and shift of "
    "the logits, not weights of the network"
)
UNIT_NOTE = (
    "the outputs for the first examples are between 0 and 1 and are treated as logits; a network that returns "
    "probabilities must return logits instead"
)
_USUAL = ("logits", "out")  # what networks call their logits where they return more


class _Found(NamedTuple):
    """A head, with the output that it gives and what that was made from."""

    head: Head
    form: HeadForm
    traced: Traced


def find_head(
    model: nn.Module, first: Callable[[int], Inputs], *, layer: str | None = None, output: str | None = None
) -> Head:
    """The head of a network, which is put in evaluation mode.

    Args:
        first: gives the inputs (n, ...) of the first n examples.
        layer: where its weights are: a module, a parameter, or several with + between them; IDENTITY for an identity layer
            on the logits, unless weights of the network are called so; None for any.
        output: the name or number of the network's output that are the logits; None for the one that is found.

    Raises:
        DataError: there is none, or there are several.
        UsageError: there is no such layer or output, or the model cannot take the inputs.
    """
    is_identity = layer == IDENTITY and not any(name.split(".")[0] == IDENTITY for name, _ in model.named_parameters())
    if layer is not None and not is_identity:
        _check_names(model, layer)
    try:
        plain = None if is_identity else last_linear(model.eval(), first(1), layer=layer, output=output)
    except DataError as error:
        raise explain_refusal(model, first, error) from error.__cause__
    if plain is not None and plain.is_head:
        return plain.head
    inputs = first(2)
    with Tape(model.eval(), inputs) as tape:
        returned = run_network(model, inputs)
    if is_identity:
        return _identity_head(tape, returned, output)
    missing = getattr(model, "no_head", None)  # a graph has been looked through already
    found = _heads(tape, returned, output) if missing is None else []
    fitting = [one for one in found if layer is None or one.traced.is_in(layer)]
    fitting = _outermost(tape, [one for one in fitting if one.head.name == layer] or fitting)
    if len(fitting) > 1:
        fitting = [one for one in fitting if one.form.output in _USUAL] or fitting
    if len(fitting) == 1:
        return fitting[0].head
    if len(fitting) > 1 or (layer is not None and found and plain is None):
        raise _not_one(fitting or found, layer, returned)
    if plain is None:
        if not outputs_of(returned):
            logits_of(returned)  # raises: there is no tensor in it
        raise _offering_identity(missing or _no_linear(tape, returned) or no_head(model), tape, returned, output)
    return plain.head  # the proof on all rows says what is wrong with it


def _check_names(model: nn.Module, layer: str) -> None:
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for name in layer.split("+"):
        if name not in known:
            head_of(model, name)  # refuses it


def _heads(tape: Tape, returned: Any, output: str | None) -> list[_Found]:
    """The heads that the network's outputs are given by, in the order of these."""
    outputs = outputs_of(returned)
    if output is not None:
        outputs = {output: chosen_output(returned, output)}
    found = []
    for name, tensor in outputs.items():
        link, index = _link(tape, tensor)
        traced = trace(tape, tensor if index is None else tape.calls[index].args[0])
        if traced is None:
            continue
        notes = (*_link_notes(link), *traced.notes)
        form = HeadForm(traced.taps, traced.positions, name, link, traced.reduce_range, notes)
        bias = None if traced.bias is None else plain_copy(traced.bias)
        found.append(_Found(Head(traced.name, plain_copy(traced.weight), bias, form), form, traced))
    return found


def _identity_head(tape: Tape, returned: Any, output: str | None) -> Head:
    """An identity layer on the logits that an output is, or is a softmax or sigmoid of.

    Raises:
        DataError: no output has a vector for each example, several have, or it is probabilities of unknown origin.
        UsageError: there is no such output.
    """
    outputs = outputs_of(returned) if output is None else {output: chosen_output(returned, output)}
    if not outputs:
        logits_of(returned)  # raises: there is no tensor in it
    fitting = {name: one for name, one in outputs.items() if is_vector(one, tape.num_rows)}
    usual = [name for name in fitting if name in _USUAL]
    names = usual if len(fitting) > 1 and usual else [*fitting]
    if len(names) != 1:
        shapes = ", ".join(f"{quoted(name)} {tuple(one.shape)}" for name, one in outputs.items())
        raise DataError(
            f"an identity layer needs one output with one vector per example; {tape.num_rows} examples gave {shapes}",
            code="not_the_head", hint="choose one with \0output\0 NAME" if fitting else None,
        )  # fmt: skip
    tensor = outputs[names[0]]
    link, index = _link(tape, tensor)
    rows = tensor.reshape(tape.num_rows, -1)
    sums = rows.sum(1)
    if link == "none" and bool((rows >= 0).all()) and torch.allclose(sums, torch.ones_like(sums)):
        raise DataError(
            "the network's outputs look like probabilities (they sum to one), but no softmax was found",
            code="not_the_head", hint="return the input of the softmax, or log-probabilities",
        )  # fmt: skip
    taps = () if index is None else (Tap(tap_number(tape, index), -1),)
    doubt = (UNIT_NOTE,) if link == "none" and bool(((rows >= 0) & (rows <= 1)).all()) else ()
    form = HeadForm(taps, "all", names[0], link, None, (*_link_notes(link), *doubt, IDENTITY_NOTE))
    return Head(IDENTITY, torch.eye(rows.shape[1]), torch.zeros(rows.shape[1]), form)


def _offering_identity(error: DataError, tape: Tape, returned: Any, output: str | None) -> DataError:
    """The error that there is no head, with the way out where there is that one."""
    try:
        _identity_head(tape, returned, output)
    except DataError:
        return error
    return DataError(error.message, code=error.code, hint=f"{error.hint}; {IDENTITY_HINT}")


def _link_notes(link: str) -> tuple[str, ...]:
    return (
        ()
        if link == "none"
        else (f"the network returns {LINKS[link].returns}; bnncli uses the logits before this step",)
    )


def _link(tape: Tape, output: Tensor) -> tuple[str, int | None]:
    """The last softmax or sigmoid that gave an output, by its name and the call's index; none, and None."""
    tensor, index = output, tape.writer(output, len(tape.calls))
    is_log = False
    while index is not None:
        call = tape.calls[index]
        if call.operation in LINK_OF:
            link = LINK_OF[call.operation]
            known = {"softmax": "log_softmax"}.get(link) if is_log else link
            return ("none", None) if known is None else (known, index)
        if call.operation == "aten::log" and not is_log:
            is_log = True
        elif call.operation not in _VIEWS:
            break
        tensor = call.args[0]
        index = tape.writer(tensor, index)
    return "none", None


def _outermost(tape: Tape, found: list[_Found]) -> list[_Found]:
    """Those from which no other is made: features that a network returns beside its logits are none. One for each head."""
    unique: dict[tuple[int, ...], _Found] = {}
    for one in found:
        known = unique.get(one.traced.products)
        if known is None or (known.form.link != "none" and one.form.link == "none"):
            unique[one.traced.products] = one
    heads = [*unique.values()]
    return [one for one in heads if not any(other.traced.is_made_from(tape, one.traced) for other in heads)]


def _no_linear(tape: Tape, returned: Any) -> DataError | None:
    """That what follows the last weights is not linear; None where no output comes from weights."""
    for output in outputs_of(returned).values():
        before = tape.before(output)
        if before is not None:
            names = listed(product.name for product in map(tape.product, before[0]) if product is not None)
            after = ", ".join(dict.fromkeys(tape.calls[index].operation.partition("::")[2] for index in before[1]))
            return DataError(
                f"the network's output is not linear in any features: it is computed from {names} by "
                f"{after or 'nothing else'}",
                code="no_head",
                hint="after the last weights, bnncli supports only a scale, an average over positions, a softmax or "
                "a sigmoid",
            )
    return None


def _not_one(found: list[_Found], layer: str | None, returned: Any) -> DataError | UsageError:
    """That there are several heads, or none of the name; lists them."""
    heads = listed_heads(found)
    if layer is not None and not any(one.traced.is_in(layer) for one in found):
        return UsageError(
            f"\0last_layer\0: {quoted(layer)} does not produce an output of the network; these do: {heads}"
        )
    first = f"the network returns {len(returned)} outputs, and the first is used; " * isinstance(
        returned, (tuple, list)
    )
    hint = f"add \0last_layer\0 {found[0].head.name}" if first else "choose one with \0last_layer\0 NAME"
    return DataError(f"{first}the network has several heads: {heads}", code="not_the_head", hint=hint)


def listed_heads(found: list[_Found]) -> str:
    """Heads with their sizes and the outputs that they give."""
    return ", ".join(f"{quoted(one.head.name)} ({one.head.layout}; output {quoted(one.form.output)})" for one in found)
