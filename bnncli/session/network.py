"""Load the run's network on first use, find its head once, and collect features resumably."""

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
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.resume import BUFFER_BYTES, RecordFile, remove_state, rows_path
from bnncli.data.pixels import ImageCounts, Preprocess
from bnncli.data.splits import Inputs, InputSplit
from bnncli.errors import BnnError, DataError, Exit, Interrupted, Untrusted, UsageError, machine_error
from bnncli.lazy import torch
from bnncli.models import SavedModel, is_kind
from bnncli.models.build import describe_name_mapping, load_network
from bnncli.models.checkpoints import Checkpoint, load_checkpoint
from bnncli.models.features import (
    ExtractedFeatures,
    InputSums,
    PrecisionLoss,
    collect,
    extract,
    move_network,
    track_batches,
)
from bnncli.models.head import Head
from bnncli.models.sharded import checkpoint_sha256
from bnncli.numerics.digests import file_sha256, tensor_digest
from bnncli.options.shared import NO_NETWORK
from bnncli.session.produce import Request, Resumable
from bnncli.session.revisions import is_another
from bnncli.session.run import ModelFiles, Run, arguments_by_name, open_requested_model, own_files
from bnncli.system.input_files import open_regular
from bnncli.system.user_code import CodeFolder
from bnncli.system.workers import Team, name_worker, worker_pool
from bnncli.training.loop import State

if TYPE_CHECKING:
    from torch import Tensor


_READ = ("file_sha256", "weights_digest", "format", "selected_key", "stripped_prefixes", "size")


