"""Produce an artifact: lock, decide, compute, publish, in this order.

Long fits save resume states, so that a killed one can continue.
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
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.posteriors import TRAINED_KIND as CHECKPOINT
from bnncli.artifacts.provenance import Source, build_provenance
from bnncli.artifacts.resume import DrawFile, SaveClock, identity_of, read_state, remove_state, state_path, write_state
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import BnnError, DataError, Interrupted, NumericError, OutputExists, UsageError, WriteError
from bnncli.lazy import torch
from bnncli.options.declaration import spell_options
from bnncli.session.run import Result, Run, source_json
from bnncli.system import signals
from bnncli.system.memory import bytes_text, resident_bytes
from bnncli.system.workers import Team, rank_and_size, team
from bnncli.training.loop import State
from bnncli.training.shared_out import StoredStates, number_tensors, split_by_number

if TYPE_CHECKING:
    from torch import Tensor


Publish = Callable[[dict[str, Any], bool], str]


@dataclass(frozen=True)
class Request:
    """One artifact that a command is to produce.

    Attributes:
        role: its name in the JSON result, such as laplace or features.test.
        params: options that change its numbers.
        algo_rev: raised when the same parameters give other numbers than before.
        sources: direct inputs. checkpoint: record of the run's checkpoint.
        estimated_bytes: returns the size on disk, checked before the work.
        estimated_memory: returns the peak memory of the work in bytes, on top of the process's own; None if unplanned.
        require: checks that the machine can do the work, and may warn of its cost; only called if there is work.
        begin: checks that the work can start, as far as possible before importing PyTorch; not called in a dry run.
        accumulates: whether replacing the artifact is its usual course, which is not announced.
        why_anew: maps recorded params that differ to the reason to replace the artifact; None to refuse.
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
    accumulates: bool = False


@dataclass(frozen=True)
class ComputationOutput:
    """Output of a computation: how to publish it, numbers and lines for people, and a negative verdict if any.

    Attributes:
        publish: None on workers whose output the first one publishes.
        facts: entries of this output in the JSON result, beside its path.
    """

    publish: Publish | None
    metrics: dict[str, Any] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)
    failure: BnnError | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def produce(
    run: Run,
    request: Request,
    compute: Callable[[], ComputationOutput],
    *,
    when_fresh: Callable[[Header], ComputationOutput] | None = None,
) -> Result:
    """Produce one artifact: up to date, computed, replaced or planned.

    Args:
        compute: does the work; called with the lock held, only if there is work.
        when_fresh: metrics, summary and verdict of an existing artifact.

    Raises:
        BnnError: from the decision, lock, work or writing; nothing is published then.
    """
    if run.write.dry_run:
        decision = _decide(run, request)
        if decision.action != "skip":
            request.require()
            check_writable(request.target.parent)
            check_free_space(request.target.parent, request.estimated_bytes())
        return _describe_plan(run, request, decision)
    ready = find_fresh_in_read_only_folder(run, request, when_fresh)
    if ready is not None:
        return ready
    with artifact_lock(run.folder.lock(request.target), wait=run.lock.wait, poll=run.console.poll):
        return make(run, request, compute, when_fresh=when_fresh)


