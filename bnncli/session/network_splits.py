"""Splits for posteriors over other layers: a network's inputs in the place of features."""

from __future__ import annotations

import os
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
from bnncli.models.head import Head, before_links, choose_output, logits_before, logits_of
from bnncli.names import listed
from bnncli.numerics.digests import file_sha256
from bnncli.options.shared import LayersOptions
from bnncli.parameters.module import STATE, ModuleLayout, ModuleNetwork, choose_parameters
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT, Progress
from bnncli.session.inputs import PREDICTION_BYTES, RESIDENT_SHARE, Split, load_split
from bnncli.session.network import RecordedNetwork, network_header, open_recorded
from bnncli.session.run import Run
from bnncli.session.splits import shift_of
from bnncli.system.devices import available_memory
from bnncli.system.memory import give_back_freed, require
from bnncli.targets.network import NetworkTarget

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.posteriors.point import Point


_AT_ONCE = 32  # examples whose logits are compared in one pass
TOLERANCE = 1e-3  # of logits, in units of 1 + the largest: what other block sizes and releases of torch change
_SAME = 1e-6  # of derivatives both ways, in float64, relative to what is summed
_STEP = 1e-4  # of parameters that seem to have no derivatives
AUTOCAST_TOLERANCE = 0.1  # where features were made in lower precision; here the network computes in float32


def check_logits(layout: ModuleLayout, inputs: Tensor, stored: NDArray, *, name: str, tolerance: float) -> None:
    """Pass when the network gives the logits that it gave extract-features.

    Args:
        layout: bound to the network.
        inputs: (N, D), of the split called `name`.
        stored: (n, K), the logits of its first examples.
        tolerance: of logits, in units of 1 + the largest.

    Raises:
        DataError: it gives others.
    """
    device = layout.trained().device
    theta = layout.trained().float().unsqueeze(0)
    with torch.no_grad():
        blocks = inputs[: len(stored)].split(_AT_ONCE)
        found = [layout.logits(block.to(device), theta)[0].cpu().double() for block in blocks]
    give_back_freed()
    ours, theirs = torch.cat(found).numpy(), np.asarray(stored, dtype=np.float64)
    if layout.likelihood.is_shift_invariant:  # a log-softmax has lost it
        ours, theirs = (one - one.mean(axis=1, keepdims=True) for one in (ours, theirs))
    error = float(np.abs(ours - theirs).max())
    if not error <= tolerance * (1 + float(np.abs(theirs).max())):
        raise DataError(
            f"the network's logits for split {name!r} differ by {error:.3g} from those stored with its features",
            code="stale_input",
            hint="extract the features again, with \0force\0",
        )


def check_derivatives(layout: ModuleLayout, inputs: Tensor) -> None:
    """Pass when the logits of a few inputs (n, D) depend on theta, and torch.func gives their derivatives both ways, in float64.

    Raises:
        DataError: they do not, something in the network has no derivative or no rule for vmap, or the derivatives differ; or a
            parameter moves logits that have no derivative by it, such as one whose outputs are detached.
    """
    with layout.briefly(torch.float64):
        _check_derivatives(layout, inputs)
    give_back_freed()


def _check_derivatives(layout: ModuleLayout, inputs: Tensor) -> None:
    theta = layout.trained()
    inputs = inputs.to(theta.device)
    numbers = torch.arange(1, len(theta) + 1, dtype=theta.dtype, device=theta.device)
    direction = numbers.sin()  # of no kind that a network's symmetries lose

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
    except Exception as error:  # the network is others' code: whatever it raises, it cannot be differentiated
        why = " ".join(str(error).split())[:160]
        raise _refused(f"it cannot be differentiated by torch.func ({type(error).__name__}: {why})") from error
    if not bool((back - forth.sum()).abs() <= _SAME * forth.abs().sum() + _SAME):
        raise _refused("its forward and backward derivatives differ: part of it changes only the gradients")
    if torch.equal(both[0], both[1]):
        raise _refused("its logits do not depend on these parameters")
    (gradient,) = pull(
        torch.arange(1, outputs.numel() + 1, dtype=theta.dtype, device=theta.device).cos().view_as(outputs)
    )
    still = [part for part in layout.parts if not gradient[part.place].any()]
    moved = theta.clone()
    for part in still:  # so little that a unit which is off stays off
        moved[part.place] += _STEP * direction[part.place]
    with torch.no_grad():
        change = (of_all(moved) - outputs).abs().max() if still else outputs.new_zeros(())
    if change > _SAME * _STEP * (1 + outputs.abs().max()):
        names = listed(part.name for part in still)
        raise _refused(
            f"changing {names} changes the network's logits, but their derivative is zero: part of the network "
            "is detached or rounds its values"
        )


