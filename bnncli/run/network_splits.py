"""Splits as a whole network sees them: its inputs in the place of features, and the chosen parameters in that of the head.

The network and the data are those that the run's features were made by, opened as their records say; logits of the first
examples must be those that extract-features stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bnncli import data
from bnncli.errors import DataError, Untrusted
from bnncli.extraction.form import LINKS
from bnncli.extraction.head import Head, chosen_output, logits_of
from bnncli.machine.memory import require
from bnncli.options.layers import LayersOptions
from bnncli.run.inputs import PREDICTION_BYTES, Split, load_split
from bnncli.run.recorded_network import RecordedNetwork, network_header, open_recorded
from bnncli.run.session import Run
from bnncli.storage.features import CHECK_ROWS
from bnncli.storage.headers import Header
from bnncli.targets.network import NetworkTarget
from bnncli.theta.module import ModuleLayout, ModuleNetwork
from bnncli.theta.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.posteriors.point import Point

_CODE = "py"  # the kind of data that is read by the user's code
_TOLERANCE = 1e-3  # of logits, in units of 1 + the largest: what other block sizes and releases of torch change


@dataclass(frozen=True)
class NetworkSplit(Split):
    """A split whose features are the network's inputs.

    Attributes:
        inputs: (N, D), each example flat: float32, or the packed arguments of texts, int64; on the CPU, or the device where they fit.
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
        if layout.num_features != self.layout.num_features or layout.num_classes != len(self.content.classes):
            raise DataError(
                f"the posterior is for inputs of {layout.num_features} numbers and {layout.num_classes} classes, split "
                f"{self.content.name!r} has {self.layout.num_features} and {len(self.content.classes)}",
                code="wrong_layout",
            )

    def features(self, device: torch.device) -> Tensor:
        """The inputs (N, D) on the device."""
        return self.inputs.to(device)

    def resident(self, device: torch.device) -> Tensor:
        """The inputs, where they are: blocks of them travel."""
        return self.inputs

    def feature_blocks(self, device: torch.device) -> Iterator[Tensor]:
        """The inputs (n, D) on the device, block by block."""
        return (block.to(device) for block in self.inputs.split(rows_of_inputs(self.layout)))

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
    """

    run: Run
    trusts_code: bool

    @classmethod
    def of(cls, run: Run, options: LayersOptions) -> NetworkReader:
        """As the options say."""
        return cls(run, options.trust_code)

    @cached_property
    def recorded(self) -> RecordedNetwork:
        """The network. Raises Untrusted where it is code that nobody trusts, DataError where it has changed."""
        header = network_header(self.run)
        spec = header.provenance.get("params", {}).get("model")
        try:
            return open_recorded(RecordedNetwork, self.run, header, spec if self.trusts_code else None)
        except Untrusted as error:
            hint = "if it is yours, or you have read it, add \0trust_code\0"
            raise Untrusted(error.message, hint=hint) from None

    def network(self, example: data.InputSplit) -> tuple[ModuleNetwork, Head]:
        """The network as a function of inputs and parameters, and its head."""
        recorded = self.recorded
        head = recorded.network.head(example)
        recorded.check_head(head)
        if head is None:
            raise DataError(
                "the run's inputs are its features: there is no network but the last layer", code="no_network"
            )
        module = recorded.network.module.eval().requires_grad_(False)
        first = next(example.take(np.arange(1)).batches(1)).inputs
        names = tuple(first) if isinstance(first, dict) else ()
        return ModuleNetwork(module, _Logits(head), names), head

    @cached_property
    def module_network(self) -> ModuleNetwork:
        """The network as a function of inputs and parameters."""
        name = next(iter(self.run.folder.splits()))
        split = load_split(self.run, name)
        assert split.content.header is not None
        return self.network(self.input_split(split, split.content.header))[0]

    def split(self, split: Split, pattern: str) -> NetworkSplit:
        """A split with its inputs read, and the layout of the parameters that a pattern names.

        Raises:
            DataError: the data have moved or changed, or the network gives other logits than it gave extract-features.
        """
        header = split.content.header
        assert header is not None
        example = self.input_split(split, header)
        network, head = self.network(example)
        inputs = self.inputs(example)
        layout = ModuleLayout.of(
            network,
            pattern,
            num_outputs=head.layout.num_outputs,
            input_shape=tuple(inputs.shape[1:]),
            likelihood_name=split.content.likelihood,
        )
        found = NetworkSplit(
            split.content, split.source, split.checkpoint, split.classes_source, inputs.flatten(1), layout
        )  # fmt: skip
        _check_logits(found, self.run.device)
        return found

    def input_split(self, split: Split, header: Header) -> data.InputSplit:
        """The rows of the data that the split's features are of, opened as its record says."""
        spec = str(header.provenance.get("source", ""))
        kind, _, place = spec.partition(":")
        if kind == _CODE and not self.trusts_code:
            raise Untrusted(
                f"the inputs of split {split.content.name!r} are read by {spec!r}, which is code",
                hint="if it is yours, or you have read it, add \0trust_code\0",
            )
        opened = data.load_split(
            spec, name=split.content.name, preprocess=self.recorded.preprocess, takes_any_labels=True
        )
        rows = np.asarray(split.content.sample_id)
        if len(rows) and int(rows.max()) >= len(opened.dataset):
            raise DataError(f"{spec} has fewer examples than when the features were made", code="stale_input")
        chosen = replace(opened, rows=rows, is_labeled=False)
        recorded = header.meta.get("order_digest")
        if recorded is not None and chosen.order_digest != recorded:
            raise DataError(
                f"{place} is not as it was when {header.path} was made from it",
                code="stale_input",
                hint="extract the features again",
                path=header.path,
            )
        return chosen

    def inputs(self, split: data.InputSplit) -> Tensor:
        """All inputs (N, ...), preprocessed, on the CPU; token ids as packed arguments (N, A, longest).

        Raises:
            DeviceError: they do not fit in memory. DataError: arguments that cannot be packed.
        """
        parts: list[Tensor] = []
        for batch in split.batches(512):
            part = _packed(batch.inputs)
            if not parts:
                require(part[0].nbytes * len(split), "cpu", what=f"the inputs of {split.name}", hint="take fewer rows")
            parts.append(part)
        longest = max(part.shape[-1] for part in parts)
        if any(part.shape[-1] != longest for part in parts):
            parts = [torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts]
        return torch.cat(parts)