def find_fresh_in_read_only_folder(
    run: Run, request: Request, when_fresh: Callable[[Header], ComputationOutput] | None = None
) -> Result | None:
    """Return the result of an up-to-date request in a read-only folder, which needs no lock; otherwise None.

    Raises:
        OutputExists: the folder is read-only, and there is work.
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
    compute: Callable[[], ComputationOutput],
    *,
    when_fresh: Callable[[Header], ComputationOutput] | None = None,
) -> Result:
    """Produce one artifact whose lock is held; arguments and errors as for `produce`."""
    remove_dead_temporaries(request.target.parent)
    decision = _share_decision(run, request)
    if decision.action == "skip" and decision.header is not None:
        return _up_to_date(run, request, decision.header, when_fresh)
    request.require()
    if decision.action == "replace" and not request.accumulates:
        run.console.info(f"{request.target}: replacing it ({decision.why})")
    check_free_space(request.target.parent, request.estimated_bytes())
    request.begin()
    run.console.debug(
        f"computing on {run.device}{format_expected_memory(request.estimated_memory())}"
    )  # sets threads and determinism before the work
    start = time.monotonic()
    computed = compute()
    with signals.time_limit(None):  # finished work is published, however late
        return _publish_result(run, request, decision, computed, seconds=time.monotonic() - start)


def _publish_result(
    run: Run, request: Request, decision: Decision, computed: ComputationOutput, *, seconds: float
) -> Result:
    """Publish finished work and return its result."""
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
        # Warnings show the path as given; an artifact names no folder outside its command.
        warnings=[text.replace(str(run.checkpoint_path), run.checkpoint_path.name) for text in run.console.warnings],
    )
    _check_sources(request.sources)
    digest = _publish_and_agree(computed, provenance, may_replace=decision.action == "replace")
    run.followed.clear()
    action = "replaced" if decision.action == "replace" else "computed"
    return _result(request, action, digest, computed)


def _share_decision(run: Run, request: Request) -> Decision:
    """Return the decision of the first worker, made under the lock so that files cannot change meanwhile."""
    if (others := team()) is None:
        return _decide(run, request)
    told = others.told_by_leader(replace(_decide(run, request), header=None) if others.is_leader else None)
    return replace(told, header=_decide(run, request).header) if told.action == "skip" else told


def _publish_and_agree(computed: ComputationOutput, provenance: dict[str, Any], *, may_replace: bool) -> str:
    """Publish and return the digest.

    Raises:
        NumericError: workers disagree.
    """
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


def format_expected_memory(memory: int | None) -> str:
    """Return the memory of the process and of the work as text; empty if unplanned."""
    if memory is None:
        return ""
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
    """Check that no input was replaced during the work, which would invalidate it."""
    for source in sources:
        if source.is_artifact and read_header(source.path).content_digest != source.content_digest:
            message = f"{source.path} was replaced while this command ran; nothing was written"
            raise DataError(message, code="input_replaced", hint="run the command again", path=source.path)


def _describe_plan(run: Run, request: Request, decision: Decision) -> Result:
    action = {"skip": "skip (up to date)", "compute": "compute", "replace": f"replace ({spell_options(decision.why)})"}[
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


def _up_to_date(
    run: Run, request: Request, header: Header, when_fresh: Callable[[Header], ComputationOutput] | None
) -> Result:
    nothing = ComputationOutput(
        publish=lambda provenance, may_replace: header.content_digest, metrics=header.meta.get("metrics", {})
    )
    with convert_lookup_errors(header.path):
        computed = when_fresh(header) if when_fresh else nothing
    run.console.info(f"{request.target}: up to date")
    return _result(request, "up_to_date", header.content_digest, computed)


def _result(request: Request, action: str, digest: str, computed: ComputationOutput) -> Result:
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
    """One of several artifacts: its request and its computation."""

    request: Request
    compute: Callable[[], ComputationOutput]


def produce_together(
    run: Run,
    works: Sequence[Work],
    *,
    also: Callable[[], list[Result]],
    before: Callable[[Sequence[Path]], None],
) -> list[Result]:
    """Produce several artifacts and rename them into place at the end, the last one first.

    Args:
        also: produces related artifacts after the computations; not called in a dry run.
        before: called with the complete files before they are renamed.

    Raises:
        BnnError: see produce; nothing is published then unless the error occurs during renaming.
    """
    if run.write.dry_run:
        return [produce(run, *work) for work in works]
    ready = [find_fresh_in_read_only_folder(run, work.request) for work in works]
    open_works = [place for place, result in enumerate(ready) if result is None]
    with ExitStack() as locks:
        # Lock in order of names, so that two commands cannot deadlock.
        for lock in sorted({run.folder.lock(works[place].request.target) for place in open_works}):
            locks.enter_context(artifact_lock(lock, wait=run.lock.wait, poll=run.console.poll))
        with publish_together(before):
            for place in open_works:
                ready[place] = make(run, *works[place])
            ready += also()
    return [result for result in ready if result is not None]


_DIGEST = "draws_digest"  # digest of the draws in the separate file


class Resumable:
    """Resume state of the work on one artifact.

    Args:
        run, request: what the work is for; a state of another request is refused.
        resume: whether to continue from an existing state.
        save_every: seconds between states; 0 saves every offered one.
        also: further values that must match, by name: choices made by the machine, not the request.
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
        self._is_ours = False  # whether this run wrote or resumed the state
        self._newest: Callable[[], State] | None = None  # last offered state, to save on interruption after the loop

    @property
    def is_stored(self) -> bool:
        """Return whether there is a state to continue from."""
        return self._path.exists()

    def restore(self, where: Callable[[State], str] = lambda state: "") -> dict[str, Tensor] | None:
        """Return the state to continue from with --resume; without it, report an existing state and leave it.

        Args:
            where: describes the progress of a state.
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
        """Create and save the state if it is due or the work is about to end early."""
        self._newest = None if is_last else state
        if is_last or self.is_due():
            write_state(self._path, state(), self._identity)
            self._is_ours = True

    def is_due(self) -> bool:
        """Return whether to save a state now, and if so restart the clock."""
        return self._clock.is_due()

    def save(self, state: State, is_last: bool) -> None:
        """Save a state that already exists, under the conditions of `offer`."""
        self.offer(lambda: state, is_last=is_last)

    def remove(self) -> None:
        """Remove the state after the artifact is published."""
        remove_state(self._path)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Return a context for publication, after which the state is removed."""
        yield
        self.remove()

    @contextmanager
    def hint(self) -> Iterator[None]:
        """Save the newest state and add how to resume if the block is interrupted or fails to write."""
        try:
            yield
        except (Interrupted, WriteError) as error:
            if isinstance(error, Interrupted) and self._newest is not None:
                self.offer(self._newest, is_last=True)
            if self._is_ours and self.is_stored:
                first = f"{error.hint}, then " if error.hint else ""
                error.hint = (
                    f"{first}continue with: {_format_torchrun_prefix()}{self._run.line.having('resume', True).pasted()}"
                )
            raise