def _refused(why: str) -> DataError:
    return DataError(f"\0layers\0: cannot fit a posterior over these parameters: {why}", code="not_differentiable")


BATCH = 512  # examples read at once
_MOST_WORKERS = 8
_HINT = "use fewer rows (SPLIT=SPEC@N), or a machine with more memory"


def read_inputs(split: InputSplit, module: nn.Module, *, progress: Progress = SILENT) -> Tensor:
    """All inputs (N, ...) of a split, float32, on the CPU; texts as packed arguments (N, arguments, longest), token ids as real numbers.

    Args:
        module: the network, whose configuration says what texts are padded with.

    Raises:
        DeviceError: they do not fit in memory.
        DataError: arguments that cannot be packed, or texts that are padded and a network that cannot tell.
    """
    what, task = f"the inputs of {split.name or split.spec}", progress.task(f"read {split.name}".strip(), len(split))
    whole: Tensor | None = None
    packed: list[Tensor] = []
    start = 0
    for batch in split.batches(BATCH, num_workers=_workers(split)):
        part = packed_inputs(batch)
        if isinstance(batch.inputs, dict) and has_tokens(batch.inputs):
            if not packed:
                require(2 * part[0].nbytes * len(split), "cpu", what=what, hint=_HINT)
            packed.append(part)
        else:
            if whole is None:
                require(part[0].nbytes * len(split), "cpu", what=what, hint=_HINT)
                whole = torch.empty((len(split), *part.shape[1:]), dtype=part.dtype)
            if part.shape[1:] != whole.shape[1:]:
                raise _unsupported(f"they have shapes {tuple(whole.shape[1:])} and {tuple(part.shape[1:])}")
            whole[start : start + len(part)] = part
        start += len(part)
        task.advance(len(part))
    return _joined(packed, list(batch.inputs), module) if whole is None else whole


def near(inputs: Tensor, device: torch.device) -> Tensor:
    """The inputs on the device where they leave room there; else where they are: blocks of them travel."""
    return inputs.to(device) if inputs.nbytes <= RESIDENT_SHARE * available_memory(device) else inputs


def packed_inputs(batch: Batch) -> Tensor:
    """A batch as one tensor: as it is, or the network's arguments side by side, (n, arguments, ...).

    Raises:
        DataError: several arguments of different shapes or of real numbers; clips that the network sees each without its padding.
    """
    if batch.lengths is not None and len({*batch.lengths}) > 1:
        raise _unsupported("it processes each example without its padding")
    if not isinstance(batch.inputs, dict):
        return batch.inputs.float()
    parts = list(batch.inputs.values())
    if len({part.shape for part in parts}) > 1 or (len(parts) > 1 and parts[0].is_floating_point()):
        raise _unsupported("it takes several inputs that differ in shape or are not integers")
    return torch.stack([part.float() for part in parts], dim=1)


def has_tokens(inputs: Inputs) -> bool:
    """Whether inputs are token ids, perhaps with what goes with them."""
    parts = inputs.values() if isinstance(inputs, dict) else [inputs]
    return not any(part.is_floating_point() for part in parts)


def _unsupported(why: str) -> DataError:
    message = f"\0layers\0: cannot read the network's inputs as one tensor: {why}; only its last layer is supported"
    return DataError(message, code="unsupported_inputs")


def _joined(parts: list[Tensor], names: list[str], module: nn.Module) -> Tensor:
    """Packed batches as one, each padded behind to the longest of all with what the network takes for padding."""
    longest, count = max(part.shape[-1] for part in parts), sum(map(len, parts))
    is_padded = any(part.shape[-1] != longest for part in parts)
    if is_padded and (getattr(getattr(module, "config", None), "pad_token_id", None) or 0) < 0:
        raise _unsupported("its tokenizer has no padding token")
    if MASK not in names and is_padded:
        raise _unsupported(f"it has no attention mask ({MASK}) for padded texts")
    padding = torch.zeros(len(names), 1, dtype=parts[0].dtype)
    if "input_ids" in names:
        padding[names.index("input_ids")] = getattr(getattr(module, "config", None), "pad_token_id", None) or 0
    whole = padding.expand(count, len(names), longest).clone()
    start = 0
    for part in parts:
        whole[start : start + len(part), :, : part.shape[-1]] = part
        start += len(part)
    return whole


