"""The network of a run: loaded when it is first needed, its head found once, its features collected and resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from bnncli import registry
from bnncli.artifacts.features import CHECK_ROWS
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import UNKNOWN_MAKER
from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.resume import BUFFER_BYTES, RecordFile, remove_state, rows_path
from bnncli.data.pixels import ImageCounts, Preprocess
from bnncli.data.splits import Inputs, InputSplit
from bnncli.errors import BnnError, DataError, Exit, Interrupted, Untrusted, UsageError, machine_error
from bnncli.lazy import torch
from bnncli.models import SavedModel, is_kind
from bnncli.models.build import describe_name_mapping, load_network
from bnncli.models.checkpoints import Checkpoint, load_checkpoint
from bnncli.models.features import ExtractedFeatures, InputSums, PrecisionLoss, collect, extract, track_batches
from bnncli.models.head import Head
from bnncli.models.sharded import checkpoint_sha256
from bnncli.numerics.digests import file_sha256, tensor_digest
from bnncli.options.shared import NO_NETWORK
from bnncli.session.produce import Request, Resumable
from bnncli.session.revisions import is_another
from bnncli.session.run import ModelFiles, Run, arguments_by_name, opened_model, own_files
from bnncli.system.input_files import open_regular
from bnncli.system.memory import return_large_blocks
from bnncli.system.user_code import CodeFolder
from bnncli.system.workers import Sending, Team, name_worker, worker_pool
from bnncli.training.loop import State

if TYPE_CHECKING:
    from torch import Tensor


_READ = ("file_sha256", "weights_digest", "format", "selected_key", "stripped_prefixes", "size")


def record_of(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """The record of the run's checkpoint, once it was read."""
    read = {name: getattr(checkpoint, name) for name in _READ}
    return {"path": run.checkpoint_path.name, **read, "stripped_prefixes": list(checkpoint.stripped_prefixes)}


def record_of_files(run: Run, files: ModelFiles, *, kind: str, file_sha256: str, weights_digest: str) -> dict[str, Any]:
    """The record of a model with weights of its own, once it was built.

    Args:
        kind: of the model, hf or another.
        file_sha256: of its files, before they were read.
        weights_digest: of the built network's state dict and that.
    """
    digests = {"file_sha256": file_sha256, "weights_digest": weights_digest}
    read: dict[str, Any] = {"format": kind, "selected_key": None, "stripped_prefixes": [], "size": files.size}
    return {**files.to_json(run.folder.root), **digests, **read}


def recorded_checkpoint(run: Run, files: ModelFiles | None, *, state: str | None) -> dict[str, Any] | None:
    """The record of the run's checkpoint by features that were made with a file of the same bytes; None without any.

    Features that came with warnings do not count: some may be about the checkpoint, and are to be said again.

    Args:
        files: of a model with weights of its own, which are the checkpoint then.
        state: which of the checkpoint's weights the features are of.

    Raises:
        MissingInput, DeviceError, ReadError: the checkpoint cannot be read, as open_regular says.
    """
    if files is not None:
        records = _records(run, files.to_json(run.folder.root), state)
        digest = files.sha256(run.console) if records else None
    else:
        if not run.checkpoint_path.is_dir():
            with open_regular(run.checkpoint_path):
                pass
        records = _records(run, {"path": run.checkpoint_path.name}, state)
        digest = checkpoint_sha256(run.checkpoint_path, run.console) if records else None
    return next((record for record in records if record["file_sha256"] == digest), None)


def _records(run: Run, place: dict[str, Any], state: str | None) -> list[dict[str, Any]]:
    """The records in the run's features that say all that reading the checkpoint again would, with its place as it is now."""
    found = []
    for name in run.folder.splits():
        try:
            header = read_header(run.folder.features(name))
            is_of_use = header.kind == "features" and header.provenance.get("warnings") == [] and not is_another(header)
        except BnnError:  # said where that split is asked for
            continue
        record = header.provenance.get("checkpoint")
        is_of_use = is_of_use and header.provenance["params"].get("state") == state
        if is_of_use and record and {*_READ} <= record.keys() and ("files" in record) == ("files" in place):
            found.append(place | {name: record[name] for name in _READ})
    return found


