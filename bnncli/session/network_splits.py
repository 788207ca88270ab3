"""Splits for posteriors over other layers, with a network's inputs in place of features."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.features import CHECK_ROWS
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.data.splits import Batch, Inputs, InputSplit
from bnncli.data.splits import load_split as load_input_split
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted, UsageError
from bnncli.lazy import torch
from bnncli.models import AdaptedModel
from bnncli.models.features import MASK, pass_to_head
from bnncli.models.head import Head, choose_output, find_logits_before, logits_of, record_link_inputs
from bnncli.names import format_names
from bnncli.numerics.digests import file_sha256
from bnncli.options.shared import LayersOptions
from bnncli.parameters.module import STATE, ModuleLayout, ModuleNetwork, choose_parameters
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT, Progress
from bnncli.session.inputs import PREDICTION_BYTES, RESIDENT_SHARE, Split, load_split
from bnncli.session.network import RecordedNetwork, network_header, open_recorded
from bnncli.session.run import Run
from bnncli.session.splits import shift_of
from bnncli.system.devices import available_memory, count_cores
from bnncli.system.memory import require
from bnncli.targets.network import NetworkTarget

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.posteriors.point import Point


_AT_ONCE = 32  # examples per pass when comparing logits
TOLERANCE = 1e-3  # of logits, relative to 1 + the largest: covers other block sizes and torch releases
_STEP = 1e-4  # step for parameters that seem to have no derivatives
AUTOCAST_TOLERANCE = 0.1  # for features extracted in lower precision; the network here computes in float32


def check_logits(layout: ModuleLayout, inputs: Tensor, stored: NDArray, *, name: str, tolerance: float) -> None:
    """Check that the network reproduces the logits stored by extract-features.

    Args:
        layout: bound to the network.
        inputs: (N, D), of the split called `name`.
        stored: (n, K), the logits of its first examples.
        tolerance: of logits, relative to 1 + the largest.

    Raises:
        DataError: the logits differ.
    """
    device = layout.trained().device
    theta = layout.trained().float().unsqueeze(0)
    with torch.no_grad():
        blocks = inputs[: len(stored)].split(_AT_ONCE)
        found = [layout.logits(block.to(device), theta)[0].cpu().double() for block in blocks]
    ours, theirs = torch.cat(found).numpy(), np.asarray(stored, dtype=np.float64)
    if layout.likelihood.is_shift_invariant:  # a log-softmax has removed the shift
        ours, theirs = (one - one.mean(axis=1, keepdims=True) for one in (ours, theirs))
    error = float(np.abs(ours - theirs).max())
    if not error <= tolerance * (1 + float(np.abs(theirs).max())):
        raise DataError(
            f"the network's logits for split {name!r} differ by {error:.3g} from those stored with its features",
            code="stale_input",
            hint="extract the features again, with \0force\0",
        )


def check_derivatives(layout: ModuleLayout, inputs: Tensor) -> None:
    """Check that logits of inputs (n, D) depend on theta, and that both modes of torch.func agree.

    Raises:
        DataError: they do not; a part of the network has no derivative or no vmap rule; or a parameter changes logits that
            have no derivative with respect to it, for example because outputs are detached.
    """
    assert layout.network is not None
    theta, same = layout.trained().to(layout.network.check_dtype), layout.network.check_tolerance
    inputs = inputs.to(theta.device)
    numbers = torch.arange(1, len(theta) + 1, dtype=theta.dtype, device=theta.device)
    direction = numbers.sin()  # a direction that no symmetry of the network cancels

    def of_all(one: Tensor) -> Tensor:
        return layout.logits(inputs, one.unsqueeze(0))[0]

    def pushed(example: Tensor) -> Tensor:
        def of_one(draw: Tensor) -> Tensor:
            return layout.logits(example.unsqueeze(0), draw.unsqueeze(0))[0]

        found: Tensor = torch.func.jvp(of_one, (theta,), (direction,))[1]
        return found

    try:
        with torch.no_grad():
            both = layout.logits(inputs, torch.stack([theta, theta + 1]))
        outputs, pull = torch.func.vjp(of_all, theta)[:2]
        back = (pull(torch.ones_like(outputs))[0] * direction).sum()
        forth = torch.func.vmap(pushed)(inputs)
    except (BnnError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the network is foreign code and may raise anything
        why = " ".join(str(error).split())[:160]
        raise _refusal_error(f"it cannot be differentiated by torch.func ({type(error).__name__}: {why})") from error
    if not bool((back - forth.sum()).abs() <= same * forth.abs().sum() + same):
        raise _refusal_error("its forward and backward derivatives differ: part of it changes only the gradients")
    if torch.equal(both[0], both[1]):
        raise _refusal_error("its logits do not depend on these parameters")
    (gradient,) = pull(
        torch.arange(1, outputs.numel() + 1, dtype=theta.dtype, device=theta.device).cos().view_as(outputs)
    )
    still = [part for part in layout.parts if not gradient[part.place].any()]
    moved = theta.clone()
    for part in still:  # so small that inactive units stay inactive
        moved[part.place] += _STEP * direction[part.place]
    with torch.no_grad():
        change = (of_all(moved) - outputs).abs().max() if still else outputs.new_zeros(())
    if change > same * _STEP * (1 + outputs.abs().max()):
        names = format_names(part.name for part in still)
        raise _refusal_error(
            f"changing {names} changes the network's logits, but their derivative is zero: part of the network "
            "is detached or rounds its values"
        )


def _refusal_error(why: str) -> DataError:
    return DataError(f"\0layers\0: cannot fit a posterior over these parameters: {why}", code="not_differentiable")


BATCH = 512  # examples per read
_MOST_WORKERS = 8
_HINT = "use fewer rows (SPLIT=SPEC@N), or a machine with more memory"


def read_inputs(split: InputSplit, module: nn.Module, *, progress: Progress = SILENT) -> Tensor:
    """Read all inputs (N, ...) of a split, float32 on the CPU; texts as (N, arguments, ..., longest), IDs as floats.

    Args:
        module: the network, whose configuration defines the padding token.

    Raises:
        DeviceError: they do not fit in memory.
        DataError: arguments cannot be packed, or texts are padded and the network defines no padding.
    """
    what, task = f"the inputs of {split.name or split.spec}", progress.task(f"read {split.name}".strip(), len(split))
    whole: Tensor | None = None
    packed: list[Tensor] = []
    start = 0
    for batch in split.batches(BATCH, num_workers=_workers(split)):
        part = pack_inputs(batch)
        if isinstance(batch.inputs, dict) and has_tokens(batch.inputs):
            if not packed:
                require(2 * part[0].nbytes * len(split), "cpu", what=what, hint=_HINT)
            packed.append(part)
        else:
            if whole is None:
                require(part[0].nbytes * len(split), "cpu", what=what, hint=_HINT)
                whole = torch.empty((len(split), *part.shape[1:]), dtype=part.dtype)
            if part.shape[1:] != whole.shape[1:]:
                raise _unsupported_error(f"they have shapes {tuple(whole.shape[1:])} and {tuple(part.shape[1:])}")
            whole[start : start + len(part)] = part
        start += len(part)
        task.advance(len(part))
    return _join_batches(packed, list(batch.inputs), module) if whole is None else whole


_NO_PADDING_HINT = (
    "set tokenizer.pad_token to a token that no text ends with, save the tokenizer in the model's folder, and extract the "
    "features again"
)


def move_if_room(inputs: Tensor, device: torch.device) -> Tensor:
    """Move the inputs to the device if they leave enough room; otherwise leave them, to be moved block by block."""
    return inputs.to(device) if inputs.nbytes <= RESIDENT_SHARE * available_memory(device) else inputs


def pack_inputs(batch: Batch) -> Tensor:
    """Return a batch as one tensor: unchanged, or the network's arguments stacked to (n, arguments, ...).

    Raises:
        DataError: arguments differ in shape or are floats; or the network processes each audio clip without its padding.
    """
    if batch.lengths is not None and len({*batch.lengths}) > 1:
        hint = _NO_PADDING_HINT if has_tokens(batch.inputs) else None
        raise _unsupported_error("it processes each example without its padding", hint)
    if not isinstance(batch.inputs, dict):
        return batch.inputs.float()
    parts = list(batch.inputs.values())
    if len({part.shape for part in parts}) > 1 or (len(parts) > 1 and parts[0].is_floating_point()):
        raise _unsupported_error("it takes several inputs that differ in shape or are not integers")
    return torch.stack([part.float() for part in parts], dim=1)


def has_tokens(inputs: Inputs) -> bool:
    """Return whether inputs are token ids, with or without further arguments."""
    parts = inputs.values() if isinstance(inputs, dict) else [inputs]
    return not any(part.is_floating_point() for part in parts)


def _unsupported_error(why: str, hint: str | None = None) -> DataError:
    message = f"\0layers\0: cannot read the network's inputs as one tensor: {why}; only its last layer is supported"
    return DataError(message, code="unsupported_inputs", hint=hint)


def _join_batches(parts: list[Tensor], names: list[str], module: nn.Module) -> Tensor:
    """Join packed batches, right-padded to the longest with the network's padding."""
    longest, count = max(part.shape[-1] for part in parts), sum(map(len, parts))
    is_padded = any(part.shape[-1] != longest for part in parts)
    if is_padded and (getattr(getattr(module, "config", None), "pad_token_id", None) or 0) < 0:
        raise _unsupported_error("its tokenizer has no padding token", _NO_PADDING_HINT)
    if MASK not in names and is_padded:
        raise _unsupported_error(f"it has no attention mask ({MASK}) for padded texts")
    padding = torch.zeros(len(names), *[1] * (parts[0].ndim - 2), dtype=parts[0].dtype)
    if "input_ids" in names:
        padding[names.index("input_ids")] = getattr(getattr(module, "config", None), "pad_token_id", None) or 0
    whole = padding.expand(count, *parts[0].shape[1:-1], longest).clone()
    start = 0
    for part in parts:
        whole[start : start + len(part), ..., : part.shape[-1]] = part
        start += len(part)
    return whole