def _workers(split: InputSplit) -> int:
    """Processes that decode images; other data are read faster than they could be handed over."""
    is_much = split.items == "images" and len(split) > BATCH
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if is_much else 0


def network_sources(splits: Iterable[Split]) -> list[Source]:
    """The user's own inputs of some splits' features, as those record them; a network's file as it is now.

    Data are looked at when they are read. A network that was edited since is another input: what was fitted of it is no
    longer up to date, and cannot be fitted again before the features are made anew.
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


_LOOKED_AT = 1024  # texts, of which the longest stands for all where memory is planned
_CODE = "py"  # the kind of data that is read by the user's code
_WHOLE, _APART = (
    "whole",
    "apart",
)  # a network as it made the features, an adapter merged into it; and with that beside it


@dataclass(frozen=True)
class NetworkSplit(Split):
    """A split whose features are the network's inputs.

    Attributes:
        inputs: (N, D) float32, each example flat, as read_inputs gives them; on the CPU, or the device where they fit.
        network_layout: of the chosen parameters, bound to the network.
    """

    inputs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    network_layout: ModuleLayout | None = None

    @property
    def layout(self) -> ModuleLayout:  # type: ignore[override]
        """The chosen parameters'."""
        assert self.network_layout is not None
        return self.network_layout

    @property
    def is_last_layer(self) -> bool:
        """False."""
        return False

    @property
    def stored(self) -> Tensor:
        """The inputs, (N, D)."""
        return self.inputs

    def check_fits(self, layout: Any) -> None:
        """Pass when a posterior with this layout is one for the split's inputs and classes. Raises DataError otherwise."""
        fits = layout.takes_any_length or layout.num_features == self.layout.num_features
        if not fits or layout.num_classes != len(self.content.classes):
            raise DataError(
                f"the posterior takes {layout.num_features} inputs and {layout.num_classes} classes, but split "
                f"{self.content.name!r} has {self.layout.num_features} and {len(self.content.classes)}",
                code="wrong_layout",
            )

    def take(self, rows: Tensor) -> NetworkSplit:
        """Some rows (n,) of it."""
        found = super().take(rows)
        assert isinstance(found, NetworkSplit)
        return replace(found, inputs=self.inputs[rows.to(self.inputs.device)])

    def features(self, device: torch.device) -> Tensor:
        """The inputs (N, D) on the device."""
        return self.inputs.to(device)

    def resident(self, device: torch.device) -> Tensor:
        """The inputs, where they are: blocks of them travel."""
        return self.inputs

    def feature_blocks(self, device: torch.device, rows: slice = slice(None)) -> Iterator[Tensor]:
        """The inputs (n, D) of all examples, or of some, on the device, block by block."""
        return (block.to(device) for block in self.inputs[rows].split(rows_of_inputs(self.layout)))

    def logits(self, point: Point, device: torch.device) -> Tensor:
        """Logits (N, K) under a point, on the device."""
        stacked = point.theta.to(device, torch.float32).unsqueeze(0)
        with torch.no_grad():
            return torch.cat([self.layout.logits(block, stacked)[0] for block in self.feature_blocks(device)])

    def target(self, prior: Prior, device: torch.device) -> NetworkTarget:  # type: ignore[override]
        """The log posterior of the chosen parameters given this split."""
        return NetworkTarget(self.inputs, self.labels(device), self.layout, prior)

    def head(self) -> Tensor | None:
        """theta (P,) float64 of the network as trained."""
        return self.layout.trained().cpu()

    def start(self) -> Tensor:
        """The same: where a search for a mode starts."""
        return self.layout.trained().cpu()