@dataclass(frozen=True)
class _Logits:
    """The logits in what a network returns: the output that its head gives, a softmax or sigmoid undone."""

    head: Head

    def __call__(self, returned: Any) -> Tensor:
        form = self.head.form
        if form is None:
            output = logits_of(returned)
        else:
            output = chosen_output(returned, form.output) if form.output else logits_of(returned)
            output = LINKS[form.link].scale(output)
        return output.reshape(len(output), -1)


def _packed(inputs: data.Inputs) -> Tensor:
    if not isinstance(inputs, dict):
        return inputs
    shapes = {tuple(part.shape) for part in inputs.values()}
    if len(shapes) > 1 or any(part.is_floating_point() for part in inputs.values()):
        raise DataError(
            "\0layers\0: the network takes several inputs of different shapes, or of real numbers, which is for the last layer alone",
            code="unsupported_inputs",
        )
    return torch.stack([part.long() for part in inputs.values()], dim=1)


def _check_logits(split: NetworkSplit, device: torch.device) -> None:
    """Pass when the network gives the logits that it gave extract-features. Raises DataError otherwise."""
    stored = split.content.check_logits
    if stored is None:
        return
    rows = min(len(stored), CHECK_ROWS)
    theta = split.layout.trained().to(device, torch.float32).unsqueeze(0)
    with torch.no_grad():
        found = split.layout.logits(split.inputs[:rows].to(device), theta)[0].cpu().double().numpy()
    expected = np.asarray(stored[:rows], dtype=np.float64)
    if split.layout.likelihood.is_shift_invariant:  # a log-softmax has lost it
        found, expected = (one - one.mean(axis=1, keepdims=True) for one in (found, expected))
    error = float(np.abs(found - expected).max())
    if not error <= _TOLERANCE * (1 + float(np.abs(expected).max())):
        raise DataError(
            f"the network gives other logits for split {split.content.name!r} than when its features were made: "
            f"they differ by {error:.3g}",
            code="stale_input",
            hint="extract the features again, with \0force\0",
        )
