"""Make an artifact: lock, decide, compute, publish. The order is the contract.

Long fits save resume states, so that a killed one continues where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.artifacts.atomic import check_free_space, check_writable, publish_together, remove_dead_temporaries
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import Decision, decide, is_same_file
from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.posteriors import TRAINED_KIND as CHECKPOINT
from bnncli.artifacts.provenance import Source, build_provenance
from bnncli.artifacts.resume import DrawFile, SaveClock, identity_of, read_state, remove_state, state_path, write_state
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import BnnError, DataError, Interrupted, NumericError, OutputExists, UsageError, WriteError
from bnncli.lazy import torch
from bnncli.options.declaration import spelled
from bnncli.session.run import Result, Run, source_json
from bnncli.system import signals
from bnncli.system.memory import bytes_text, give_back_freed, resident_bytes
from bnncli.system.workers import Team, rank_and_size, team
from bnncli.training.loop import State
from bnncli.training.shared_out import StoredStates, number_tensors, split_by_number

if TYPE_CHECKING:
    from torch import Tensor


Publish = Callable[[dict[str, Any], bool], str]


@dataclass(frozen=True)
class Request:
    """One artifact that a command was asked for.

    Attributes:
        role: the name the JSON result gives it, such as laplace or features.test.
        params: the options that change its numbers.
        algo_rev: raised when the same parameters give other numbers than before.
        sources: its direct inputs. checkpoint: the record of the run's checkpoint.
        estimated_bytes: gives the size on disk, for the check before the work.
        estimated_memory: gives what the work takes of memory at its peak beside what the process has before it, bytes; None where
            that is not planned.
        require: passes where the machine has room for the work, and may warn of what it takes; called where there is some.
        begin: passes where the work can begin, as far as can be told before PyTorch is imported for it; not in a dry run.
        why_anew: why what is there is made anew, though with other params than these that are recorded; None: it is refused.
    """

    target: Path
    kind: str
    role: str
    params: Mapping[str, Any]
    algo_rev: int
    sources: Sequence[Source]
    checkpoint: Mapping[str, Any] | None
    estimated_bytes: Callable[[], int]
    require: Callable[[], object] = lambda: None
    begin: Callable[[], object] = lambda: None
    estimated_memory: Callable[[], int | None] = lambda: None
    why_anew: Callable[[Mapping[str, Any]], str | None] = lambda recorded: None


@dataclass(frozen=True)
class Computed:
    """What a computation gives: how to publish it, numbers and lines for people, a negative verdict if any.

    Attributes:
        publish: None on workers that have sent what there is to the first one, which publishes it.
        facts: what the JSON result says of this one output beside its path.
    """

    publish: Publish | None
    metrics: dict[str, Any] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)
    failure: BnnError | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def produce(
    run: Run,
    request: Request,
    compute: Callable[[], Computed],
    *,
    when_fresh: Callable[[Header], Computed] | None = None,
) -> Result:
    """The result of one request: up to date, computed, replaced or planned.

    Args:
        compute: does the work; called with the lock held, only when there is work.
        when_fresh: metrics, summary and verdict of an artifact that is already there.

    Raises:
        BnnError: whatever the decision, the lock, the work or the writing raise; nothing is published then.
    """
    if run.write.dry_run:
        decision = _decide(run, request)
        if decision.action != "skip":
            request.require()
            check_writable(request.target.parent)
            check_free_space(request.target.parent, request.estimated_bytes())
        return _planned(run, request, decision)
    ready = ready_where_nothing_can_be_written(run, request, when_fresh)
    if ready is not None:
        return ready
    with artifact_lock(run.folder.lock(request.target), wait=run.lock.wait, poll=run.console.poll):
        return make(run, request, compute, when_fresh=when_fresh)


def ready_where_nothing_can_be_written(
    run: Run, request: Request, when_fresh: Callable[[Header], Computed] | None = None
) -> Result | None:
    """The result of a request that is up to date in a folder that cannot be written: it needs no lock. Else None.

    Raises:
        OutputExists: the folder cannot be written, and there is work.
    """
    try:
        check_writable(request.target.parent)
    except OutputExists:
        decision = _decide(run, request)
        if decision.action == "skip" and decision.header is not None:
            return _up_to_date(run, request, decision.header, when_fresh)
        raise
    return None


def make(
    run: Run,
    request: Request,
    compute: Callable[[], Computed],
    *,
    when_fresh: Callable[[Header], Computed] | None = None,
) -> Result:
    """The result of one request whose lock is held; arguments and errors as those of `produce`."""
    remove_dead_temporaries(request.target.parent)
    decision = _decided_together(run, request)
    if decision.action == "skip" and decision.header is not None:
        return _up_to_date(run, request, decision.header, when_fresh)
    request.require()
    if decision.action == "replace":
        run.console.info(f"{request.target}: replacing it ({decision.why})")
    check_free_space(request.target.parent, request.estimated_bytes())
    request.begin()
    run.console.debug(
        f"computing on {run.device}{expected(request.estimated_memory())}"
    )  # which sets threads and determinism, before the work
    start = time.monotonic()
    computed = compute()
    with signals.time_limit(None):  # what is done is kept, however late it is
        return _published(run, request, decision, computed, seconds=time.monotonic() - start)


def _published(run: Run, request: Request, decision: Decision, computed: Computed, *, seconds: float) -> Result:
    """The result of work that is done, once it is published."""
    run.console.poll("publishing")
    provenance = build_provenance(
        request.target,
        command=run.line.words(),
        params=request.params,
        algo_rev=request.algo_rev,
        inputs=request.sources,
        checkpoint=request.checkpoint,
        environment=run.environment(),
        seconds=seconds,
        # What to run is said with the path that was given; an artifact names no folder but in its command.
        warnings=[text.replace(str(run.checkpoint_path), run.checkpoint_path.name) for text in run.console.warnings],
    )
    _check_sources(request.sources)
    digest = _published_together(computed, provenance, may_replace=decision.action == "replace")
    run.followed.clear()
    action = "replaced" if decision.action == "replace" else "computed"
    return _result(request, action, digest, computed)


def _decided_together(run: Run, request: Request) -> Decision:
    """The first worker's decision, which holds the lock: before it, the others may see what is about to change."""
    if (others := team()) is None:
        return _decide(run, request)
    told = others.told_by_leader(replace(_decide(run, request), header=None) if others.is_leader else None)
    return replace(told, header=_decide(run, request).header) if told.action == "skip" else told