def _workers(split: InputSplit) -> int:
    """Return the number of loader processes; only images are slow enough to read to need them."""
    is_much = split.items == "images" and len(split) > BATCH
    return min(_MOST_WORKERS, count_cores()) if is_much else 0


def network_sources(splits: Iterable[Split]) -> list[Source]:
    """Return the user's inputs of some splits' features as recorded, with the network's file as it is now.

    Data are checked when they are read. A network edited since extraction is another input: fits of it are stale, and
    need new features to be refitted.
    """
    found: dict[str, Source] = {}
    for split in splits:
        header = split.content.header
        if header is None:
            continue
        for entry in header.inputs:
            if entry.get("is_artifact", True):
                continue
            path, digest = header.input_path(entry), str(entry["content_digest"])
            if entry["role"] == "model" and path.is_file():
                digest = f"sha256:{file_sha256(path)}"
            found[entry["role"]] = Source(entry["role"], path, digest, is_artifact=False)
    return list(found.values())


_LOOKED_AT = 1024  # texts searched for the longest, to plan memory
_CODE = "py"  # data kind read by the user's code
_WHOLE, _APART = (
    "whole",
    "apart",
)  # an adapter merged into the network, as for features; or beside it


@dataclass(frozen=True)
class NetworkSplit(Split):
    """A split whose features are the network's inputs.

    Attributes:
        inputs: (N, D) float32, one flat row per example, see read_inputs; on the device if they fit, else on the CPU.
        network_layout: layout of the chosen parameters, bound to the network.
    """

    inputs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    network_layout: ModuleLayout | None = None

    @property
    def layout(self) -> ModuleLayout:  # type: ignore[override]
        """Return the layout of the chosen parameters."""
        assert self.network_layout is not None
        return self.network_layout

    @property
    def is_last_layer(self) -> bool:
        """Return False."""
        return False

    @property
    def stored(self) -> Tensor:
        """Return the inputs (N, D)."""
        return self.inputs

    def check_fits(self, layout: Any) -> None:
        """Check that a posterior with this layout fits the split's inputs and classes.

        Raises:
            DataError: it does not.
        """
        fits = layout.takes_any_length or layout.num_features == self.layout.num_features
        if not fits or layout.num_classes != len(self.content.classes):
            raise DataError(
                f"the posterior takes {layout.num_features} inputs and {layout.num_classes} classes, but split "
                f"{self.content.name!r} has {self.layout.num_features} and {len(self.content.classes)}",
                code="wrong_layout",
            )

    def take(self, rows: Tensor) -> NetworkSplit:
        """Return the split restricted to the rows (n,)."""
        found = super().take(rows)
        assert isinstance(found, NetworkSplit)
        return replace(found, inputs=self.inputs[rows.to(self.inputs.device)])

    def features(self, device: torch.device) -> Tensor:
        """Return the inputs (N, D) on the device."""
        return self.inputs.to(device)

    def resident(self, device: torch.device) -> Tensor:
        """Return the inputs where they are; blocks move to the device on use."""
        return self.inputs

    def feature_blocks(self, device: torch.device, rows: slice = slice(None)) -> Iterator[Tensor]:
        """Yield blocks (n, D) of all or some inputs on the device."""
        return (block.to(device) for block in self.inputs[rows].split(rows_of_inputs(self.layout)))

    def logits(self, point: Point, device: torch.device) -> Tensor:
        """Return the logits (N, K) at a point, on the device."""
        stacked = point.theta.to(device, torch.float32).unsqueeze(0)
        with torch.no_grad():
            return torch.cat([self.layout.logits(block, stacked)[0] for block in self.feature_blocks(device)])

    def target(self, prior: Prior, device: torch.device) -> NetworkTarget:  # type: ignore[override]
        """Return the log posterior of the chosen parameters given this split."""
        return NetworkTarget(self.inputs, self.labels(device), self.layout, prior)

    def head(self) -> Tensor | None:
        """Return theta (P,) float64 of the trained network."""
        return self.layout.trained().cpu()

    def start(self) -> Tensor:
        """Return the starting point of the mode search: the trained network."""
        return self.layout.trained().cpu()


