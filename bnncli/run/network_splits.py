"""Splits as a whole network sees them: its inputs in the place of features, and the chosen parameters in that of the head.

The network and the data are those that the run's features were made by, opened as their records say; logits of the first
examples must be those that extract-features stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli import data
from bnncli.artifacts.features import CHECK_ROWS
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError, MissingInput, Untrusted, UsageError
from bnncli.lazy import torch
from bnncli.models import Composed
from bnncli.models.features import pass_to_head
from bnncli.models.head import BeforeLinks, Head, chosen_output, logits_before, logits_of
from bnncli.models.huggingface import with_plain_attention
from bnncli.options.layers import LayersOptions
from bnncli.parameters.module import STATE, ModuleLayout, ModuleNetwork, chosen_parameters
from bnncli.parameters.prior import Prior
from bnncli.run.inputs import PREDICTION_BYTES, Split, load_split
from bnncli.run.network_checks import AUTOCAST_TOLERANCE, TOLERANCE, check_derivatives, check_logits
from bnncli.run.network_inputs import has_tokens, near, read_inputs
from bnncli.run.recorded_network import RecordedNetwork, network_header, open_recorded
from bnncli.run.session import Run
from bnncli.run.user_splits import shift_of
from bnncli.targets.network import NetworkTarget

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.posteriors.point import Point

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

    def network(self, example: data.InputSplit) -> tuple[ModuleNetwork, Head]:
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
            module = with_plain_attention(recorded.network.module.eval().requires_grad_(False))
            first = next(example.take(np.arange(1)).batches(1)).inputs
            names = tuple(first) if isinstance(first, dict) else ()
            features_of = partial(pass_to_head, head)
            self._opened[_WHOLE] = ModuleNetwork(module, _Logits(head), names, has_tokens(first), features_of), head
        return self._opened[_WHOLE]

    def chosen(self, example: data.InputSplit, pattern: str) -> tuple[ModuleNetwork, Head]:
        """The same for the parameters that a pattern names: with an adapter beside its base where the merged network has them not.

        Raises:
            UsageError: the pattern names none.
        """
        network, head = self.network(example)
        try:
            chosen_parameters(network.module, pattern)
        except UsageError:
            saved = self.recorded.network.saved
            if not isinstance(saved, Composed):
                raise
            if _APART not in self._opened:
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

    def given_inputs(self, split: data.InputSplit, layout: ModuleLayout) -> Tensor:
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

    def input_split(self, split: Split, header: Header) -> data.InputSplit:
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
            opened = data.load_split(
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
            with nullcontext() if form.link == "none" else BeforeLinks():
                returned = run()
            output = chosen_output(returned, form.output) if form.output else logits_of(returned)
            if form.link != "none":
                output = logits_before(output, form.link)
        return output.reshape(len(output), -1)
