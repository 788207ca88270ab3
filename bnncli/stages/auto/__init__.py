"""auto: the ladder as one command, from features to a recommended posterior: temperature, ensemble, stack, laplace, refine, hmc."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.options.auto import AutoOptions
from bnncli.options.command import COMPUTE, Command, InputOptions
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split
from bnncli.session.network_fit import check_network_fits
from bnncli.session.produce import Request, produce
from bnncli.session.recommendation import judged_before, recorded_qualities
from bnncli.session.run import Result, Run, Table
from bnncli.session.val_report import gain_table, has_labeled_val
from bnncli.stages.auto.ladder import ENSEMBLE, Ladder, Rung
from bnncli.stages.stack import FEWEST_ROWS

_NUMBER = re.compile(r"(\d+)")
_TIME = re.compile(
    r"(epoch|step|iter|iteration)s?[^a-z]*$", re.IGNORECASE
)  # before a number that counts a training's progress
_SAME_SIZE = 0.01  # of the size: names of keys and dates differ
_MOST_SIBLINGS = 9
_FOR_FITS = 0.95  # of the budget: the rest is for what ends, is judged and written after it

COMMAND = Command(
    "Try methods from cheap to costly and recommend one.",
    "Fits a temperature, an ensemble (of sibling checkpoints), a stack of last layers and a Gaussian, then a "
    "flow and hmc if the simpler posterior does not fit well. Compares all of them on val. Recommends the "
    "simplest one that significantly lowers the NLL without losing accuracy, else a stack that lowers it, else "
    "the network. Writes recommended.json, which predict uses by default.",
    (AutoOptions, InputOptions, *COMPUTE),
    ("bnncli auto ckpt.pt", "bnncli auto ckpt.pt --budget 5m"),
    section="Start",
    place=50,
)


def run(run: Run, options: AutoOptions) -> Result:
    """Climb, judge, recommend; what is fitted stays as the posteriors of the run."""
    if run.write.dry_run:
        raise UsageError(
            "auto has no --dry-run, because each step depends on earlier results; use --dry-run with "
            "fit-laplace, refine or hmc"
        )
    train = load_split(run, "train").check_labeled()
    if not has_labeled_val(run):
        raise MissingInput(
            f"{run.checkpoint_path} has no labelled val split; the recommendation needs data that the network "
            "was not trained on",
            hint="extract again with a val split, such as --hold-out val=test:2000, with --force",
            path=run.folder.features("val"),
        )
    val = load_split(run, "val")
    check_network_fits(run, ("train", "val"), is_accepted=options.accept_poor_network)
    run.require_device()
    from bnncli.stages.auto import judged  # the work: slow to import

    seconds, outside = options.budget_seconds, outside_splits(run)
    has_network = train.content.head_weight is not None
    siblings = siblings_of(run.checkpoint_path) if has_network and train.checkpoint is not None else []
    scores = judged.Scores(run, val, trust_code=options.trust_code)
    if seconds is not None:  # what comes after the ladder is done before it, and counts
        scores.detect(outside)
    ladder = Ladder(
        run,
        options,
        {} if run.write.force else judged_before(run),
        score=lambda rung: None if seconds is None else scores.add(rung),
        deadline=None if seconds is None else run.started + _FOR_FITS * seconds,
    )
    rungs = ladder.climb(
        train,
        val,
        has_network=has_network,
        siblings=siblings,
        can_stack=len(val.stored) >= FEWEST_ROWS,
    )
    sources = [one.source for one in (val, *outside)] + [rung.source for rung in rungs if rung.source is not None]
    request = Request(
        run.folder.recommended,
        "metrics",
        "recommended",
        {"seed": run.compute.seed, "prior_precision": options.prior_precision, "criterion": options.criterion},
        _revisions.AUTO,
        sources,
        train.checkpoint,
        lambda: 1 << 16,
        why_anew=lambda recorded: "other options or fitted posteriors",
    )
    keep_accuracy = options.criterion != "nll"
    result = produce(
        run,
        request,
        lambda: judged.compute(request, rungs, scores, outside, keep_accuracy=keep_accuracy),
        when_fresh=judged.when_fresh,
    )
    rows = result.metrics.pop("rows")
    result.extra |= {"rungs": [rung.to_json() for rung in rungs], "rows": rows, **result.metrics}
    names = {rung.posterior for rung in rungs if rung.source is not None}
    others = [path.stem for path in run.folder.posteriors() if path.stem not in names]
    headers = {rung.posterior: read_header(rung.source.path) for rung in rungs if rung.source is not None}
    tables = _table(rungs, rows, val.content.labels, result.metrics["about"][1] or None), *gain_table(headers)
    result.tables = [*tables, *_qualities_table(result.metrics)]
    gaussian = next((rung.posterior for rung in rungs if rung.name == "fit-laplace"), "")
    result.lines = [
        *(f"{rung.name}: {rung.note}" for rung in rungs if rung.note),
        str(result.metrics["sentence"]),
        *_averaging(gaussian, headers.get(gaussian)),
        str(result.metrics["outside"]),
    ]
    took = ", ".join(f"{rung.name} {rung.seconds:.1f} s" for rung in rungs if rung.seconds)
    result.extra["siblings"] = [str(path) for path in siblings]
    result.summary = [f"took: {took}"]
    if others:
        result.summary.append(f"not considered: {', '.join(others)} (compare shows all posteriors)")
    chosen = next((row for row in rows if row["is_recommended"]), None)
    if (
        chosen is not None
        and headers[chosen["posterior"]].meta.get("type") in ("stack", "ensemble")
        and gaussian in headers
    ):
        line = run.suggest("predict", posterior=gaussian)
        result.summary.append(f"{chosen['posterior']} has too few members for 95% intervals; for these: {line}")
    ensemble = next((rung.posterior for rung in rungs if rung.name == ENSEMBLE and rung.source is not None), None)
    if ensemble is not None and chosen is not None and chosen["posterior"] == ensemble:
        result.summary.append(_without_ensemble(run, ensemble, rows))
    return result


def _averaging(name: str, gaussian: Header | None) -> list[str]:
    """What averaging over the Gaussian gains on val: the part that is Bayesian."""
    gain = None if gaussian is None else gaussian.meta["metrics"].get("val_gain")
    if gain is None:
        return []
    averaging = gain["averaging"]
    error = averaging["standard_error"]
    shown = f"{-averaging['value']:+.4f}" + ("" if error is None else f" +- {error:.4f}")
    return [f"averaging over {name} changes the val NLL by {shown} nats"]


def _without_ensemble(run: Run, ensemble: str, rows: list[dict[str, Any]]) -> str:
    """What an ensemble costs to predict with, and what there is without it."""
    members = read_header(run.folder.posterior(ensemble)).meta["metrics"]["num_members"]
    other = min((row for row in rows if row["posterior"] != ensemble), key=lambda row: float(row["nll"]))
    line = run.suggest("predict", posterior=other["posterior"], integrator=other["integrator"])
    return (
        f"{ensemble} takes {members} network passes per input and cannot be exported; the best choice that uses "
        f"one network has NLL {other['nll']:.4f} on val: {line}"
    )


def siblings_of(path: Path) -> list[Path]:
    """Return the files beside a checkpoint whose names differ from its own in one number alone, and whose sizes are as good as its own.

    The number is none of an epoch or a step: such files are of one training.
    """
    parts = _NUMBER.split(path.name)
    if len(parts) < 3 or not path.is_file():
        return []
    size, found = path.stat().st_size, []
    for other in sorted(path.parent.iterdir()):
        theirs = _NUMBER.split(other.name)
        differing = [place for place, pair in enumerate(zip(parts, theirs, strict=False)) if pair[0] != pair[1]]
        is_alike = len(theirs) == len(parts) and len(differing) == 1 and differing[0] % 2 == 1
        if not is_alike or _TIME.search("".join(parts[: differing[0]])):
            continue
        if other.is_file() and abs(other.stat().st_size - size) <= _SAME_SIZE * size:
            found.append(other)
    return found[:_MOST_SIBLINGS]


def outside_splits(run: Run) -> list[Split]:
    """The run's out-of-distribution splits; those that cannot be used are left out with a warning."""
    found = []
    for name in run.folder.splits():
        try:
            if read_header(run.folder.features(name)).meta.get("is_ood"):
                found.append(load_split(run, name))
        except DataError as error:
            run.console.warn(f"skipping split {name}: {error.message}{error.advice}")
    return found


