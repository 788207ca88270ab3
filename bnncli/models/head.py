"""The last linear layer of a network: find it by name, read its weights, and prove that nothing unknown follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import DataError, DeviceError, UsageError
from bnncli.lazy import torch
from bnncli.models import Place
from bnncli.names import format_names, near_miss, quote_name
from bnncli.options.shared import IDENTITY
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.devices import to_float64
from bnncli.system.user_code import running_user_code

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.data.splits import Inputs


_LINKS = {
    "softmax",
    "log_softmax",
    "sigmoid",
    "sigmoid_",
    "expit",
    "special_expit",
    "special_softmax",
    "special_log_softmax",
}
# Steps that may follow, as the search for heads allows; they apply equally to logits. The log of a softmax has the
# softmax's logits.
_VIEWS = {
    *("view", "reshape", "flatten", "squeeze", "unsqueeze"),
    *("contiguous", "clone", "detach", "to", "float", "double"),
}


_LOGARITHMS = {"log", "log_"}
# Inverse links, within floating-point precision, for probabilities computed in another way.
_UNDONE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda output: output,
    "softmax": lambda output: output.clamp(min=torch.finfo(output.dtype).tiny).log(),
    "sigmoid": lambda output: output.logit(eps=torch.finfo(output.dtype).eps),
}


_NOTE = "_before_link"  # attribute of a result, with the lifetime of that result


@cache
def _notes_of_links() -> Any:
    """Return the mode of `before_links`; it cannot be defined before torch is imported."""

    class BeforeLinks(torch.overrides.TorchFunctionMode):
        """Notes, inside `with`, what goes into softmaxes and sigmoids; works under torch.func, for it reads no numbers."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Run one function."""
            kwargs, name = kwargs or {}, getattr(func, "__name__", "")
            given = args[0] if args else kwargs.get("input")
            logits = getattr(given, _NOTE, None)
            if name in _LINKS:
                logits = given.clone() if name.endswith("_") else given
            elif logits is None or name not in _VIEWS | _LOGARITHMS:
                return func(*args, **kwargs)
            elif name in _VIEWS:
                logits = func(logits, *args[1:], **kwargs)
            result = func(*args, **kwargs)
            setattr(result, _NOTE, logits)
            return result

    return BeforeLinks


def record_link_inputs() -> AbstractContextManager[object]:
    """Return a context that notes what goes into softmaxes and sigmoids."""
    mode: AbstractContextManager[object] = _notes_of_links()()
    return mode


def find_logits_before(output: Tensor, link: str) -> Tensor:
    """Return the input of the softmax or sigmoid that gave an output (n, ...), with the same shape."""
    found: Tensor | None = getattr(output, _NOTE, None)
    return _UNDONE[link](output) if found is None else found


SMALLEST_PROBABILITY = 1e-4  # below it, and as close to one, float32 has too few digits for a logit


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=SMALLEST_PROBABILITY).log()


def _log_odds(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY).logit()


@dataclass(frozen=True)
class Link:
    """Function that a network applies to logits (..., K), and the scale on which its output is compared with ours."""

    returns: str
    apply: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor] = lambda output: output


LINKS: Mapping[str, Link] = {
    "none": Link("logits", lambda logits: logits),
    "log_softmax": Link("log-probabilities (a log-softmax)", lambda logits: logits.log_softmax(-1)),
    "softmax": Link("probabilities (a softmax)", lambda logits: logits.softmax(-1), _log),
    "sigmoid": Link("probabilities (a sigmoid)", lambda logits: logits.sigmoid(), _log_odds),
}


@dataclass(frozen=True)
class Tap:
    """Place at a module where features pass, or an operation number (`tap_number`) if no module has them."""

    at: Place | int
    axis: int  # of the features


