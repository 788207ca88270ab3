"""A network with a checkpoint's weights: loaded when it is first needed, its head found once, its features collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from bnncli import data
from bnncli.checkpoints.load import Checkpoint, load_checkpoint
from bnncli.errors import UsageError
from bnncli.extraction.features import Extracted, Head, collect, extract, find_last_linear, head_of
from bnncli.networks import load_network
from bnncli.options.extract_features import NO_NETWORK
from bnncli.run.session import Run


@dataclass
class Network:
    """A network by its name, filled with the run's checkpoint.

    Attributes:
        spec: a built-in name, package.module:factory or file.py:factory; the last two run the user's code.
        arguments: of the network, each as KEY=VALUE.
        last_layer: name of the last linear layer; None for the one that is called last.
        checkpoint: None where inputs are the features.
    """

    run: Run
    spec: str
    arguments: Sequence[str]
    last_layer: str | None
    checkpoint: Checkpoint | None
    _head: tuple[Head | None] | None = None

    @classmethod
    def of(cls, run: Run, spec: str, arguments: Sequence[str], last_layer: str | None) -> Network:
        """The network, its checkpoint read and checked; what is odd about that is warned of."""
        if spec == NO_NETWORK:
            return cls(run, spec, arguments, last_layer, None)
        checkpoint = load_checkpoint(run.checkpoint_path, progress=run.console)
        for note in checkpoint.notes:
            run.console.warn(note)
        return cls(run, spec, arguments, last_layer, checkpoint)

    @cached_property
    def module(self) -> torch.nn.Module:
        """The network with the checkpoint's weights, on the device."""
        arguments = {}
        for text in self.arguments:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise UsageError(f"\0model_arg\0: expected KEY=VALUE, got {text!r}")
            arguments[key] = value
        state = None if self.checkpoint is None else self.checkpoint.state
        return load_network(self.spec, arguments, state).to(self.run.device)

    def head(self, example: data.InputSplit) -> Head | None:
        """The last linear layer: as named, or the one called last on the first row of a split; None for flatten."""
        if self._head is None:
            self._head = (self._find_head(example),)
        return self._head[0]

    def _find_head(self, example: data.InputSplit) -> Head | None:
        if self.spec == NO_NETWORK:
            return None
        if self.last_layer is not None:
            return head_of(self.module, self.last_layer)
        first = next(example.batches(1, device=self.run.device))
        return head_of(self.module, find_last_linear(self.module, first.inputs))

    def features(
        self, split: data.InputSplit, head: Head | None, *, batch_size: int, dtype: str, num_workers: int = 0
    ) -> Extracted:
        """Features, logits and labels of a whole split, on the CPU; raises as `extract` does.

        Args:
            dtype: what features are stored in, float32 or float16.
        """
        batches = extract(
            self.module,
            head,
            split,
            batch_size=batch_size,
            num_workers=num_workers,
            device=self.run.device,
            dtype=getattr(torch, dtype),
            progress=self.run.console,
        )
        return collect(batches, len(split))
