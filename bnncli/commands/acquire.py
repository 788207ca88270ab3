"""acquire: choose the examples of a pool to label next."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.outputs import check_side_output
from bnncli.errors import DataError, UsageError
from bnncli.evaluation.acquisition import SCORES, batch_bald, highest_scores
from bnncli.likelihoods import has_exclusive_classes
from bnncli.names import format_names, quote_name
from bnncli.options.command import READ, Command, ComputeOptions, InputOptions, WriteOptions
from bnncli.options.declaration import CheckedOptions, check_split_name, check_suffix, option
from bnncli.options.predict import PredictOptions
from bnncli.options.shared import trust_code_option
from bnncli.session.inputs import Split, load_split, posterior_source
from bnncli.session.predictions import find_named
from bnncli.session.predictor import IntegratorChoice, Predictor, RequestedIntegrators, TrainData
from bnncli.session.recommendation import open_recommendation
from bnncli.session.run import Result, Run
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from bnncli.session.predictor import IntegratorPredictions


RULES = ("bald", "batchbald", "entropy", "margin", "random")


@dataclass(frozen=True)
class AcquireOptions(CheckedOptions):
    """Options of acquire."""

    pool: str = option("pool", "Split to choose from. Its labels, if any, are ignored.", metavar="SPLIT")
    batch: int = option(100, "Number of examples to choose.", minimum=1)
    by: str = option(
        "bald",
        "Acquisition rule. batchbald scores a batch jointly, which avoids near-duplicates; the other rules "
        "score each example separately.",
        choices=RULES,
    )
    posterior: str | None = option(
        None,
        "Posterior, by name or file. Default: auto's recommendation, else laplace.",
        metavar="NAME|FILE",
    )
    integrator: str | None = option(None, "Integrator. Default: the one predict uses.", family="integrators")
    samples: int | None = option(
        None,
        "Number of draws for a sampling integrator. Default: the same as predict, or 100 for batchbald.",
        minimum=1,
        is_rare=True,
    )
    candidates: int = option(
        5000,
        "Number of examples, those with the highest BALD scores, that batchbald considers. Its running time "
        "grows with this number.",
        minimum=1,
        is_rare=True,
    )
    exclude: str | None = option(
        None, "File of ids or names, one per line, to skip because they are already labelled.", metavar="FILE"
    )
    table: str | None = option(
        None, "Write the chosen examples and their scores to this .csv file.", metavar="FILE", writes=True
    )
    trust_code: bool = trust_code_option(is_recorded=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split_name(self.pool, "\0pool\0")
        if self.table is not None:
            check_suffix(self.table, "\0table\0", ("csv",))


COMMAND = Command(
    "Choose the examples of a pool to label next.",
    "Prints one id per line, most useful first: example names if the features have them, else sample ids. bald, "
    "entropy and margin score each example separately and may pick near-duplicates; batchbald chooses a batch "
    "jointly.",
    (AcquireOptions, InputOptions, ComputeOptions, WriteOptions, *READ),
    (
        "bnncli acquire ckpt.pt --pool unlabelled --batch 100",
        "bnncli acquire ckpt.pt --pool unlabelled --by batchbald --batch 20 --exclude done.txt --table next.csv",
    ),
    section="Use",
    place=40,
)


def execute(run: Run, options: AcquireOptions) -> Result:
    """Choose examples, write the table and print their ids."""
    pool = load_split(run, options.pool)
    if not has_exclusive_classes(pool.content.likelihood):
        raise UsageError("acquire needs one class per example; this run is multilabel")
    free = _find_free_rows(pool, options)
    target = None if options.table is None else Path(options.table)
    if target is not None:
        check_side_output(
            target, "--table", "table of acquire", is_ours=_is_ours, force=run.write.force, others=[pool.source.path]
        )
    predictor, choice = _open_predictor(run, options, len(pool.content.classes))
    if run.write.dry_run:
        planned = [] if target is None else [f"write: {target}"]
        return Result("planned", lines=[*planned, f"choose {options.batch:,} of {len(free):,}"])
    run.require_device()
    predicted, taken = _choose_rows(run, options, predictor, choice, pool, free)
    return _result(options, pool, predictor, choice, predicted, taken, target)


Array = np.ndarray


def _find_free_rows(pool: Split, options: AcquireOptions) -> Array:
    """Return the rows of the pool that may be chosen, (F,). Raises DataError where they are too few, or --exclude names unknown ids."""
    ids = _list_ids(pool)
    free = np.ones(len(ids), dtype=bool)
    if options.exclude is not None:
        with open_regular(Path(options.exclude)) as stream:
            lines = stream.read().decode(errors="surrogateescape").splitlines()
        excluded = {line for line in lines if line}
        unknown = sorted(excluded - {*ids})
        if unknown:
            raise DataError(
                f"{quote_name(options.exclude, limit=300)} names examples that are not in split {options.pool!r}: "
                    f"{format_names(unknown)}",
                hint=f"its ids look like {ids[0]!r}", path=Path(options.exclude),
            )  # fmt: skip
        free = np.array([one not in excluded for one in ids])
    if int(free.sum()) < options.batch:
        raise DataError(
            f"split {options.pool!r} has only {int(free.sum()):,} examples to choose from; you asked for "
                f"\0batch\0 {options.batch:,}",
            hint="use a smaller \0batch\0 or a larger pool", code="too_few_rows",
        )  # fmt: skip
    return np.flatnonzero(free)


_TITLES = ("rank", "sample_id", "name", "score", "predicted", "probability")


def _is_ours(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(100).startswith(",".join(_TITLES).encode())


BATCH_BALD_DRAWS = 100


def _open_predictor(run: Run, options: AcquireOptions, num_classes: int) -> tuple[Predictor, IntegratorChoice]:
    """Return the posterior and the integrator. Raises UsageError where the rule needs draws and there are none."""
    name, integrator = options.posterior, options.integrator
    if name is None:
        found = open_recommendation(run)
        name = "laplace" if found is None else found.posterior
        if found is not None and integrator is None and options.by not in ("bald", "batchbald"):
            integrator = found.integrator
    path = find_named(run, name, flag="\0posterior\0", otherwise=run.suggest("status"), trust_code=options.trust_code)
    header, _ = posterior_source(run, path, "posterior")
    samples = options.samples or (BATCH_BALD_DRAWS if options.by == "batchbald" else None)
    of_draws = options.by in ("bald", "batchbald")
    asked = PredictOptions(
        integrator=[] if integrator is None else [integrator], samples=samples, keep_samples=of_draws
    )
    choices, refusals = RequestedIntegrators.of(asked, [header]).choices(header, num_classes)
    if refusals:
        raise refusals[0]
    if of_draws and not choices[0].integrator.is_sampling:
        raise UsageError(
            f"\0by\0 {options.by} needs draws, and {path.stem} ({choices[0].variant}) has none",
            hint="use another posterior, \0integrator\0 mc, or \0by\0 entropy",
        )
    return Predictor(run, path, header, TrainData(run, options.trust_code)), choices[0]


_RANDOM = "random"


@dataclass(frozen=True)
class ChosenRows:
    """Chosen rows of the pool (B,), in order, and their scores (B,); NaN where the rule has none."""

    rows: Array
    scores: Array


def _choose_rows(
    run: Run, options: AcquireOptions, predictor: Predictor, choice: IntegratorChoice, pool: Split, free: Array
) -> tuple[IntegratorPredictions, ChosenRows]:
    """Predict the pool and choose rows."""
    import torch

    seen = predictor.train.seen_by(predictor.header, pool)
    seen.check_fits(predictor.posterior.layout)
    predicted = predictor.predict(choice, seen.stored)
    probs, mutual_info = predicted.prediction.probs.numpy(), predicted.prediction.mutual_info
    information = None if mutual_info is None else mutual_info.numpy()
    if options.by == _RANDOM:
        order = torch.randperm(len(free), generator=run.stream("acquire/random"))[: options.batch].numpy()
        return predicted, ChosenRows(free[order], np.full(options.batch, np.nan))
    if options.by != "batchbald":
        scores = SCORES[options.by](probs[free], information if information is None else information[free])
        order = highest_scores(scores, options.batch)
        return predicted, ChosenRows(free[order], scores[order])
    assert information is not None
    candidates = free[highest_scores(information[free].astype(np.float64), max(options.candidates, options.batch))]
    if len(candidates) < len(free):
        run.console.info(
            f"batchbald chooses among the {len(candidates):,} examples (of {len(free):,}) with the highest BALD scores"
        )
    features = seen.stored[torch.from_numpy(np.sort(candidates))]
    draws = predictor.predict(choice, features, keep_samples=True).probs_samples
    assert draws is not None
    chosen = batch_bald(
        draws.to(run.device), options.batch, generator=run.stream("acquire/labellings"), progress=run.console
    )
    return predicted, ChosenRows(np.sort(candidates)[chosen.rows.numpy()], chosen.gains.numpy())


def _result(
    options: AcquireOptions,
    pool: Split,
    predictor: Predictor,
    choice: IntegratorChoice,
    predicted: IntegratorPredictions,
    taken: ChosenRows,
    target: Path | None,
) -> Result:
    probs, ids, classes = predicted.prediction.probs.numpy()[taken.rows], _list_ids(pool), pool.content.classes
    sample_ids = np.asarray(pool.content.sample_id)[taken.rows].tolist()
    rows: list[dict[str, Any]] = []
    for rank, (row, score) in enumerate(zip(taken.rows.tolist(), taken.scores.tolist(), strict=True)):
        best = int(probs[rank].argmax())
        values = (
            rank + 1,
            sample_ids[rank],
            ids[row],
            None if np.isnan(score) else score,
            classes[best],
            float(probs[rank, best]),
        )
        rows.append(dict(zip(_TITLES, values, strict=True)))
    outputs: list[dict[str, Any]] = []
    if target is not None:
        publish_bytes(target, _format_csv(rows), may_replace=True)
        outputs.append({"role": "table", "path": str(target)})
    document = {
        "by": options.by,
        "pool": options.pool,
        "posterior": predictor.path.stem,
        "integrator": choice.variant,
        "rows": rows,
    }
    total = f"; together {float(np.sum(taken.scores)):.3g} nats" if options.by == "batchbald" else ""
    summary = f"{len(rows):,} of {len(ids):,} by {options.by}, {predictor.path.stem} ({choice.variant}){total}"
    return Result("", outputs, extra=document, summary=[summary], lines=[row["name"] for row in rows])


def _list_ids(pool: Split) -> list[str]:
    """Return the names of the examples, else their sample ids."""
    names = pool.content.names
    if names is None:
        return [str(one) for one in np.asarray(pool.content.sample_id).tolist()]
    return [bytes(one).decode(errors="surrogateescape") for one in names]


def _format_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _TITLES, lineterminator="\r\n")
    writer.writeheader()
    for row in rows:
        score = "" if row["score"] is None else format(row["score"], ".9g")
        writer.writerow(row | {"score": score, "probability": format(row["probability"], ".9g")})
    return text.getvalue().encode(errors="surrogateescape")
