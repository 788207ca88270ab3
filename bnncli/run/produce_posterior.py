"""How every fit becomes a posterior file: its path, whether there is work, what is published, and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import write_posterior
from bnncli.artifacts.provenance import Source
from bnncli.errors import BnnError
from bnncli.run.inputs import Split, head_tensors
from bnncli.run.produce import Computed, Request, produce
from bnncli.run.session import Result, Run

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = {"posterior": ".safetensors", "samples": ".nc"}


@dataclass(frozen=True)
class Fitted:
    """What a fit hands over.

    Attributes:
        tensors: everything numeric; nothing where `write` has it.
        meta: type, method, param_layout and what else tells this posterior from others.
        metrics: the numbers of the fit, as they are stored.
        split: whose head, classes and number of examples are stored too; None where tensors and meta have them.
        told: further numbers for the result, which the file has not: the same request makes the same content.
        write: publishes by other means than a safetensors file: (meta, provenance, may_replace) to the content digest.
        publishing: entered while the file is published.
    """

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    metrics: Mapping[str, Any]
    split: Split | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[dict[str, Any], dict[str, Any], bool], str] | None = None
    publishing: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Report:
    """What is said of a posterior, made now or before: numbers of the result, lines for people, a negative verdict if any."""

    metrics: dict[str, Any]
    summary: list[str]
    failure: BnnError | None = None


def posterior_request(
    run: Run,
    default: str,
    *,
    kind: str = "posterior",
    params: Mapping[str, Any],
    algo_rev: int,
    sources: Sequence[Source],
    checkpoint: Mapping[str, Any] | None,
    estimated_bytes: Callable[[], int],
    require: Callable[[], object] = lambda: None,
    estimated_memory: Callable[[], int | None] = lambda: None,
) -> Request:
    """The request for a posterior, at the path that was given, or in the run folder by the name given or its default.

    Raises:
        UsageError, OutputExists: no posterior may have that name.
    """
    named = run.folder.posterior(run.naming.name or default, suffix=_SUFFIXES[kind])
    target = Path(run.naming.out) if run.naming.out else named
    run.folder.check_name_is_free(target)
    return Request(
        target,
        kind,
        target.stem,
        params,
        algo_rev,
        sources,
        checkpoint,
        estimated_bytes,
        require,
        estimated_memory=estimated_memory,
    )


def produce_posterior(
    run: Run, request: Request, fit: Callable[[], Fitted], report: Callable[[Mapping[str, Any]], Report]
) -> Result:
    """The result of a request for a posterior: up to date, fitted, replaced or planned.

    Args:
        fit: does the work; called with the lock held, only when there is work.
        report: what to say of a posterior with this meta; warns as well.

    Raises:
        BnnError: as `produce`.
    """

    def compute() -> Computed:
        fitted = fit()
        tensors, meta = _content(fitted)
        said = report({**meta, "metrics": {**meta["metrics"], **fitted.told}})

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            with fitted.publishing():
                if fitted.write is not None:
                    return fitted.write(meta, provenance, may_replace)
                return write_posterior(
                    request.target, tensors, meta=meta, provenance=provenance, may_replace=may_replace
                )

        return Computed(publish, said.metrics, said.summary, said.failure)

    def when_fresh(header: Header) -> Computed:
        said = report({**header.meta, "metrics": header.meta.get("metrics", {})})
        return Computed(lambda provenance, may_replace: header.content_digest, said.metrics, said.summary, said.failure)

    return produce(run, request, compute, when_fresh=when_fresh)


def _content(fitted: Fitted) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta as they are stored."""
    tensors, meta = dict(fitted.tensors), {**fitted.meta, "metrics": dict(fitted.metrics)}
    if fitted.split is not None:
        content = fitted.split.content
        tensors |= head_tensors(fitted.split)
        meta |= {"num_examples": len(content.features), "classes": content.classes}
    return tensors, meta