def _published_together(computed: Computed, provenance: dict[str, Any], *, may_replace: bool) -> str:
    """The digest of what was published. Raises NumericError where workers have not come to the same."""
    digest = computed.publish(provenance, may_replace) if computed.publish is not None else ""
    if (others := team()) is None:
        return digest
    told: str = others.told_by_leader(digest)
    if computed.publish is not None and told != digest:
        raise NumericError(
            "this worker's result differs from worker 0's; worker 0's result was written",
            hint="run all workers on the same kind of device with the same libraries",
        )
    return told


def expected(memory: int | None) -> str:
    """What the process has of memory, and what the work will take, bytes; nothing where that is not planned."""
    if memory is None:
        return ""
    give_back_freed()
    return (
        f"; the process uses {bytes_text(resident_bytes())} of memory, the work needs about {bytes_text(memory)} more"
    )


def _decide(run: Run, request: Request) -> Decision:
    if request.kind != CHECKPOINT and is_same_file(request.target, run.checkpoint_path):
        raise UsageError(
            f"the output {request.target} would overwrite the checkpoint; choose another with \0name\0 or \0out\0"
        )
    return decide(
        request.target,
        kind=request.kind,
        params=request.params,
        algo_rev=request.algo_rev,
        sources=request.sources,
        weights_digest=request.checkpoint["weights_digest"] if request.checkpoint else None,
        force=run.write.force,
        why_anew=request.why_anew,
        another="\0name\0 NAME" if run.naming.out is None else "another \0out\0",
    )


def _check_sources(sources: Sequence[Source]) -> None:
    """An input that was replaced while the work ran makes the work worthless."""
    for source in sources:
        if source.is_artifact and read_header(source.path).content_digest != source.content_digest:
            message = f"{source.path} was replaced while this command ran; nothing was written"
            raise DataError(message, code="input_replaced", hint="run the command again", path=source.path)


