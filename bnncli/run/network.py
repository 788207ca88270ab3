"""A network with a checkpoint's weights: loaded when it is first needed, its head found once, its features collected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from bnncli import data
from bnncli.artifacts.features import CHECK_ROWS
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.models import SavedModel
from bnncli.models.build import load_network, notes_on_names
from bnncli.models.checkpoints import Checkpoint, load_checkpoint
from bnncli.models.features import Extracted, collect, counted, extract
from bnncli.models.head import Head
from bnncli.models.head_search import find_head
from bnncli.numerics.digests import tensor_digest
from bnncli.options.network_inputs import NO_NETWORK
from bnncli.run.checkpoint_record import record_of, record_of_files
from bnncli.run.model_files import arguments_by_name, own_files
from bnncli.run.resumable_features import FeatureStore
from bnncli.run.session import Run
from bnncli.run.turns import Order, in_turns
from bnncli.system.memory import return_large_blocks
from bnncli.system.workers import crew


@dataclass
class Network:
    """A network by its name, filled with the run's checkpoint.

    Attributes:
        spec: a built-in name, KIND:PLACE, package.module:factory or file.py:factory; the last two run the user's code.
        arguments: of the network, each as KEY=VALUE.
        last_layer: name of the last layer; None for the one that is found.
        checkpoint: None where inputs are the features, and where a model has weights of its own.
        saved: the model of KIND:PLACE.
        output: of the network's outputs, the one that are the logits; None for the one that is found.
        autocast: what it computes in, of bnncli.models.features.AUTOCAST; None for float32.
    """

    run: Run
    spec: str
    arguments: Sequence[str]
    last_layer: str | None
    checkpoint: Checkpoint | None
    saved: SavedModel | None = None
    output: str | None = None
    autocast: str | None = None
    _head: tuple[Head | None] | None = None
    _num_checked: int = 0

    @classmethod
    def of(
        cls,
        run: Run,
        spec: str,
        arguments: Sequence[str],
        last_layer: str | None,
        saved: SavedModel | None,
        output: str | None,
        *,
        state: str | None = None,
    ) -> Network:
        """The network, its checkpoint read and checked; what is odd about that is warned of.

        Args:
            state: which of the checkpoint's weights, where it has several.

        Raises:
            UsageError: one is named, and the network has none but its own weights.
        """
        if spec == NO_NETWORK or own_files(saved, run.checkpoint_path) is not None:
            if state is not None:
                raise UsageError(f"\0state\0: {spec!r} has its own weights, so there is no state to choose")
            return cls(run, spec, arguments, last_layer, None, saved, output)
        checkpoint = load_checkpoint(run.checkpoint_path, wanted=state, progress=run.console)
        for note in checkpoint.notes:
            run.console.warn(note)
        return cls(run, spec, arguments, last_layer, checkpoint, saved, output)

    @cached_property
    def module(self) -> torch.nn.Module:
        """The network with the checkpoint's weights, or its own, on the device."""
        return self._built[0]

    @property
    def record(self) -> dict[str, Any] | None:
        """What provenance says of its weights; None where inputs are the features."""
        return record_of(self.run, self.checkpoint) if self.checkpoint is not None else self._built[1]

    @cached_property
    def _built(self) -> tuple[torch.nn.Module, dict[str, Any] | None]:
        """The network, and the record of its own weights.

        Raises:
            DataError: a file of the model was replaced meanwhile.
        """
        state = None if self.checkpoint is None else self.checkpoint.state
        device = self.run.device
        return_large_blocks()
        if self.saved is None:
            module = load_network(self.spec, arguments_by_name(self.arguments), state)
            return self._noted(module, state).to(device), None
        files = own_files(self.saved, self.run.checkpoint_path) if state is None else None
        if files is None:
            return self._noted(self.saved.build(state), state).to(device), None
        digest, before = files.sha256(self.run.console), files.states()
        module = self.saved.build(None)
        if files.states() != before:
            message = f"a file in {files.folder} was replaced while bnncli read it"
            raise DataError(message, code="input_replaced", hint="run the command again", path=files.folder)
        named: dict[str, Any] = {"": np.array([digest])}  # another tokenizer is another model, with the same weights
        named |= {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        record = record_of_files(
            self.run,
            files,
            kind=self.spec.partition(":")[0],
            file_sha256=digest,
            weights_digest=tensor_digest(named),
        )
        return module.to(device), record

    def _noted(self, module: torch.nn.Module, state: Mapping[str, torch.Tensor] | None) -> torch.nn.Module:
        """The network, once it is said where in the checkpoint its weights were."""
        for note in notes_on_names(state or {}, module):
            self.run.console.info(note)
        return module

    def head(self, example: data.InputSplit) -> Head | None:
        """The last layer: as named, or found on the first rows of a split; None for flatten."""
        if self._head is None:
            self._head = (self._find_head(example),)
        return self._head[0]

    def _find_head(self, example: data.InputSplit) -> Head | None:
        if self.spec == NO_NETWORK:
            return None

        def first(count: int) -> data.Inputs:
            return next(example.batches(count, device=self.run.device)).inputs

        return find_head(self.module, first, layer=self.last_layer, output=self.output)

    def features(
        self,
        split: data.InputSplit,
        head: Head | None,
        *,
        batch_size: int,
        dtype: str,
        num_workers: int = 0,
        store: FeatureStore | None = None,
    ) -> Extracted:
        """Features and labels of a whole split, and the logits that a store keeps, on the CPU; raises as `extract` does.

        The first of a crew has the others compute their turns of the batches.

        Args:
            dtype: what features are stored in, float32 or float16.
            store: where they are collected, and what is there of an interrupted run; none keeps all in memory.
        """
        first_row = 0 if store is None else store.restore()
        num_logits = 0 if store is None else CHECK_ROWS
        own = partial(
            self.batches,
            split,
            head,
            batch_size=batch_size,
            dtype=dtype,
            num_workers=num_workers,
            first_row=first_row,
            num_logits=num_logits,
        )
        if (others := crew()) is None:
            found = own()
        else:
            order = Order.of(split, self.record, first_row=first_row, num_logits=num_logits)
            found = in_turns(own, others, order, len(range(first_row, len(split), batch_size)))
        found = counted(found, split, first_row=first_row, progress=self.run.console)
        return collect(found, len(split)) if store is None else store.collect(found)

    def batches(
        self,
        split: data.InputSplit,
        head: Head | None,
        *,
        batch_size: int,
        dtype: str,
        num_workers: int,
        first_row: int,
        num_logits: int,
        turns: slice = slice(None),
    ) -> Iterator[Extracted]:
        """Features and labels of the batches from first_row on, or of some; arguments and errors as those of `extract`."""
        batches = partial(
            extract,
            self.module,
            head,
            split,
            batch_size=batch_size,
            num_workers=num_workers,
            device=self.run.device,
            dtype=getattr(torch, dtype),
            first_row=first_row,
            num_logits=num_logits,
            autocast=self.autocast,
            turns=turns,
            num_checked=self._num_checked,
        )
        for batch in batches():  # by no name, for what an error would keep
            yield batch
            self._num_checked = max(self._num_checked, min(len(batch.features), 2))