def rows_of_inputs(layout: ModuleLayout) -> int:
    """Examples that one draw predicts at once."""
    return max(1, PREDICTION_BYTES // (4 * (layout.widest + layout.num_features)))


@dataclass
class NetworkReader:
    """The network of a run and the inputs of its splits, each opened when it is first asked for.

    Attributes:
        trusts_code: whether code that the records name may run.
        opener: gives the network, where somebody else has opened it.
    """

    run: Run
    trusts_code: bool
    opener: Callable[[], RecordedNetwork] | None = None
    _opened: dict[str, tuple[ModuleNetwork, Head]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: Run, options: LayersOptions) -> NetworkReader:
        """As the options say."""
        return cls(run, options.trust_code)

    @cached_property
    def recorded(self) -> RecordedNetwork:
        """The network. Raises Untrusted where it is code that nobody trusts, DataError where it has changed."""
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
        """The network as a function of inputs and parameters, and its head; made once.

        Raises:
            DataError: there is none but the last layer.
        """
        if _WHOLE not in self._opened:
            recorded = self.recorded
            head = recorded.network.head(example)
            recorded.check_head(head)
            if head is None:
                raise DataError("the run's inputs are features, so the run has only a last layer", code="no_network")
            from bnncli.models.huggingface import with_plain_attention

            module = with_plain_attention(recorded.network.module.eval().requires_grad_(False))
            first = next(example.take(np.arange(1)).batches(1)).inputs
            names = tuple(first) if isinstance(first, dict) else ()
            features_of = partial(pass_to_head, head)
            self._opened[_WHOLE] = ModuleNetwork(module, _Logits(head), names, has_tokens(first), features_of), head
        return self._opened[_WHOLE]

    def chosen(self, example: InputSplit, pattern: str) -> tuple[ModuleNetwork, Head]:
        """The same for the parameters that a pattern names: with an adapter beside its base where the merged network has them not.

        Raises:
            UsageError: the pattern names none.
        """
        network, head = self.network(example)
        try:
            choose_parameters(network.module, pattern)
        except UsageError:
            saved = self.recorded.network.saved
            if not isinstance(saved, AdaptedModel):
                raise
            if _APART not in self._opened:
                from bnncli.models.huggingface import with_plain_attention

                module = with_plain_attention(saved.build_apart().to(self.run.device))
                self._opened[_APART] = replace(network, module=module, _states={}), head
            return self._opened[_APART]
        return network, head

    def network_of(self, pattern: str) -> ModuleNetwork:
        """The network that has the parameters that a pattern names."""
        name = next(iter(self.run.folder.splits()))
        split = load_split(self.run, name)
        assert split.content.header is not None
        return self.chosen(self.input_split(split, split.content.header), pattern)[0]

    def layout(self, split: Split, pattern: str) -> ModuleLayout:
        """The layout of the parameters that a pattern names, of one example: no other inputs are read but some texts, for the longest.

        Raises:
            DataError: as `split`.
        """
        assert split.content.header is not None
        example = self.input_split(split, split.content.header)
        network, head = self.chosen(example, pattern)
        first = read_inputs(example.longest(_LOOKED_AT), network.module)
        return self._layout(split, pattern, network, head, near(first, self.run.device))

    def _layout(self, split: Split, pattern: str, network: ModuleNetwork, head: Head, inputs: Tensor) -> ModuleLayout:
        """Of inputs (n, ...), two of which the network is differentiated at."""
        layout = ModuleLayout.of(
            network,
            pattern,
            num_outputs=head.layout.num_outputs,
            input_shape=tuple(inputs.shape[1:]),
            likelihood_name=split.content.likelihood,
        )
        if pattern != STATE:  # nobody differentiates by buffers
            check_derivatives(layout, inputs[:2].flatten(1))
        return layout

    def split(self, split: Split, pattern: str) -> NetworkSplit:
        """A split with its inputs read, and the layout of the parameters that a pattern names.

        Raises:
            MissingInput: the data are not where they were.
            DataError: the data have changed, or the network gives other logits than it gave extract-features, or cannot be
                differentiated.
        """
        header = split.content.header
        assert header is not None
        example = self.input_split(split, header)
        network, head = self.chosen(example, pattern)
        inputs = near(read_inputs(example, network.module, progress=self.run.console), self.run.device)
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
        """Inputs (N, D), flat, of examples that are no split of the run, as a posterior with this layout takes them.

        Raises:
            DataError: the network takes others.
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
        """The rows of the data that the split's features are of, opened as its record says.

        Raises:
            Untrusted: they are read by code.
            MissingInput: they are not where they were.
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
    """The logits in what a network returns: the output that its head gives, what goes into its softmax or sigmoid."""

    head: Head

    def __call__(self, run: Callable[[], Any]) -> Tensor:
        form = self.head.form
        if form is None:
            output = logits_of(run())
        else:
            with nullcontext() if form.link == "none" else before_links():
                returned = run()
            output = choose_output(returned, form.output) if form.output else logits_of(returned)
            if form.link != "none":
                output = logits_before(output, form.link)
        return output.reshape(len(output), -1)