def _planned(run: Run, request: Request, decision: Decision) -> Result:
    action = {"skip": "skip (up to date)", "compute": "compute", "replace": f"replace ({spelled(decision.why)})"}[
        decision.action
    ]
    size = request.estimated_bytes()
    memory = None if decision.action == "skip" else request.estimated_memory()
    disk = f"{max(1, size >> 20)} MiB"
    takes = (
        f"about {disk}" if memory is None else f"needs about {max(1, memory >> 20)} MiB of memory and {disk} of disk"
    )
    lines = [f"{action}: {request.target} ({takes}, on {run.device_name})"]
    lines += [f"  from {source.role}: {source.path} {source.content_digest[:27]}" for source in request.sources]
    planned = "skip" if decision.action == "skip" else decision.action
    output: dict[str, Any] = {
        "role": request.role,
        "path": str(request.target),
        "planned": planned,
        "estimated_bytes": size,
    }
    if memory is not None:
        output["estimated_memory_bytes"] = memory
    return Result("planned", [output], [source_json(source) for source in request.sources], lines=lines)


def _up_to_date(run: Run, request: Request, header: Header, when_fresh: Callable[[Header], Computed] | None) -> Result:
    nothing = Computed(
        publish=lambda provenance, may_replace: header.content_digest, metrics=header.meta.get("metrics", {})
    )
    with interpreting(header.path):
        computed = when_fresh(header) if when_fresh else nothing
    run.console.info(f"{request.target}: up to date")
    return _result(request, "up_to_date", header.content_digest, computed)


def _result(request: Request, action: str, digest: str, computed: Computed) -> Result:
    output = {"role": request.role, "path": str(request.target), "content_digest": digest, **computed.facts}
    return Result(
        action,
        [output],
        [source_json(source) for source in request.sources],
        metrics=computed.metrics,
        summary=computed.summary,
        failure=computed.failure,
    )


class Work(NamedTuple):
    """One artifact of several: what was asked for, and what makes it."""

    request: Request
    compute: Callable[[], Computed]


def produce_together(
    run: Run,
    works: Sequence[Work],
    *,
    also: Callable[[], list[Result]],
    before: Callable[[Sequence[Path]], None],
) -> list[Result]:
    """The result of each request; what they make takes its names at the end, the last first.

    Args:
        also: produces what else belongs with them, when they are made; not in a dry run.
        before: called with the files that are about to take their names, all of them whole.

    Raises:
        BnnError: as produce does; nothing is published then, unless the error comes while names are taken.
    """
    if run.write.dry_run:
        return [produce(run, *work) for work in works]
    ready = [ready_where_nothing_can_be_written(run, work.request) for work in works]
    open_works = [place for place, result in enumerate(ready) if result is None]
    with ExitStack() as locks:
        # In the order of their names: two commands that wait for each other's would wait for ever.
        for lock in sorted({run.folder.lock(works[place].request.target) for place in open_works}):
            locks.enter_context(artifact_lock(lock, wait=run.lock.wait, poll=run.console.poll))
        with publish_together(before):
            for place in open_works:
                ready[place] = make(run, *works[place])
            ready += also()
    return [result for result in ready if result is not None]


_DIGEST = "draws_digest"  # of the draws in the file beside the state