class FeatureStore:
    """The features of one split, with labels and what logits the batches have.

    A state is stored when it is due, when the run is interrupted, and at the end of a split where the command has gone on
    for as long: what is complete is not done again when a later split is interrupted.

    Args:
        run, request: what the features are for; a state of another request is refused.
        dtype: the features' own.
        batch_size: of the network: sums depend on it, so that a run goes on with the same one alone.
        resume: whether a state that is there is to be continued.
        save_every: seconds between states; 0 saves one after every batch.
        buffer_bytes: features kept in memory; where there are no more of them no file is made.
    """

    def __init__(
        self,
        run: Run,
        request: Request,
        *,
        dtype: torch.dtype,
        batch_size: int,
        resume: bool,
        save_every: float,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        also = {"device": run.device.type, "batch size": str(batch_size)}
        self._resumable = Resumable(run, request, resume=resume, save_every=save_every, also=also)
        self._run, self._target, self._dtype, self._save_every = run, request.target, dtype, save_every
        self._buffer_bytes = buffer_bytes
        self._rows: RecordFile | None = None
        self._parts: dict[str, list[Tensor]] = {}
        self._num_truncated = self._num_converted = 0
        self._loss: PrecisionLoss | None = None
        self._padding: float | None = None
        self._inputs: InputSums | None = None
        self._images = ImageCounts()
        self.num_rows = 0

    def restore(self) -> int:
        """How many rows an interrupted run has left, with --resume; 0 to start afresh.

        Raises:
            DataError: what is there is damaged, or of another request.
        """
        state = self._resumable.restore(lambda state: f" after {int(state['num_rows'])} rows of {self._target.stem}")
        if state is not None:
            self.num_rows, self._num_truncated = int(state["num_rows"]), int(state["num_truncated"])
            self._num_converted = int(state["num_converted"])
            self._images = ImageCounts(*(int(state[name]) for name in ImageCounts._fields))
            self._rows = self._file(int(state["num_features"]))
            self._rows.continue_from(self.num_rows, bytes(state["digest"].tolist()))
            self._parts = {name: [state[name]] for name in ("logits", "labels") if name in state}
            sums = [state[f"inputs.{name}"] for name in InputSums._fields[1:]]
            self._inputs = InputSums(self.num_rows, *sums)
        return self.num_rows

    def collect(self, batches: Iterator[ExtractedFeatures]) -> ExtractedFeatures:
        """All rows, those of an interrupted run before those of the batches; logits of those that have them.

        Raises:
            OutputExists, WriteError: what does not stay in memory cannot be written.
            Interrupted: with the command that goes on.
        """
        with self._resumable.hint():
            try:
                for batch in batches:
                    self._add(batch)
                    self._resumable.offer(self._state)
            except Interrupted:
                if self._rows is not None:
                    self._resumable.offer(self._state, is_last=True)
                raise
            if self._save_every and self._run.seconds >= self._save_every:
                self._resumable.offer(self._state, is_last=True)
            assert self._rows is not None  # no split is empty
            parts = {name: torch.cat(found) for name, found in self._parts.items()}
            rows, labels = self._rows.collected(), parts.get("labels")
            return ExtractedFeatures(
                rows,
                parts.get("logits"),
                labels,
                self._num_truncated,
                self._loss,
                self._padding,
                self._num_converted,
                self._inputs,
                self._images,
            )

    def close(self) -> None:
        """No more rows come: keep their file as long as a state needs it, and not otherwise."""
        if self._rows is not None:
            self._rows.close()
            if not self._resumable.is_stored:
                self._rows.remove()

    def remove(self) -> None:
        """The features are published: neither the state nor the file is needed."""
        self._resumable.remove()
        if self._rows is not None:
            self._rows.remove()
        with suppress(OSError):
            remove_state(rows_path(self._target))  # of an earlier run that nobody went on with

    def _add(self, batch: ExtractedFeatures) -> None:
        if self._rows is None:
            self._rows = self._file(batch.features.shape[1])
        if batch.logits is not None:
            self._parts.setdefault("logits", []).append(batch.logits)
        if batch.labels is not None:
            self._parts.setdefault("labels", []).append(batch.labels)
        self._rows.extend(batch.features)
        self.num_rows += len(batch.features)
        self._num_truncated += batch.num_truncated
        self._num_converted += batch.num_converted
        self._images = self._images.plus(batch.images)
        self._loss = self._loss or batch.loss
        self._inputs = batch.inputs if self._inputs is None else self._inputs.plus(batch.inputs)
        self._padding = batch.padding if self._padding is None else self._padding

    def _state(self) -> State:
        """What an interrupted run goes on from; the rows that it counts are on disk first."""
        assert self._rows is not None
        assert self._inputs is not None
        self._rows.flush()
        numbers = {
            "num_rows": self.num_rows,
            "num_features": self._rows.shape[0],
            "num_truncated": self._num_truncated,
            "num_converted": self._num_converted,
            **self._images._asdict(),
        }
        return {
            **{name: torch.tensor(number) for name, number in numbers.items()},
            **{name: torch.cat(found) for name, found in self._parts.items()},
            **{f"inputs.{name}": value for name, value in self._inputs._asdict().items() if name != "num_rows"},
            "digest": torch.frombuffer(bytearray(self._rows.digest), dtype=torch.uint8),
        }

    def _file(self, num_features: int) -> RecordFile:
        return RecordFile(
            rows_path(self._target),
            self._target,
            shape=(num_features,),
            dtype=self._dtype,
            what="features",
            buffer_bytes=self._buffer_bytes,
        )


class Order(NamedTuple):
    """What the first process asks of the others: the batches of a split, each worker its turns.

    Attributes:
        split: its name. outline: its outline_digest, which must be everybody's.
        weights: digest of the network's, which must be everybody's.
        first_row, num_logits: see `extract`.
    """

    split: str
    outline: str
    weights: str | None
    first_row: int
    num_logits: int

    @classmethod
    def of(cls, split: InputSplit, record: Mapping[str, Any] | None, *, first_row: int, num_logits: int) -> Order:
        """The order for a split, with a network of this record."""
        return cls(split.name, split.outline_digest, weights_of(record), first_row, num_logits)

    def check(self, split: InputSplit, record: Mapping[str, Any] | None) -> None:
        """Pass where a worker has opened the same. Raises DataError where it has not."""
        hint = "give all workers the same files, and run the command again"
        if split.outline_digest != self.outline:
            raise DataError(
                f"{split.spec} has different examples here and on worker 0", code="input_replaced", hint=hint
            )
        if weights_of(record) != self.weights:
            raise DataError("the network has different weights here and on worker 0", code="input_replaced", hint=hint)


def weights_of(record: Mapping[str, Any] | None) -> str | None:
    """Digest of the weights that a record is of."""
    return None if record is None else str(record["weights_digest"])


def begin(crew: Team) -> None:
    """Tell the others that there is work, which takes the network."""
    crew.told_by_leader(True)


def end(crew: Team) -> None:
    """Tell the others that there is no more work."""
    crew.told_by_leader(None)


def has_begun(crew: Team) -> bool:
    """Whether there is work: what the first process tells, once it knows."""
    return crew.told_by_leader(None) is not None


def orders(crew: Team) -> Iterator[Order]:
    """What the first process asks for, one order after another, once work has begun."""
    while (order := crew.told_by_leader(None)) is not None:
        yield order


def in_turns(
    batches: Callable[..., Iterator[ExtractedFeatures]], crew: Team, order: Order, num_batches: int
) -> Iterator[ExtractedFeatures]:
    """All batches of an order, as the first process has them: its own, and those that the others send.

    Args:
        batches: gives those of some `turns`.
        num_batches: of all workers.

    Raises:
        BnnError: what one of them raises, the first in the order of the rows; a worker has ended.
    """
    crew.told_by_leader(order)
    own = batches(turns=slice(crew.rank, None, crew.size))
    for number in range(num_batches):
        turn = number % crew.size
        found = next(own) if turn == crew.rank else crew.receive(turn)
        if isinstance(found, BnnError):
            raise found
        yield found


def lend(batches: Callable[..., Iterator[ExtractedFeatures]], crew: Team) -> None:
    """Compute this worker's turns of an order, and send them to the first process; what fails ends them, and is sent.

    Args:
        batches: as for `in_turns`.
    """
    sending: Sending | None = None
    for found in _or_error(batches(turns=slice(crew.rank, None, crew.size)), crew.rank):
        if sending is not None:
            sending.wait()
        sending = crew.send(found, 0)
    if sending is not None:
        sending.wait()


def _or_error(batches: Iterator[ExtractedFeatures], rank: int) -> Iterator[ExtractedFeatures | BnnError]:
    """The batches, and what an expected error ends them with. What the machine lacks names the worker."""
    try:
        yield from batches
    except Exception as error:
        known = error if isinstance(error, BnnError) else machine_error(error)
        if known is None:
            raise
        yield name_worker(rank, known) if known.exit in (Exit.DEVICE, Exit.IO) else known


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
        for note in describe_name_mapping(state or {}, module):
            self.run.console.info(note)
        return module

    def head(self, example: InputSplit) -> Head | None:
        """The last layer: as named, or found on the first rows of a split; None for flatten."""
        if self._head is None:
            self._head = (self._find_head(example),)
        return self._head[0]

    def _find_head(self, example: InputSplit) -> Head | None:
        from bnncli.models.head_search import find_head

        if self.spec == NO_NETWORK:
            return None

        def first(count: int) -> Inputs:
            return next(example.batches(count, device=self.run.device)).inputs

        return find_head(self.module, first, layer=self.last_layer, output=self.output)

    def features(
        self,
        split: InputSplit,
        head: Head | None,
        *,
        batch_size: int,
        dtype: str,
        num_workers: int = 0,
        store: FeatureStore | None = None,
    ) -> ExtractedFeatures:
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
        if (others := worker_pool()) is None:
            found = own()
        else:
            order = Order.of(split, self.record, first_row=first_row, num_logits=num_logits)
            found = in_turns(own, others, order, len(range(first_row, len(split), batch_size)))
        found = track_batches(found, split, first_row=first_row, progress=self.run.console)
        return collect(found, len(split)) if store is None else store.collect(found)

    def batches(
        self,
        split: InputSplit,
        head: Head | None,
        *,
        batch_size: int,
        dtype: str,
        num_workers: int,
        first_row: int,
        num_logits: int,
        turns: slice = slice(None),
    ) -> Iterator[ExtractedFeatures]:
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


_PROGRAM = "jit"  # the kind of model that is a program


class RecordedNetwork:
    """The network that the features of a run were made by.

    Attributes:
        header: of the split whose record this is.
        network: filled with the checkpoint's weights.
        preprocess: what was done to the inputs.
        dtype: that features are stored in.
        folder: of the code that made it, for what that imports later; None without code.
    """

    def __init__(self, run: Run, header: Header, params: Mapping[str, Any], code: str | None) -> None:
        self.header, self._code = header, code
        with interpreting(header.path):
            layer, self.dtype = header.meta["layer"], str(params["dtype"])
            sizes = {name: params[name] for name in ("mean", "std", "resize", "crop")}
            sizes |= {name: params[name] for name in ("no_exif", "background") if name in params}
            spec, arguments, state = str(params["model"]), list(params["model_arg"]), params.get("state")
        saved = saved_as(spec, header)
        self.preprocess = Preprocess.parse(**sizes, transform=None if saved is None else saved.transform)
        self.network = Network.of(run, spec, arguments, layer, saved, params.get("output"), state=state)
        self.network.autocast = params.get("autocast")
        self.folder = CodeFolder(spec) if ":" in spec and not is_kind(spec) else None
        record = self.network.record
        if record is not None and record["weights_digest"] != header.weights_digest:
            raise DataError(f"{header.path} was created from other weights", code="wrong_checkpoint", path=header.path)

    def is_of(self, header: Header, code: str | None) -> bool:
        """Whether it was made as this header says, of this code."""
        return (self.header.content_digest, self._code) == (header.content_digest, code)

    def visible(self) -> AbstractContextManager[object]:
        """While it runs: the folder of its code is there to import from."""
        return nullcontext() if self.folder is None else self.folder.visible()

    def check_head(self, head: Any) -> None:
        """Pass when the network's last layer is the head that the run's features belong to. Raises DataError otherwise."""
        parts = {} if head is None else {"weight": head.weight, "bias": head.bias}
        digest = tensor_digest({name: part.numpy() for name, part in parts.items() if part is not None})
        if digest != self.header.meta.get("head_digest"):
            raise DataError(
                f"the last linear layer of {self.network.spec!r} is not the head stored in {self.header.path}",
                code="wrong_head",
                hint=self.network.run.remake(self.header, force=True) or UNKNOWN_MAKER,
                path=self.header.path,
            )


def network_header(run: Run) -> Header:
    """The header of the first split of the run that can be used; its network is that of all.

    Raises:
        DataError: all are stale or damaged.
    """
    first: BnnError | None = None
    for name in run.folder.splits():
        try:
            header = read_header(run.folder.features(name))
            run.use(header)
            return header
        except DataError as error:
            first = first or error
    raise first or DataError(f"{run.checkpoint_path} has no features", hint=run.suggest("status"))


Opened = TypeVar("Opened", bound=RecordedNetwork)


def open_recorded(
    kind: type[Opened], run: Run, header: Header, named: str | None, known: Opened | None = None
) -> Opened:
    """The network that a split was made by, as this kind; all is checked again where it is known.

    Args:
        named: what the caller calls it; code is run only if it is named.
        known: the one of an earlier call, given back where split and code are still the same.

    Raises:
        DataError: the split was made by none, or the code has changed since.
        Untrusted: the network is code that nobody named.
        UsageError: another network was named.
    """
    params = header.provenance.get("params", {})
    spec = params.get("model")
    if not isinstance(spec, str):
        raise DataError(
            f"the run {run.checkpoint_path} has no network to compute features with",
            code="no_network",
            hint="its features were computed elsewhere; compute features for these inputs there too",
        )
    if named is None and runs_code(spec):
        raise Untrusted(
            f"bnncli will not run the code of {spec!r} just because the run folder names it",
            hint=f"if the code is yours, name it: bnncli.open({str(run.checkpoint_path)!r}, model={spec!r})",
        )
    if named is not None and named != spec:
        _check_same_code(spec, named)
    code = _checked_code(run, header, named or spec) if ":" in spec else None
    if known is not None and known.is_of(header, code):
        return known
    return kind(run, header, {**params, "model": named or spec}, code)


def runs_code(spec: str) -> bool:
    """Whether opening this network runs code that is not ours: a factory, a TorchScript program, or a kind that others installed."""
    kind, colon, _ = spec.partition(":")
    own = {*registry.own_names("models")} - {_PROGRAM} if colon else {*registry.own_names("networks")}
    return kind not in own


def _check_same_code(spec: str, named: str) -> None:
    """Pass when the same factory of a file, or a model of the same kind, is named by another path. Raises UsageError otherwise."""
    if is_kind(spec) and named.partition(":")[0] == spec.partition(":")[0]:
        return  # whether its files are the same is looked at next
    (place, _, factory), (own, _, recorded) = named.rpartition(":"), spec.rpartition(":")
    if not (place.endswith(".py") and own.endswith(".py") and factory == recorded):
        raise UsageError(f"\0model\0: the features of this run come from {spec!r}; got {named!r}")


def _checked_code(run: Run, header: Header, named: str) -> str | None:
    """Digest of a network's file or files, which are as they were when the features were made; None where there are none.

    Raises:
        DataError: one has changed; where that is allowed, it is warned of.
    """
    recorded = [entry["content_digest"] for entry in header.inputs if entry["role"] == "model"]
    found = _files_of_model(named, header) if is_kind(named) else _file_of_code(named)
    if found is None:
        return None
    place, digest = found
    if not recorded or recorded == [digest]:
        return digest
    message = f"{place} has changed since {header.path} was created from it"
    if is_kind(named):  # the folder that has all of several files says little
        message = f"the files of {named!r} have changed or moved since {header.path} was created from them"
    if not run.inputs.allow_stale:
        hint = run.remake(header, force=True) or UNKNOWN_MAKER
        raise DataError(message, code="stale_input", hint=hint, path=place)
    run.console.warn(f"{message}; using it anyway (\0allow_stale\0)")
    return digest


def _file_of_code(named: str) -> tuple[Path, str] | None:
    """The file of a factory and its digest; None where a module is named."""
    code = Path(named.rpartition(":")[0])
    return (code, f"sha256:{file_sha256(code)}") if code.suffix == ".py" and code.is_file() else None


def _files_of_model(named: str, header: Header) -> tuple[Path, str] | None:
    """The folder of a saved model's files and their digest; None where it has none."""
    saved = saved_as(named, header)
    if saved is None or not saved.files:
        return None
    files = ModelFiles.of(saved.files)
    return files.folder, f"sha256:{files.sha256()}"


def saved_as(spec: str, header: Header) -> SavedModel | None:
    """The saved model that features were made by, as their parameters say; None for other networks."""
    with interpreting(header.path):
        params = header.provenance["params"]
        arguments = list(params["model_arg"])
        asked = {name: params.get(name) for name in ("base_model", "feature_node")}
    return opened_model(spec, arguments, **asked)