def _format_torchrun_prefix() -> str:
    """Return the torchrun prefix of a command started by torchrun, otherwise an empty string."""
    others = team()
    return "" if others is None or rank_and_size() is None else f"torchrun --nproc-per-node {others.num_here} -m "


def prepare_resumable_training(
    run: Run, request: Request, *, resume: bool, save_every: float, also: Mapping[str, Any] | None = None
) -> Resumable:
    """Return the state of a training (bnncli.training.loop), which only resumes on the same device type."""
    also = {"device": run.device.type, **(also or {})}
    return Resumable(run, request, resume=resume, save_every=save_every, also=also)


class ResumableDraws:
    """Resume state of a sampler, with draws in a separate file.

    Args:
        resumable: the state.
        store: the draws; flushed to disk before the state that counts them.
    """

    def __init__(self, resumable: Resumable, store: DrawFile) -> None:
        self._resumable, self._store = resumable, store

    def restore(self) -> dict[str, Tensor] | None:
        """Return the state to continue from, with the store truncated to its draws; None to start from scratch."""
        state = self._resumable.restore(lambda state: f" after {int(state['num_done'])} transitions")
        if state is not None:
            digest = bytes(state.pop(_DIGEST, torch.empty(0, dtype=torch.uint8)).tolist())
            self._store.continue_from(len(state["num_steps"]), digest)
        return state

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Save draws, then the state, if it is due or the run is about to end early."""

        def state() -> State:
            self._store.flush()
            return {**tensors(), _DIGEST: torch.frombuffer(bytearray(self._store.digest), dtype=torch.uint8)}

        self._resumable.offer(state, is_last=is_last)

    def close(self) -> None:
        """Close the store; keep its file only if a state needs it."""
        self._store.close()
        if not self._resumable.is_stored:
            self._store.remove()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Return a context for publication of the complete run, after which state and raw draws are removed."""
        with self._resumable.hint():
            yield
        self._resumable.remove()
        self._store.remove()


def report_idle_workers(run: Run, team: Team, num_batches: int) -> None:
    """Report if some workers have nothing to train."""
    if team.size > num_batches:
        batches = f"{num_batches} {'batch' if num_batches == 1 else 'batches'}"
        run.console.info(
            f"{batches} of networks for {team.size} workers: {team.size - num_batches} of the workers wait"
        )


def take_begun_states(state: dict[str, Tensor] | None) -> dict[int, State]:
    """Return the states of trainings that had begun, by number; empties `state`, so that each can be freed after use."""
    begun: dict[int, State] = {**split_by_number(state or {})}
    if state is not None:
        state.clear()
    return begun


def select_own_states(resumable: Resumable, begun: dict[int, State], team: Team, num_trainings: int) -> StoredStates:
    """Return this worker's states to resume from, and the store of all on the first worker; free the other states."""

    def store(states: Mapping[int, State]) -> None:
        resumable.save(number_tensors(states), True)

    own = {number: begun[number] for number in team.share(num_trainings) if number in begun}
    begun.clear()
    return StoredStates(own, resumable.is_due, store)
