"""fit-ensemble: networks that were trained apart in, one posterior of them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnncli.artifacts.freshness import is_same_file
from bnncli.artifacts.provenance import Source
from bnncli.errors import UsageError
from bnncli.models.sharded import checkpoint_sha256
from bnncli.options.command import CKPT, COMPUTE, Argument, Command, InputOptions, NameOptions
from bnncli.options.fit_ensemble import LAPLACE, TEMPERATURE, FitEnsembleOptions
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import load_split
from bnncli.session.network_splits import network_sources
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import labeled_val, require_labeled_val, val_lines, warn_if_worse
from bnncli.system.input_files import open_regular

COMMAND = Command(
    "Combine networks that were trained separately into an ensemble.",
    "CKPT is the first member; each MEMBER is another checkpoint of the same architecture. All members have "
    "equal weight. Writes posteriors/ensemble.safetensors, or posteriors/mola.safetensors with --each laplace.",
    (FitEnsembleOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-ensemble lenet-0.safetensors lenet-1.safetensors lenet-2.safetensors",
        "bnncli fit-ensemble a.pt b.pt c.pt d.pt e.pt --name five",
        "bnncli fit-ensemble a.pt b.pt c.pt --each laplace",
    ),
    (CKPT, Argument("member", "Checkpoints of the other members.", is_many=True)),
    section="Fit",
    place=60,
)


def run(run: Run, options: FitEnsembleOptions) -> Result:
    """Publish the ensemble; the result's metrics say what it cost and what it is worth on val."""
    members = sorted((Path(one) for one in run.arguments["member"]), key=lambda path: (path.name, str(path)))
    first = load_split(run, "train" if options.each == LAPLACE else (run.folder.splits() or ["train"])[0])
    val = require_labeled_val(run, "the temperature is chosen") if options.each == TEMPERATURE else labeled_val(run)
    if first.content.head_weight is None or first.checkpoint is None:
        raise UsageError("this run has only features, no network; an ensemble needs checkpoints")
    _check_apart(run, members)
    used = [first] if val is None or val.source.role == first.source.role else [first, val]
    sources = [split.source for split in used] + network_sources(used)
    for number, path in enumerate(members, start=2):
        with open_regular(path):  # or it is missing
            pass
        sources.append(
            Source(f"member.{number}", path, f"sha256:{checkpoint_sha256(path, run.console)}", is_artifact=False)
        )
    method = "mola" if options.each == LAPLACE else "ensemble"
    seeded = {"seed": run.compute.seed} if options.each == LAPLACE else {}
    request = posterior_request(
        run,
        method,
        params={"members": [path.name for path in members], **options.each_params, **seeded},
        algo_rev=_revisions.FIT_ENSEMBLE,
        sources=sources,
        checkpoint=first.checkpoint,
        estimated_bytes=lambda: sum(path.stat().st_size for path in (run.checkpoint_path, *members)),
    )

    def fit() -> Fitted:
        from bnncli.stages.fit_ensemble import work

        return work.fit(run, options, first, val, members)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request, meta))


def _check_apart(run: Run, members: list[Path]) -> None:
    """Raise UsageError where a file is given twice."""
    given = [run.checkpoint_path, *members]
    for place, path in enumerate(given):
        for other in given[:place]:
            if path == other or is_same_file(path, other):
                raise UsageError(f"MEMBER: {path} is given twice; members must be different networks")


def _report(run: Run, request: Request, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    method = str(meta["method"])
    warn_if_worse(run, request.target, metrics, method=method)
    cost = metrics["gradient_passes"]
    lines = [
        f"{metrics['num_members']} members"
        + (f", at temperature {metrics['temperature']:.3g}" if "temperature" in metrics else "")
        + ("" if cost is None else f", trained in {cost} passes over the data")
    ]
    if method == "mola":
        each = zip(metrics["structure"], metrics["prior_precision"], strict=True)
        lines.append(f"prior precisions: {', '.join(f'{value:.4g} ({name})' for name, value in each)}")
    if metrics["val"] is not None:
        own = ", ".join(f"{value:.4f}" for value in metrics["val_nll_members"])
        lines += [*val_lines(metrics), f"val NLL of the members: {own}"]
    return Report(metrics, lines)