@dataclass(frozen=True)
class HeadForm:
    """Form of a head: how to obtain features and logits.

    Attributes:
        taps: their features are concatenated; without any, the features are the output itself.
        positions: row: features are already (n, D); all: all values of an example; mean: mean over positions; one: the
            position that the network uses.
        output: which network output are the logits, "" for the only one.
        link: one of LINKS.
        reduce_range: whether the head's product rounds its inputs to 7 instead of 8 bits; None if it does not round.
        notes: for the user, one sentence each.
    """

    taps: tuple[Tap, ...]
    positions: str
    output: str
    link: str
    reduce_range: bool | None
    notes: tuple[str, ...]

    @property
    def changes_logits(self) -> bool:
        """Return whether the network's output is a function of features times head rather than equal to it."""
        return self.link != "none" or self.reduce_range is not None

    def on_link_scale(self, logits: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs that logits (..., K) imply and the network's output, on the same scale."""
        link = LINKS[self.link]
        return link.scale(link.apply(logits)), link.scale(output)

    def run(self, model: nn.Module, call: Callable[[], Any]) -> tuple[list[Tensor], Any]:
        """Run one forward pass by `call`; return the tensor at each tap, and the network's output."""
        passed: dict[Tap, list[Tensor]] = {tap: [] for tap in self.taps}
        modules = dict(model.named_modules())
        hooks = [_hook(modules[tap.at.module], tap.at, passed[tap]) for tap in self.taps if isinstance(tap.at, Place)]
        numbers = [tap.at for tap in self.taps if isinstance(tap.at, int)]
        from bnncli.models.tape import TappedInputs  # it imports torch

        operations = TappedInputs(numbers)
        try:
            with operations if numbers else nullcontext():
                output = call()
        finally:
            for hook in hooks:
                hook.remove()
        return [_take_tensor(tap, passed[tap], operations.found) for tap in self.taps], output

    def features(self, passed: list[Tensor], output: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return features (n, D) from the tapped tensors and the network's output (n, K).

        Args:
            weight, bias: of the head, (K, D) and (K,), on the device.
        """
        if not self.taps:
            return output
        every = [self._vectors(tensor, tap.axis) for tap, tensor in zip(self.taps, passed, strict=True)]
        if self.positions == "one":
            (vectors,) = every
            logits = vectors @ weight.T if bias is None else vectors @ weight.T + bias
            ours, theirs = self.on_link_scale(logits, output.unsqueeze(1))
            nearest = (ours - theirs).abs().amax(-1).argmin(1)
            places = nearest[:, None, None].expand(
                -1, -1, vectors.shape[2]
            )  # without a fixed number of rows, which a graph would keep
            return vectors.gather(1, places)[:, 0]
        return every[0] if len(every) == 1 else torch.cat(every, 1)

    def _vectors(self, tensor: Tensor, axis: int) -> Tensor:
        """Return (n, D); (n, positions, D) if one position is to be chosen."""
        if self.positions == "row":
            return tensor
        if self.positions == "all":
            return tensor.reshape(tensor.shape[0], -1)  # len would fix the batch size on export
        vectors = tensor.movedim(axis, -1).flatten(1, -2)
        return vectors.mean(1) if self.positions == "mean" else vectors

    def rounded(self, features: Tensor) -> Tensor:
        """Return features as the head's own product sees them: rounded batch-wise if it uses 8 bits."""
        if self.reduce_range is None:
            return features
        scale, zero = torch._choose_qparams_per_tensor(features, self.reduce_range)
        return ((features / scale).round() + zero).clamp(0, 255).sub(zero).mul(scale)


def _hook(module: nn.Module, place: Place, passed: list[Tensor]) -> Any:
    if place.slot is None:
        return module.register_forward_hook(lambda module, args, output: passed.append(output))

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed.append(args[place.slot] if isinstance(place.slot, int) else kwargs[str(place.slot)])

    return module.register_forward_pre_hook(entering, with_kwargs=True)


def _take_tensor(tap: Tap, passed: list[Tensor], operations: Mapping[int, Tensor]) -> Tensor:
    """Return the tensor at a tap. Raises DataError if the network did not reach it."""
    if isinstance(tap.at, int) and tap.at in operations:
        return operations[tap.at]
    if isinstance(tap.at, Place) and tap.at.call < len(passed):
        return passed[tap.at.call]
    raise DataError(
        "the network runs different operations for these inputs than for the first ones, on which its head was found",
        code="not_the_head", hint="choose another layer with \0last_layer\0",
    )  # fmt: skip


IDENTITY_HINT = f"\0last_layer\0 {IDENTITY} puts an identity layer on top of the logits"
_SHOWN = 8  # linear layers named in a message; heads come last
# Largest |features @ W.T + b - logits| that rounding explains, in units of 1 + max |logits|.
HEAD_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Head:
    """The last layer: its name in the network, weight (K, D) and bias (K,) or None, float32 on the CPU.

    Attributes:
        form: how to obtain features and logits; None for a linear layer whose result is the network's output.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    form: HeadForm | None = None

    @property
    def layout(self) -> HeadLayout:
        """Layout of weight and bias in theta."""
        return HeadLayout(self.weight.shape[0], self.weight.shape[1], self.bias is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how the head was extracted, one sentence each."""
        return () if self.form is None else self.form.notes

    def logits(self, features: Tensor) -> Tensor:
        """Return features (n, D) times head, (n, K) float64."""
        exact = to_float64(features)
        logits = exact @ self.weight.to(exact.device).double().T
        return logits if self.bias is None else logits + self.bias.to(exact.device).double()


class LinearLayer(NamedTuple):
    """A torch.nn.Linear that a network calls, and whether its result is the network's output."""

    head: Head
    is_head: bool


def last_linear(
    model: nn.Module, inputs: Inputs, *, layer: str | None = None, output: str | None = None
) -> LinearLayer | None:
    """Return the linear layer of that name, or the last one called, for inputs (n, ...); None if there is none.

    Raises:
        UsageError, DataError: the model does not accept the inputs.
    """
    linear = linear_layers(model)
    if layer is not None and layer not in linear:
        return None
    called: list[tuple[str, Tensor]] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: called.append((name, args[0] if args else kwargs["input"]))

    hooks = [one.register_forward_pre_hook(noting(name), with_kwargs=True) for name, one in linear.items()]
    try:
        returned = run_network(model.eval(), inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if layer is None and not called:
        return None
    head = head_of(model, layer or called[-1][0])
    features = [features for name, features in called if name == head.name]
    if output is not None or len(features) != 1 or features[0].ndim != 2:
        return LinearLayer(head, is_head=False)
    try:
        prove_head(head, features[0], logits_of(returned))
    except DataError:
        return LinearLayer(head, is_head=False)
    return LinearLayer(head, is_head=True)


def missing_head_error(model: nn.Module) -> DataError:
    """Return the error for a network without a possible head."""
    linear = linear_layers(model)
    has = f"its linear layers are {format_names(linear)}" if linear else "it has none"
    return DataError(
        f"the network calls no linear layer (torch.nn.Linear); {has}", code="no_head",
        hint="the last layer must be linear; \0model\0 flatten uses raw inputs as features",
    )  # fmt: skip


def head_of(model: nn.Module, name: str) -> Head:
    """Return the linear layer called `name`.

    Raises:
        UsageError: there is no such linear layer; lists the existing ones.
    """
    linear = linear_layers(model)
    if name not in linear:
        last = [*linear][-_SHOWN:]
        before = f" and {len(linear) - _SHOWN} earlier ones" if len(linear) > _SHOWN else ""
        raise UsageError(
            f"\0last_layer\0: expected one of {format_names(last, limit=_SHOWN) or 'none: there is no torch.nn.Linear'}{before}; "
            f"got {name!r}",
            hint=near_miss(name, [*linear]),
        )
    layer = linear[name]
    bias = None if layer.bias is None else plain_copy(layer.bias)
    return Head(name, plain_copy(layer.weight), bias)


def prove_head(head: Head, features: Tensor, output: Tensor) -> None:
    """Check that features (n, D) times head, after the link, equal the network's output (n, K) up to rounding.

    Raises:
        DataError: they do not; says what the output looks like, such as the ReLU of the logits.
    """
    logits = head.logits(features if head.form is None else head.form.rounded(features))
    actual = to_float64(output)
    if actual.numel() != logits.numel():
        raise DataError(
            f"the network's output has shape {tuple(output.shape)}, but its linear layer {quote_name(head.name)} "
                f"gives {tuple(logits.shape)}: that layer is not the last step",
            code="not_the_head", hint="choose another layer with \0last_layer\0, or return this layer's output unchanged",
        )  # fmt: skip
    actual = actual.reshape(logits.shape)
    if head.form is not None:
        logits, actual = head.form.on_link_scale(logits, actual)
    error = (actual - logits).abs().max()
    if error <= HEAD_TOLERANCE * (1 + actual.abs().max()):
        return
    raise DataError(
        f"features times the weights of {quote_name(head.name)} differ from the network's output by "
            f"{float(error):.3g}; {_explain(logits, actual)}",
        code="not_the_head", hint="the network must return the output of its last linear layer unchanged",
    )  # fmt: skip


def check_link(head: Head, likelihood: str | None = None) -> None:
    """Check that the network's link fits the meaning of the logits: softmax for classes, sigmoid for labels.

    Args:
        likelihood: of the outputs by name; None to infer it from their number.

    Raises:
        DataError: it does not fit, such as a sigmoid for each of several classes.
    """
    link, layout = "none" if head.form is None else head.form.link, replace(head.layout, likelihood_name=likelihood)
    if link == "none" or layout.likelihood.is_shift_invariant == link.endswith("softmax"):
        return
    is_sigmoid = link == "sigmoid"
    raise DataError(
        f"the network returns a {link.replace('_', '-')} of its {head.layout.num_outputs} outputs, which does "
        f"not match {head.layout.num_classes} classes: "
        + (
            "a sigmoid of each output means that classes are not mutually exclusive"
            if is_sigmoid
            else "its outputs sum to one"
        ),
        code="not_the_head",
        hint="return the output of the last linear layer unchanged"
        + (", or add \0task\0 multilabel if each output is a separate label" if is_sigmoid else ""),
    )


def is_vector(output: Tensor, num_rows: int) -> bool:
    """Return whether an output has one number or vector for each of num_rows examples."""
    return output.shape[:1] == (num_rows,) and sum(size > 1 for size in output.shape[1:]) <= 1


def advise_layer(error: DataError, model: nn.Module, *, has_logits: bool) -> DataError:
    """Add to the error for a layer that is not the head what could be named instead.

    Args:
        has_logits: whether the network's output can be treated as logits.
    """
    linear = linear_layers(model)
    others = f"; \0last_layer\0 NAME selects another linear layer (have: {format_names(linear, limit=20)})" * (
        len(linear) > 1
    )
    identity = f"; {IDENTITY_HINT}" * has_logits
    return DataError(error.message, code=error.code, hint=f"{error.hint}{others}{identity}")


def _explain(logits: Tensor, output: Tensor) -> str:
    """Describe what the network does to the logits, if it is a common operation."""
    centered = logits - logits.mean(dim=1, keepdim=True)
    usual: Mapping[str, Tensor] = {
        "the output is the ReLU of the logits: remove the ReLU": logits.relu(),
        "the output is the logits minus their mean: remove the centring": centered,
    }
    for text, changed in usual.items():
        if (changed - output).abs().max() <= HEAD_TOLERANCE * (1 + output.abs().max()):
            return text
    return "another operation follows that layer"


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the network's output tensor for inputs (n, ...), without gradients; finds logits in tuples and mappings.

    Raises:
        DataError: the network does not accept the inputs, or returns no tensor.
        DeviceError: there is not enough memory.
    """
    return logits_of(run_network(model, inputs))


def run_network(model: nn.Module, inputs: Inputs) -> Any:
    """Return the network's output for inputs (n, ...) or named inputs. Raises as `forward` does."""
    try:
        with torch.inference_mode(), running_user_code("the network", but=(RuntimeError, IndexError)):
            return model(**inputs) if isinstance(inputs, dict) else model(inputs)
    except (RuntimeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in str(error):
            first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
            raise DeviceError(
                f"not enough memory on {first.device} for {len(first)} inputs", code="out_of_memory"
            ) from error
        first_line = str(error).strip().split("\n")[0][:200]
        hint: str | None = "check that \0data\0 matches \0model\0; \0resize\0 and \0crop\0 change image sizes"
        if (
            isinstance(inputs, torch.Tensor)
            and inputs.ndim == 3
            and any(isinstance(one, torch.nn.Conv2d) for one in model.modules())
        ):
            hint = "images need a channel axis, (N, C, H, W): for greyscale images, save x[:, None]"
        message = f"the network failed on inputs of shape {_shapes(inputs)}: {first_line}"
        if (beyond := _describe_large_tokens(model, inputs)) is not None:
            message, hint = beyond, "tokenize the inputs with the network's own tokenizer"
        raise DataError(message, code="wrong_inputs", hint=hint) from error


def _describe_large_tokens(model: nn.Module, inputs: Inputs) -> str | None:
    """Describe token ids beyond the network's largest embedding; None if there are none."""
    sizes = [one.num_embeddings for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    given = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if not sizes or given is None or given.is_floating_point() or not given.numel() or int(given.max()) < max(sizes):
        return None
    return (
        f"the network's embedding has {max(sizes)} tokens, numbered from 0, but the inputs contain token "
        f"{int(given.max())}; they were made with a different tokenizer"
    )


def _shapes(inputs: Inputs) -> str:
    """Return the shape of the inputs, or of each by name."""
    if isinstance(inputs, dict):
        return ", ".join(f"{tuple(tensor.shape)} ({name})" for name, tensor in inputs.items())
    return str(tuple(inputs.shape))


def logits_of(output: Any) -> Tensor:
    """Return the logits in a network's output. Raises DataError if there is no tensor."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    elif isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, torch.Tensor):
        raise DataError(f"the network returned {type(output).__name__}, expected a tensor of logits", code="no_logits")
    return output


def outputs_of(returned: Any) -> dict[str, Tensor]:
    """Return the numeric tensors in a network's output by name or tuple index; "" for a single tensor."""
    if isinstance(returned, torch.Tensor):
        return {"": returned}
    if isinstance(returned, (tuple, list)):
        returned = dict(enumerate(returned))
    elif not isinstance(returned, Mapping):
        returned = {"logits": getattr(returned, "logits", None)}
    return {
        str(name): one for name, one in returned.items() if isinstance(one, torch.Tensor) and one.is_floating_point()
    }  # fmt: skip


def choose_output(returned: Any, name: str) -> Tensor:
    """Return the output with this name. Raises UsageError if there is none."""
    outputs = outputs_of(returned)
    if name not in outputs and {*outputs} <= {""}:
        raise UsageError(f"\0output\0: the network's outputs have no names; omit \0output\0; got {name!r}")
    if name not in outputs:
        raise UsageError(
            f"\0output\0: expected one of {format_names(outputs, limit=20)}; got {name!r}",
            hint=near_miss(name, [*outputs]),
        )
    return outputs[name]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return all linear layers by name, in declaration order."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}


def plain_copy(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an ordinary tensor on the CPU, float32 by default, without inference mode or shared memory."""
    return tensor.detach().to("cpu", dtype or torch.float32, copy=True)