def share_weights(apart: torch.nn.Module, merged: torch.nn.Module) -> None:
    """Use the merged network's tensors for all weights that its adapter does not change; of large models, nearly all."""
    known = dict(merged.named_parameters())
    for name, value in apart.named_parameters():
        own = known.get(name)
        if own is not None and own.shape == value.shape and torch.equal(own.cpu(), value):
            value.data = own.data


def rows_of_inputs(layout: ModuleLayout) -> int:
    """Return the number of examples one draw predicts at once."""
    return max(1, PREDICTION_BYTES // (4 * (layout.widest + layout.num_features)))


@dataclass
class NetworkReader:
    """The run's network and the inputs of its splits, each opened on first use.

    Attributes:
        trusts_code: whether code named in the records may run.
        opener: returns a network that is already open elsewhere.
    """

    run: Run
    trusts_code: bool
    opener: Callable[[], RecordedNetwork] | None = None
    _opened: dict[str, tuple[ModuleNetwork, Head]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Run, options: LayersOptions) -> NetworkReader:
        """Create the reader from the options."""
        return cls(run, options.trust_code)

    @cached_property
    def recorded(self) -> RecordedNetwork:
        """Return the recorded network.

        Raises:
            Untrusted: the network is code that is not trusted.
            DataError: the network has changed.
        """
        if self.opener is not None:
            return self.opener()
        header = network_header(self.run)
        spec = header.provenance.get("params", {}).get("model")
        try:
            return open_recorded(RecordedNetwork, self.run, header, spec if self.trusts_code else None)
        except Untrusted as error:
            hint = "if the code is yours or you have read it, add \0trust_code\0"
            raise Untrusted(error.message, hint=hint) from None

    def network(self, example: InputSplit) -> tuple[ModuleNetwork, Head]:
        """Return the network as a function of inputs and parameters, and its head; built once.

        Raises:
            DataError: there is nothing but the last layer.
        """
        if _WHOLE not in self._opened:
            recorded = self.recorded
            head = recorded.network.head(example)
            recorded.check_head(head)
            if head is None:
                raise DataError("the run's inputs are features, so the run has only a last layer", code="no_network")
            from bnncli.models.huggingface import use_plain_attention

            module = recorded.network.module
            if self.run.network_device != self.run.device:  # features of other inputs are computed there
                module = copy.deepcopy(module)
            module = use_plain_attention(module.eval().requires_grad_(False))
            first = next(example.take(np.arange(1)).batches(1)).inputs
            names = tuple(first) if isinstance(first, dict) else ()
            features_of = partial(pass_to_head, head)
            self._opened[_WHOLE] = ModuleNetwork(module, _Logits(head), names, has_tokens(first), features_of), head
        return self._opened[_WHOLE]

    def chosen(self, example: InputSplit, pattern: str) -> tuple[ModuleNetwork, Head]:
        """Return network and head for the parameters a pattern names, keeping an adapter separate if needed.

        Raises:
            UsageError: the pattern matches no parameter.
        """
        network, head = self.network(example)
        try:
            choose_parameters(network.module, pattern)
        except UsageError:
            saved = self.recorded.network.saved
            if not isinstance(saved, AdaptedModel):
                raise
            if _APART not in self._opened:
                from bnncli.models.huggingface import use_plain_attention

                apart = saved.build_apart()
                share_weights(apart, network.module)
                module = use_plain_attention(apart.to(self.run.device))
                self._opened[_APART] = replace(network, module=module, _states={}), head
            return self._opened[_APART]
        return network, head

    def network_of(self, pattern: str) -> ModuleNetwork:
        """Return the network that has the parameters a pattern names."""
        name = next(iter(self.run.folder.splits()))
        split = load_split(self.run, name)
        assert split.content.header is not None
        return self.chosen(self.input_split(split, split.content.header), pattern)[0]

    def layout(self, split: Split, pattern: str) -> ModuleLayout:
        """Return the layout of the parameters a pattern names, from one example (of texts, the longest of a sample).

        Raises:
            DataError: see `split`.
        """
        assert split.content.header is not None
        example = self.input_split(split, split.content.header)
        network, head = self.chosen(example, pattern)
        first = read_inputs(example.longest(_LOOKED_AT), network.module)
        return self._layout(split, pattern, network, head, move_if_room(first, self.run.device))

    def _layout(self, split: Split, pattern: str, network: ModuleNetwork, head: Head, inputs: Tensor) -> ModuleLayout:
        """Return the layout for inputs (n, ...), checking derivatives at two of them."""
        layout = ModuleLayout.of(
            network,
            pattern,
            num_outputs=head.layout.num_outputs,
            input_shape=tuple(inputs.shape[1:]),
            likelihood_name=split.content.likelihood,
        )
        if pattern != STATE:  # buffers are never differentiated
            check_derivatives(layout, inputs[:2].flatten(1))
        return layout

    def split(self, split: Split, pattern: str) -> NetworkSplit:
        """Read a split's inputs and return it with the layout of the parameters a pattern names.

        Raises:
            MissingInput: the data have moved.
            DataError: the data have changed, or the network cannot be differentiated or does not reproduce its extracted logits.
        """
        header = split.content.header
        assert header is not None
        example = self.input_split(split, header)
        network, head = self.chosen(example, pattern)
        inputs = move_if_room(read_inputs(example, network.module, progress=self.run.console), self.run.device)
        layout = self._layout(split, pattern, network, head, inputs)
        found = NetworkSplit(
            split.content, split.source, split.checkpoint, split.classes_source,
            inputs=inputs.flatten(1), network_layout=layout,
        )  # fmt: skip
        if split.content.check_logits is not None:
            tolerance = TOLERANCE if self.recorded.network.autocast is None else AUTOCAST_TOLERANCE
            stored = split.content.check_logits[:CHECK_ROWS]
            check_logits(layout, found.inputs, stored, name=split.content.name, tolerance=tolerance)
        return found

    def given_inputs(self, split: InputSplit, layout: ModuleLayout) -> Tensor:
        """Return inputs (N, D), flat, of examples outside the run's splits, for a posterior with this layout.

        Raises:
            DataError: the network takes other inputs.
        """
        inputs = read_inputs(split, self.recorded.network.module, progress=self.run.console)
        if not layout.takes_any_length and tuple(inputs.shape[1:]) != layout.input_shape:
            raise DataError(
                f"the inputs have shape (N, {', '.join(map(str, inputs.shape[1:]))}), but the posterior takes "
                f"(N, {', '.join(map(str, layout.input_shape))})",
                code="wrong_inputs",
            )
        return inputs.flatten(1)

    def input_split(self, split: Split, header: Header) -> InputSplit:
        """Open the rows of the data that the split's features were extracted from, as recorded.

        Raises:
            Untrusted: they are read by untrusted code.
            MissingInput: they have moved.
            DataError: they have changed.
        """
        spec = str(header.provenance.get("source", ""))
        kind, _, place = spec.partition(":")
        if kind == _CODE and not self.trusts_code:
            raise Untrusted(
                f"the inputs of split {split.content.name!r} are read by code: {spec!r}",
                hint="if the code is yours or you have read it, add \0trust_code\0",
            )
        again = self.run.remake(header, force=True) or "extract-features with \0force\0"
        try:
            opened = load_input_split(
                spec, name=split.content.name, preprocess=self.recorded.preprocess, takes_any_labels=True
            )
        except MissingInput as error:
            message = f"{error.message}; the features of split {split.content.name!r} were extracted from it"
            hint = (
                "run the command in the folder where they were extracted, or extract them again from the data's "
                f"current location: {again}"
            )
            raise MissingInput(message, hint=hint, path=error.path) from None
        rows = np.asarray(split.content.sample_id)
        if len(rows) and int(rows.max()) >= len(opened.dataset):
            raise DataError(f"{spec} has fewer examples than when the features were extracted", code="stale_input")
        chosen = replace(opened, rows=rows, is_labeled=False, shift=shift_of(header.provenance.get("params", {})))
        recorded = header.meta.get("order_digest")
        if recorded is not None and chosen.order_digest != recorded:
            message = f"{place} has changed since {header.path} was created from it"
            raise DataError(message, code="stale_input", hint=again, path=header.path)
        return chosen


@dataclass(frozen=True)
class _Logits:
    """Select the logits from a network's output: the output of its head, before softmax or sigmoid."""

    head: Head

    def __call__(self, run: Callable[[], Any]) -> Tensor:
        form = self.head.form
        if form is None:
            output = logits_of(run())
        else:
            with nullcontext() if form.link == "none" else record_link_inputs():
                returned = run()
            output = choose_output(returned, form.output) if form.output else logits_of(returned)
            if form.link != "none":
                output = find_logits_before(output, form.link)
        return output.reshape(len(output), -1)
