"""How every artifact is made: lock, decide, compute, publish. The order is the contract."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import check_free_space, check_writable, remove_dead_temporaries
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import Decision, decide, is_same_file
from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.posteriors import TRAINED_KIND as CHECKPOINT
from bnncli.artifacts.provenance import Source, build_provenance
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import BnnError, DataError, NumericError, OutputExists, UsageError
from bnncli.options.declaration import spelled
from bnncli.run.session import Result, Run, source_json
from bnncli.system import signals
from bnncli.system.memory import bytes_text, give_back_freed, resident_bytes
from bnncli.system.workers import team

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
    with signals.ending_at(None):  # what is done is kept, however late it is
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
