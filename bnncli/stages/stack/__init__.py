"""stack: last layers refitted in several ways in, the mixture of them that predicts best out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.errors import UsageError
from bnncli.names import percent
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.stack import StackOptions
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior
from bnncli.session.run import Result, Run
from bnncli.session.val_report import require_labeled_val, val_lines, warn_if_worse

COMMAND = Command(
    "Mix the network with refitted last layers, weighted by how well they predict val.",
    "The members are the network at its best temperature, and last layers refitted to train, to val and to "
    "both. 5-fold cross-validation on val chooses prior precisions and weights. This gives a strong baseline in "
    "seconds. Writes posteriors/stack.safetensors.",
    (StackOptions, NameOptions, InputOptions, *COMPUTE),
    ("bnncli stack ckpt.pt", "bnncli stack ckpt.pt --name heads --seed 1"),
    section="Fit",
    place=20,
)
FEWEST_ROWS = 10  # of val


def run(run: Run, options: StackOptions) -> Result:
    """Fit and publish; the result's metrics have the members, their weights, and what the mixture is worth on val."""
    train, val = load_split(run, "train").check_labeled(), _val(run)
    run.require_device()
    request = posterior_request(
        run,
        "stack",
        params={**options.params(), "seed": run.compute.seed},
        algo_rev=_revisions.STACK,
        sources=[train.source, val.source],
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: 8 * 40 * train.layout.num_params,
    )

    def fit() -> Fitted:
        from bnncli.stages.stack import work

        return work.fit(run, options, request, train, val)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request.target, meta))


def _val(run: Run) -> Split:
    """Return the val split, with rows enough for folds."""
    val = require_labeled_val(run, "members are chosen and weighted")
    if len(val.content.features) < FEWEST_ROWS:
        raise UsageError(f"val has only {len(val.content.features)} rows; stacking needs at least {FEWEST_ROWS}")
    return val


def _report(run: Run, path: Any, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    warn_if_worse(run, path, metrics, method="stack")
    heads = ", ".join(
        f"{percent(head['weight'], '.0f')} {head['name']}"
        + ("" if head["prior_precision"] is None else f" (prior precision {head['prior_precision']:.3g})")
        for head in sorted(metrics["heads"], key=lambda head: -float(head["weight"]))
        if head["is_kept"]
    )
    lines = [f"weights of {metrics['num_members']} last layers: {heads}"]
    lines += [f"skipped: {text}" for text in metrics["left_out"]]
    lines += val_lines(metrics, where=" (out of fold)")
    return Report(metrics, lines)