def _qualities_table(metrics: dict[str, Any]) -> list[Table]:
    """A row for each quality of the posterior that the recommendation speaks of; nothing without one."""
    found = recorded_qualities(metrics["qualities"])
    if not found:
        return []
    columns = ["val", *metrics["about"], "difference", "95% interval", "finding"]
    notes = ["paired by example; each interval holds on its own"]
    return [Table(columns, [one.cells for one in found], notes=notes)]


def _table(rungs: list[Rung], rows: list[dict[str, Any]], labels: Any, baseline: str | None) -> Table:
    """A row for each rung by its best integrator; gains are beside the baseline, in words."""
    cells = []
    for rung in rungs:
        own = [row for row in rows if row["posterior"] == rung.posterior]
        best = min(own, key=lambda row: float(row["nll"]), default=None)
        mark = "*" if any(row["is_recommended"] for row in own) else ""
        shown = next((row for row in own if row["is_recommended"]), best)
        if shown is None:
            cells.append([rung.name, "-", "-", "-", "-", "-"])
            continue
        gain = shown["gain"]
        told = "-" if gain is None else f"{gain['value']:+.4f}"
        if gain is not None and gain["standard_error"] is not None:
            told += f" +- {gain['standard_error']:.4f}"
        good = "-" if rung.is_good is None else "yes" if rung.is_good else "no"
        ece = f"{shown['ece']:.4f}"
        cells.append([f"{rung.posterior}{mark}", shown["integrator"], f"{shown['nll']:.4f}", ece, told, good])
    note = f"* recommended; {len(labels)} examples of val"
    if baseline is not None and any(cell[4] != "-" for cell in cells):
        note += f"; gain: NLL of {baseline} minus NLL of the row"
    if any(cell[5] != "-" for cell in cells):
        note += "; good: matches the exact posterior closely (see diagnose)"
    if any(rung.name == "fit-temperature" and rung.source is not None for rung in rungs):
        note += "; the temperature's scores are leave-one-out"
    if any(rung.criterion == "val" or (rung.name == ENSEMBLE and rung.source is not None) for rung in rungs):
        note += "; fits were tuned on val too, so their scores are slightly optimistic"
    columns = ["posterior", "integrator", "NLL", "ECE", "gain", "good"]
    return Table(columns, cells, notes=[note])