class Resumable:
    """The state of the work on one artifact.

    Args:
        run, request: what the work is for; a state of another request is refused.
        resume: whether a state that is there is to be continued.
        save_every: seconds between states; 0 saves every one that is offered.
        also: what else must be as it was, by name: choices that the machine made and not the request.
    """

    def __init__(
        self, run: Run, request: Request, *, resume: bool, save_every: float, also: Mapping[str, Any] | None = None
    ) -> None:
        self._run, self._resume, self._clock = run, resume, SaveClock(save_every)
        self._path = state_path(request.target)
        identity = identity_of(
            request.params,
            algo_rev=request.algo_rev,
            seed=run.compute.seed,
            sources=request.sources,
            weights_digest=request.checkpoint["weights_digest"] if request.checkpoint else None,
        )
        self._identity = {**identity, **(also or {})}
        self._is_ours = False  # whether the state is of this run, and not one that nobody asked to continue
        self._newest: Callable[[], State] | None = (
            None  # that was offered, for an interruption after the loop that offers them
        )

    @property
    def is_stored(self) -> bool:
        """Whether there is a state to continue from."""
        return self._path.exists()

    def restore(self, where: Callable[[State], str] = lambda state: "") -> dict[str, Tensor] | None:
        """The state to continue from, with --resume; without it a state that is there is reported and left.

        Args:
            where: says how far the work is, for people.
        """
        console = self._run.console
        if not self._resume:
            if self.is_stored:
                console.info(
                    f"{self._path}: found an interrupted run; starting from scratch (\0resume\0 would continue it)"
                )
            return None
        state = read_state(self._path, self._identity)
        if state is None:
            console.info(f"nothing to resume (no {self._path.name}); starting from scratch")
        else:
            console.info(f"resuming{where(state)}")
            self._is_ours = True
        return state

    def offer(self, state: Callable[[], State], *, is_last: bool = False) -> None:
        """Make the state and store it when it is due, or when the work is about to end early."""
        self._newest = None if is_last else state
        if is_last or self.is_due():
            write_state(self._path, state(), self._identity)
            self._is_ours = True

    def is_due(self) -> bool:
        """Whether a state is to be stored now; the clock starts again where it is."""
        return self._clock.is_due()

    def save(self, state: State, is_last: bool) -> None:
        """The same for a state that is made already."""
        self.offer(lambda: state, is_last=is_last)

    def remove(self) -> None:
        """The artifact is published: the state is not needed."""
        remove_state(self._path)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around the publication of the artifact, after which the state is not needed."""
        yield
        self.remove()

    @contextmanager
    def hint(self) -> Iterator[None]:
        """An interruption inside the block, or a failure to write, says how to go on; the newest state is stored first."""
        try:
            yield
        except (Interrupted, WriteError) as error:
            if isinstance(error, Interrupted) and self._newest is not None:
                self.offer(self._newest, is_last=True)
            if self._is_ours and self.is_stored:
                first = f"{error.hint}, then " if error.hint else ""
                error.hint = f"{first}continue with: {_started()}{self._run.line.having('resume', True).pasted()}"
            raise


def _started() -> str:
    """What starts a command that torchrun has started again."""
    others = team()
    return "" if others is None or rank_and_size() is None else f"torchrun --nproc-per-node {others.num_here} -m "


def resumable_training(
    run: Run, request: Request, *, resume: bool, save_every: float, also: Mapping[str, Any] | None = None
) -> Resumable:
    """The state of a training (bnncli.training.loop), which goes on where its random state is of one kind: on a CPU or a GPU."""
    also = {"device": run.device.type, **(also or {})}
    return Resumable(run, request, resume=resume, save_every=save_every, also=also)


class ResumableDraws:
    """The state of a sampler, whose draws lie in a file of their own.

    Args:
        resumable: the state.
        store: the draws; on disk before the state that counts them.
    """

    def __init__(self, resumable: Resumable, store: DrawFile) -> None:
        self._resumable, self._store = resumable, store

    def restore(self) -> dict[str, Tensor] | None:
        """The state to continue from, the store cut to its draws; None to start afresh."""
        state = self._resumable.restore(lambda state: f" after {int(state['num_done'])} transitions")
        if state is not None:
            digest = bytes(state.pop(_DIGEST, torch.empty(0, dtype=torch.uint8)).tolist())
            self._store.continue_from(len(state["num_steps"]), digest)
        return state

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Store the state when it is due, or when the run is about to end early; draws first."""

        def state() -> State:
            self._store.flush()
            return {**tensors(), _DIGEST: torch.frombuffer(bytearray(self._store.digest), dtype=torch.uint8)}

        self._resumable.offer(state, is_last=is_last)

    def close(self) -> None:
        """No more draws come: keep their file as long as a state needs it, and not otherwise."""
        self._store.close()
        if not self._resumable.is_stored:
            self._store.remove()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around the publication of the complete run, after which neither state nor raw draws are needed."""
        with self._resumable.hint():
            yield
        self._resumable.remove()
        self._store.remove()


def say_who_works(run: Run, team: Team, num_batches: int) -> None:
    """Say it where some workers have nothing to train."""
    if team.size > num_batches:
        batches = f"{num_batches} {'batch' if num_batches == 1 else 'batches'}"
        run.console.info(
            f"{batches} of networks for {team.size} workers: {team.size - num_batches} of the workers wait"
        )


def begun_before(state: dict[str, Tensor] | None) -> dict[int, State]:
    """The state of each training that had begun, by its number; the whole one is emptied, so that each is in memory as long as it is used."""
    begun: dict[int, State] = {**split_by_number(state or {})}
    if state is not None:
        state.clear()
    return begun


def stored_in(resumable: Resumable, begun: dict[int, State], team: Team, num_trainings: int) -> StoredStates:
    """Where this worker's trainings go on from, and where the first one stores all; what others go on from is let go."""

    def store(states: Mapping[int, State]) -> None:
        resumable.save(number_tensors(states), True)

    own = {number: begun[number] for number in team.share(num_trainings) if number in begun}
    begun.clear()
    return StoredStates(own, resumable.is_due, store)