def record_of(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the record of the run's checkpoint after it has been read."""
    read = {name: getattr(checkpoint, name) for name in _READ}
    return {"path": run.checkpoint_path.name, **read, "stripped_prefixes": list(checkpoint.stripped_prefixes)}


def record_of_files(run: Run, files: ModelFiles, *, kind: str, file_sha256: str, weights_digest: str) -> dict[str, Any]:
    """Return the record of a model with its own weights after it has been built.

    Args:
        kind: of the model, hf or another.
        file_sha256: digest of its files before they were read.
        weights_digest: digest of the built network's state dict and of file_sha256.
    """
    digests = {"file_sha256": file_sha256, "weights_digest": weights_digest}
    read: dict[str, Any] = {"format": kind, "selected_key": None, "stripped_prefixes": [], "size": files.size}
    return {**files.to_json(run.folder.root), **digests, **read}


def find_recorded_checkpoint(run: Run, files: ModelFiles | None, *, state: str | None) -> dict[str, Any] | None:
    """Return the checkpoint's record from features extracted with identical files; None if there are none.

    Features with warnings are ignored: the warnings may concern the checkpoint and must be repeated.

    Args:
        files: of a model with its own weights, which then are the checkpoint.
        state: which weights of the checkpoint the features were computed with.

    Raises:
        MissingInput, DeviceError, ReadError: the checkpoint cannot be read, see open_regular.
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
    """Return the complete checkpoint records in the run's features, with the current location."""
    found = []
    for name in run.folder.splits():
        try:
            header = read_header(run.folder.features(name))
            is_of_use = header.kind == "features" and header.provenance.get("warnings") == [] and not is_another(header)
        except BnnError:  # reported when that split is loaded
            continue
        record = header.provenance.get("checkpoint")
        is_of_use = is_of_use and header.provenance["params"].get("state") == state
        if is_of_use and record and {*_READ} <= record.keys() and ("files" in record) == ("files" in place):
            found.append(place | {name: record[name] for name in _READ})
    return found


class FeatureStore:
    """Features of one split, with labels and the logits of some batches.

    The state is saved when due, on interruption, and at the end of a split if the command has run that long, so that
    a later interruption does not lose completed splits.

    Args:
        run, request: what the features are for; a state of another request is refused.
        dtype: of the features.
        batch_size: of the network; sums depend on it, so a run only resumes with the same value.
        resume: whether to continue from an existing state.
        save_every: seconds between states; 0 saves after every batch.
        buffer_bytes: features kept in memory; no file is created if all fit.
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
        also = {"device": run.network_device.type, "batch size": str(batch_size)}
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
        """Restore an interrupted run with --resume and return its number of rows; 0 to start from scratch.

        Raises:
            DataError: the state is damaged or belongs to another request.
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
        """Return all rows, restored rows first, and the logits of batches that have them.

        Raises:
            OutputExists, WriteError: features that exceed the buffer cannot be written.
            Interrupted: with the command that resumes.
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
            assert self._rows is not None  # splits are never empty
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
        """Close the store; keep its file only if a state needs it."""
        if self._rows is not None:
            self._rows.close()
            if not self._resumable.is_stored:
                self._rows.remove()

    def remove(self) -> None:
        """Remove state and file after the features are published."""
        self._resumable.remove()
        if self._rows is not None:
            self._rows.remove()
        with suppress(OSError):
            remove_state(rows_path(self._target))  # left by an earlier run that was never resumed

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
        """Return the state to resume from, after flushing its rows to disk."""
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
    """Request from the first process to compute the batches of a split, each worker taking turns.

    Attributes:
        split: its name.
        outline: its outline_digest; must match on all workers.
        weights: digest of the network's weights; must match on all workers.
        first_row, num_logits: see `extract`.
    """

    split: str
    outline: str
    weights: str | None
    first_row: int
    num_logits: int

    @classmethod
    def of(cls, split: InputSplit, record: Mapping[str, Any] | None, *, first_row: int, num_logits: int) -> Order:
        """Return the order for a split and a network with this record."""
        return cls(split.name, split.outline_digest, weights_of(record), first_row, num_logits)

    def check(self, split: InputSplit, record: Mapping[str, Any] | None) -> None:
        """Check that a worker has opened the same split and network.

        Raises:
            DataError: it has not.
        """
        hint = "give all workers the same files, and run the command again"
        if split.outline_digest != self.outline:
            raise DataError(
                f"{split.spec} has different examples here and on worker 0", code="input_replaced", hint=hint
            )
        if weights_of(record) != self.weights:
            raise DataError("the network has different weights here and on worker 0", code="input_replaced", hint=hint)


def weights_of(record: Mapping[str, Any] | None) -> str | None:
    """Return the digest of the weights in a record."""
    return None if record is None else str(record["weights_digest"])


def begin(pool: Team) -> None:
    """Tell the other workers that there is work for the network."""
    pool.told_by_leader(True)


def end(pool: Team) -> None:
    """Tell the other workers that there is no more work."""
    pool.told_by_leader(None)


def has_begun(pool: Team) -> bool:
    """Wait for the first process and return whether there is work."""
    return pool.told_by_leader(None) is not None


def orders(pool: Team) -> Iterator[Order]:
    """Yield the orders of the first process after work has begun."""
    while (order := pool.told_by_leader(None)) is not None:
        yield order


def iterate_in_order(
    batches: Callable[..., Iterator[ExtractedFeatures]], pool: Team, order: Order, num_batches: int
) -> Iterator[ExtractedFeatures]:
    """Yield all batches of an order on the first process: its own and those sent by the other workers.

    Args:
        batches: computes the batches of some `turns`.
        num_batches: of all workers.

    Raises:
        BnnError: the first error of any worker in row order, or a worker has ended.
    """
    pool.told_by_leader(order)
    own = batches(turns=slice(pool.rank, None, pool.size))
    for number in range(num_batches):
        turn = number % pool.size
        found = next(own) if turn == pool.rank else pool.receive(turn)
        if isinstance(found, BnnError):
            raise found
        yield found


def lend(batches: Callable[..., Iterator[ExtractedFeatures]], pool: Team) -> None:
    """Compute this worker's turns of an order and send them to the first process; an error is sent and ends them.

    Args:
        batches: see `in_turns`.
    """
    for found in _or_error(batches(turns=slice(pool.rank, None, pool.size)), pool.rank):
        pool.send(found if isinstance(found, BnnError) else found.detached(), 0)


def _or_error(batches: Iterator[ExtractedFeatures], rank: int) -> Iterator[ExtractedFeatures | BnnError]:
    """Yield the batches, then the expected error that ends them, if any; device errors name the worker."""
    try:
        yield from batches
    except Exception as error:
        known = error if isinstance(error, BnnError) else machine_error(error)
        if known is None:
            raise
        yield name_worker(rank, known) if known.exit in (Exit.DEVICE, Exit.IO) else known


@dataclass
class Network:
    """A network, filled with the run's checkpoint.

    Attributes:
        spec: a built-in name, KIND:PLACE, package.module:factory or file.py:factory; the last two run the user's code.
        arguments: of the network, each as KEY=VALUE.
        last_layer: name of the last layer; None to find it.
        checkpoint: None if inputs are the features, or if the model has its own weights.
        saved: the model of KIND:PLACE.
        output: the network output that holds the logits; None to find it.
        autocast: computation type, from bnncli.models.features.AUTOCAST; None for float32.
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
        """Create the network after reading and checking its checkpoint; warn of anything unusual.

        Args:
            state: which weights of the checkpoint to use if it has several.

        Raises:
            UsageError: `state` is given, but the network only has its own weights.
        """
        if spec == NO_NETWORK or own_files(saved, run.checkpoint_path) is not None:
            if state is not None:
                raise UsageError(f"\0state\0: {spec!r} has its own weights, so there is no state to choose")
            return cls(run, spec, arguments, last_layer, None, saved, output)
        checkpoint = load_checkpoint(run.checkpoint_path, wanted=state, progress=run.console)
        for note in checkpoint.notes:
            run.console.warn(note)
        return cls(run, spec, arguments, last_layer, checkpoint, saved, output)

    @property
    def module(self) -> torch.nn.Module:
        """Return the network on the run's device with the checkpoint's weights, or its own."""
        return move_network(self._built[0], self.run.device)

    @property
    def record(self) -> dict[str, Any] | None:
        """Return the provenance record of the weights; None if inputs are the features."""
        return record_of(self.run, self.checkpoint) if self.checkpoint is not None else self._built[1]

    @cached_property
    def _built(self) -> tuple[torch.nn.Module, dict[str, Any] | None]:
        """Build the network and return it with the record of its own weights.

        Raises:
            DataError: a model file changed while it was read.
        """
        state = None if self.checkpoint is None else self.checkpoint.state
        device = self.run.device
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
        named: dict[str, Any] = {"": np.array([digest])}  # same weights with another tokenizer are another model
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
        """Report which entry of the checkpoint holds the weights, and return the network."""
        for note in describe_name_mapping(state or {}, module):
            self.run.console.info(note)
        return module

    def head(self, example: InputSplit) -> Head | None:
        """Return the last layer, named or found on the first rows of a split; None for flatten."""
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
        """Return features and labels of a whole split and the logits that a store keeps, on the CPU.

        The first worker of a team has the others compute their turns of the batches. Raises as `extract`.

        Args:
            dtype: type of the stored features, float32 or float16.
            store: collects the features and restores an interrupted run; None keeps all in memory.
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
            found = iterate_in_order(own, others, order, len(range(first_row, len(split), batch_size)))
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
        """Yield features and labels of all or some batches from first_row on; arguments and errors as for `extract`."""
        self.run.ran_network = True
        batches = partial(
            extract,
            self._built[0],
            head,
            split,
            batch_size=batch_size,
            num_workers=num_workers,
            device=self.run.network_device,
            dtype=getattr(torch, dtype),
            first_row=first_row,
            num_logits=num_logits,
            autocast=self.autocast,
            turns=turns,
            num_checked=self._num_checked,
        )
        for batch in batches():  # unnamed, so that a traceback does not keep the iterator alive
            yield batch
            self._num_checked = max(self._num_checked, min(len(batch.features), 2))


_PROGRAM = "jit"  # model kind that is a program


class RecordedNetwork:
    """The network that a run's features were extracted with.

    Attributes:
        header: of the split with this record.
        network: filled with the checkpoint's weights.
        preprocess: applied to the inputs.
        dtype: of the stored features.
        folder: folder of the network's code, for later imports; None without code.
    """

    def __init__(self, run: Run, header: Header, params: Mapping[str, Any], code: str | None) -> None:
        self.header, self._code = header, code
        with convert_lookup_errors(header.path):
            layer, self.dtype = header.meta["layer"], str(params["dtype"])
            sizes = {name: params[name] for name in ("mean", "std", "resize", "crop")}
            sizes |= {name: params[name] for name in ("no_exif", "background") if name in params}
            spec, arguments, state = str(params["model"]), list(params["model_arg"]), params.get("state")
        saved = read_saved_model(spec, header)
        self.preprocess = Preprocess.parse(**sizes, transform=None if saved is None else saved.transform)
        self.network = Network.of(run, spec, arguments, layer, saved, params.get("output"), state=state)
        self.network.autocast = params.get("autocast")
        self.folder = CodeFolder(spec) if ":" in spec and not is_kind(spec) else None
        record = self.network.record
        if record is not None and record["weights_digest"] != header.weights_digest:
            raise DataError(f"{header.path} was created from other weights", code="wrong_checkpoint", path=header.path)

    def is_of(self, header: Header, code: str | None) -> bool:
        """Return whether this is the network that the header records, with this code."""
        return (self.header.content_digest, self._code) == (header.content_digest, code)

    def visible(self) -> AbstractContextManager[object]:
        """Return a context in which the network's code can import from its folder."""
        return nullcontext() if self.folder is None else self.folder.visible()

    def check_head(self, head: Any) -> None:
        """Check that the network's last layer is the head of the run's features.

        Raises:
            DataError: it is not.
        """
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
    """Return the header of the run's first usable split; all splits share its network.

    Raises:
        DataError: all splits are stale or damaged.
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
    """Open the network a split was extracted with, checking an already known one again.

    Args:
        named: the caller's name for the network; code only runs if it is named.
        known: from an earlier call; returned if split and code are unchanged.

    Raises:
        DataError: the split has no network, or the code has changed since.
        Untrusted: the network is code that was not named.
        UsageError: another network was named.
    """
    params = header.provenance.get("params", {})
    spec = params.get("model")
    if not isinstance(spec, str):
        raise DataError(
            f"the run {run.checkpoint_path} has no network to compute features with",
            code="no_network",
            hint="its features were computed elsewhere: compute those of other inputs there too; layers other than the "
            "last need a checkpoint, and extract-features with \0model\0",
        )
    if named is None and runs_code(spec):
        raise Untrusted(
            f"bnncli will not run the code of {spec!r} just because the run folder names it",
            hint=f"if the code is yours, name it: bnncli.open({str(run.checkpoint_path)!r}, model={spec!r})",
        )
    if named is not None and named != spec:
        _check_same_code(spec, named)
    code = _check_code(run, header, named or spec) if ":" in spec else None
    if known is not None and known.is_of(header, code):
        return known
    return kind(run, header, {**params, "model": named or spec}, code)


def runs_code(spec: str) -> bool:
    """Return whether opening this network runs foreign code: a factory, a TorchScript program or a plugin kind."""
    kind, colon, _ = spec.partition(":")
    own = {*registry.own_names("models")} - {_PROGRAM} if colon else {*registry.own_names("networks")}
    return kind not in own


def _check_same_code(spec: str, named: str) -> None:
    """Check that two names are the same file's factory or models of one kind.

    Raises:
        UsageError: they are not.
    """
    if is_kind(spec) and named.partition(":")[0] == spec.partition(":")[0]:
        return  # file contents are compared next
    (place, _, factory), (own, _, recorded) = named.rpartition(":"), spec.rpartition(":")
    if not (place.endswith(".py") and own.endswith(".py") and factory == recorded):
        raise UsageError(f"\0model\0: the features of this run come from {spec!r}; got {named!r}")


def _check_code(run: Run, header: Header, named: str) -> str | None:
    """Return the digest of a network's files, checked to be unchanged since extraction; None without files.

    Raises:
        DataError: a file has changed; a warning instead if that is allowed.
    """
    recorded = [entry["content_digest"] for entry in header.inputs if entry["role"] == "model"]
    found = _files_of_model(named, header) if is_kind(named) else _file_of_code(named)
    if found is None:
        return None
    place, digest = found
    if not recorded or recorded == [digest]:
        return digest
    message = f"{place} has changed since {header.path} was created from it"
    if is_kind(named):  # the common folder of several files is not informative
        message = f"the files of {named!r} have changed or moved since {header.path} was created from them"
    if not run.inputs.allow_stale:
        hint = run.remake(header, force=True) or UNKNOWN_MAKER
        raise DataError(message, code="stale_input", hint=hint, path=place)
    run.console.warn(f"{message}; using it anyway (\0allow_stale\0)")
    return digest


def _file_of_code(named: str) -> tuple[Path, str] | None:
    """Return a factory's file and its digest; None for a module name."""
    code = Path(named.rpartition(":")[0])
    return (code, f"sha256:{file_sha256(code)}") if code.suffix == ".py" and code.is_file() else None


def _files_of_model(named: str, header: Header) -> tuple[Path, str] | None:
    """Return the folder of a saved model's files and their digest; None without files."""
    saved = read_saved_model(named, header)
    if saved is None or not saved.files:
        return None
    files = ModelFiles.of(saved.files)
    return files.folder, f"sha256:{files.sha256()}"


def read_saved_model(spec: str, header: Header) -> SavedModel | None:
    """Return the saved model in a feature header's parameters; None for other networks."""
    with convert_lookup_errors(header.path):
        params = header.provenance["params"]
        arguments = list(params["model_arg"])
        asked = {name: params.get(name) for name in ("base_model", "feature_node")}
    return open_requested_model(spec, arguments, **asked)
