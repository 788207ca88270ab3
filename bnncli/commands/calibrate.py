"""calibrate: fit decision rules with guarantees on a split that was used for nothing else, one file per rule."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import RULE_KIND, write_decision
from bnncli.artifacts.predictions import list_arrays
from bnncli.artifacts.provenance import Source
from bnncli.data.splits import hold_out_groups
from bnncli.errors import BnnError, CheckFailed, DataError, MissingInput, UsageError
from bnncli.evaluation import detectors
from bnncli.evaluation.decisions import (
    COSTS,
    KINDS,
    LAC,
    NUM_CLASS_SHARES,
    OOD,
    PRECISION,
    RAPS,
    RECALL,
    RISK,
    SCHEMES,
    SETS,
    SHIFT,
    CostRule,
    Rule,
    SetRule,
    SetScore,
    ShiftRule,
    choose_regularisation,
    fit_acceptance,
    fit_outliers,
    fit_precision,
    fit_recall,
    fit_thresholds,
    fit_weighted_threshold,
    mean_interval,
    min_accepted,
    min_scores_for_coverage,
    min_scores_for_rate,
    pool_rare_classes,
)
from bnncli.evaluation.density_ratio import estimate_ratio
from bnncli.evaluation.detectors import DEFAULT_SCORE, default_score
from bnncli.evaluation.groups import RowGroups
from bnncli.names import percent
from bnncli.numerics.digests import json_sha256
from bnncli.numerics.random import stream_seed
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, check_split_name, flag_of, option
from bnncli.options.shared import check_variant, find_class
from bnncli.session import revisions as _revisions
from bnncli.session.decisions import find_calibration_predictions, maker_of, scores_of
from bnncli.session.predictions import PredictionGroup
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import PredictedSplit
from bnncli.session.splits import fresh_split, require_unused

DEFAULT_CONFIDENCE = 0.95  # that the risk is below its bound, or the precision or recall above it
OF_LABELS = (SETS, RISK, PRECISION, RECALL, COSTS)  # rules that need labels of mutually exclusive classes
RULE_OPTIONS = ("sets", "risk", "precision", "recall", "costs", "false_alarm", "shift_level")  # each asks for one rule
FEWEST_WEIGHTED = 50  # examples of each split, and effective ones, for a threshold with weights
_LARGEST_COST = 1e100
TUNING_SHARE = 0.2  # of the calibration examples, to tune the regularisation of raps


def _list_scores() -> tuple[str, ...]:
    return tuple(detectors.prediction_detectors())


@dataclass(frozen=True)
class CalibrateOptions(CheckedOptions):
    """Options of calibrate."""

    split: str = option(
        "calib",
        "Split to calibrate on. Its examples must not have been used for fitting or model selection.",
        metavar="SPLIT",
        numeric=False,
        group="Predictions",
    )
    posterior: str | None = option(
        None,
        "Posterior whose predictions to calibrate. Default: auto's recommendation, else every posterior that "
        "predicted the split.",
        metavar="NAME",
        numeric=False,
        group="Predictions",
    )
    integrator: str | None = option(
        None,
        "Calibrate only this integrator's predictions: a name (mc), or a name with settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        numeric=False,
        group="Predictions",
    )
    sets: str | None = option(
        None,
        "Calibrate prediction sets: lac (smallest on average), aps (larger for harder examples) or raps (aps "
        "without the long tail).",
        choices=SCHEMES,
        group="Prediction sets",
    )
    coverage: float = option(
        0.9, "Share of examples whose class must be in their set.", minimum=0, maximum=1, group="Prediction sets"
    )
    class_conditional: bool = option(
        False,
        "Guarantee the coverage for each class separately. Classes with too few examples share one threshold.",
        group="Prediction sets",
    )
    shifted_to: str | None = option(
        None,
        "Guarantee the coverage on this split of the run, whose inputs have shifted and need no labels. It holds only "
        "if the density ratio, which a classifier on the features estimates, is right.",
        metavar="SPLIT",
        numeric=False,
        group="Prediction sets",
        is_rare=True,
    )
    nonempty: bool = option(
        False,
        "Add the most probable class to empty sets. This never lowers the coverage.",
        group="Prediction sets",
        is_rare=True,
    )
    nonrandomized: bool = option(
        False,
        "Do not randomise aps and raps. The sets become larger and their coverage is no longer exact.",
        group="Prediction sets",
        is_rare=True,
    )
    raps_penalty: float | None = option(
        None,
        f"Penalty per rank (lambda) of raps. Default: tuned on {percent(TUNING_SHARE, 'g')} of the split.",
        minimum=0,
        group="Prediction sets",
        is_rare=True,
    )
    raps_rank: int | None = option(
        None,
        f"Number of unpenalised ranks (k_reg) of raps. Default: tuned on {percent(TUNING_SHARE, 'g')} of the split.",
        minimum=0,
        group="Prediction sets",
        is_rare=True,
    )
    risk: float | None = option(
        None,
        "Accept predictions so that at most this share of the accepted ones is wrong.",
        minimum=0,
        maximum=1,
        group="Acceptance, one class, outliers and shift",
    )
    precision: float | None = option(
        None,
        "Flag examples of one class so that at least this share of the flagged ones is of the class.",
        minimum=0,
        maximum=1,
        group="Acceptance, one class, outliers and shift",
    )
    recall: float | None = option(
        None,
        "Flag examples of one class so that at least this share of the class is flagged.",
        minimum=0,
        maximum=1,
        group="Acceptance, one class, outliers and shift",
    )
    class_: str | None = option(
        None,
        "Class of \0precision\0 and \0recall\0, by name or index. Default: the second of two classes.",
        metavar="NAME",
        numeric=False,
        group="Acceptance, one class, outliers and shift",
    )
    costs: str | None = option(
        None,
        "Decide for the least expected cost: a CSV file with a row of costs for each true class, whose name is first, "
        "and a column for each decision. There may be further decisions than the classes, such as abstain.",
        metavar="FILE",
        numeric=False,
        group="Acceptance, one class, outliers and shift",
    )
    false_alarm: float | None = option(
        None,
        "Flag at most this share of in-distribution examples as out-of-distribution.",
        minimum=0,
        maximum=1,
        group="Acceptance, one class, outliers and shift",
    )
    shift_level: float | None = option(
        None,
        "Raise a shift alarm for at most this share of batches that have not shifted.",
        minimum=0,
        maximum=1,
        group="Acceptance, one class, outliers and shift",
    )
    confidence: float | None = option(
        None,
        f"Confidence that the guarantee holds for this calibration split. Default: {DEFAULT_CONFIDENCE} for "
        "\0risk\0, \0precision\0, \0recall\0 and \0costs\0; other rules hold on average over calibration splits.",
        minimum=0,
        maximum=1,
        group="Acceptance, one class, outliers and shift",
    )
    score: str | None = option(
        None,
        "Score for \0false_alarm\0 and \0shift_level\0. Default: combined, else mutual_info or max_prob.",
        choices=_list_scores,
        group="Acceptance, one class, outliers and shift",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split_name(self.split, "\0split\0")
        if self.shifted_to is not None:
            check_split_name(self.shifted_to, "\0shifted_to\0")
        for name in ("coverage", "risk", "precision", "recall", "false_alarm", "shift_level", "confidence"):
            if getattr(self, name) in (0, 1):
                raise UsageError(f"\0{name}\0: expected a number between 0 and 1; got {getattr(self, name):g}")

    def check_together(self) -> None:
        """Raise UsageError where no rule is requested, or an option lacks the one it belongs to."""
        if not self.kinds:
            raise UsageError(
                "nothing to calibrate: expected \0sets\0, \0risk\0, \0precision\0, \0recall\0, \0costs\0, \0false_alarm\0 or "
                "\0shift_level\0",
                hint="add \0sets\0 lac \0coverage\0 0.9",
            )
        names = ("class_conditional", "nonempty", "nonrandomized", "shifted_to")
        of_sets = {name: getattr(self, name) for name in names}
        of_raps = {"raps_penalty": self.raps_penalty, "raps_rank": self.raps_rank}
        for name, value in {**of_sets, **of_raps}.items():
            if value not in (None, False) and self.sets is None:
                raise UsageError(
                    f"\0{name}\0 applies to prediction sets: add \0sets\0 {RAPS if name in of_raps else 'aps'}"
                )
        if self.shifted_to is not None and (self.class_conditional or self.confidence is not None):
            other = "class_conditional" if self.class_conditional else "confidence"
            raise UsageError(f"\0shifted_to\0 and \0{other}\0 exclude each other: the coverage holds on average")
        if self.shifted_to == self.split:
            raise UsageError(f"\0shifted_to\0 {self.shifted_to}: expected another split than that of \0split\0")
        if self.class_ is not None and self.precision is None and self.recall is None:
            raise UsageError("\0class_\0 applies to one class: add \0precision\0 or \0recall\0")
        if self.nonrandomized and self.sets == LAC:
            raise UsageError("\0nonrandomized\0 applies to \0sets\0 aps and raps; lac is not randomised")
        given = [name for name, value in of_raps.items() if value is not None]
        if given and self.sets != RAPS:
            raise UsageError(f"\0{given[0]}\0 applies to raps: add \0sets\0 raps")
        if len(given) == 1:
            raise UsageError("\0raps_penalty\0 and \0raps_rank\0 go together: give both, or neither to tune them")

    @property
    def kinds(self) -> list[str]:
        """Return the requested rules, of KINDS."""
        asked = {
            SETS: self.sets, RISK: self.risk, PRECISION: self.precision, RECALL: self.recall,
            COSTS: self.costs,
            OOD: self.false_alarm, SHIFT: self.shift_level,
        }  # fmt: skip
        return [kind for kind in KINDS if asked[kind] is not None]

    @property
    def is_tuned(self) -> bool:
        """True where part of the split tunes the regularisation of raps."""
        return self.sets == RAPS and self.raps_penalty is None

    def settings(self, kind: str, seed: int) -> dict[str, object]:
        """Return the settings of a rule, which its file records and which identify a request."""
        if kind == SETS:
            is_seeded = self.is_tuned or self.shifted_to is not None or not (self.sets == LAC or self.nonrandomized)
            regularised = {"penalty": self.raps_penalty, "free_ranks": self.raps_rank} if self.sets == RAPS else {}
            return {
                "sets": self.sets,
                "coverage": self.coverage,
                "class_conditional": self.class_conditional,
                "nonempty": self.nonempty,
                "randomized": not (self.sets == LAC or self.nonrandomized),
                "confidence": self.confidence,
                "seed": seed if is_seeded else None,
                **regularised,
                **({} if self.shifted_to is None else {"shifted_to": self.shifted_to}),
            }
        if kind == RISK:
            return {"risk": self.risk, "confidence": self.confidence or DEFAULT_CONFIDENCE}
        if kind in (PRECISION, RECALL):
            level = self.precision if kind == PRECISION else self.recall
            return {kind: level, "class": self.class_, "confidence": self.confidence or DEFAULT_CONFIDENCE}
        if kind == COSTS:
            return {"confidence": self.confidence or DEFAULT_CONFIDENCE}
        if kind == OOD:
            return {"false_alarm": self.false_alarm, "confidence": self.confidence, "score": self.score}
        return {"shift_level": self.shift_level, "score": self.score}


COMMAND = Command(
    "Calibrate decisions with guarantees: prediction sets, acceptance, precision, recall, costs, outliers, shift.",
    "Needs predictions on a split that was not used for fitting or model selection, such as one set aside with "
    "extract-features --hold-out calib=test:2000. predict adds the decisions to its table; evaluate reports how "
    "they perform. Exits 3 if no threshold meets --risk or --precision. Writes "
    "decisions/<posterior>.<integrator>/<rule>.safetensors.",
    (CalibrateOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli calibrate ckpt.pt --sets lac --coverage 0.9",
        "bnncli calibrate ckpt.pt --posterior laplace --risk 0.02 --confidence 0.95 --false-alarm 0.05 --shift-level 0.01",
        "bnncli calibrate ckpt.pt --sets raps --class-conditional --name by-class",
        "bnncli calibrate ckpt.pt --recall 0.95 --class fraud",
        "bnncli calibrate ckpt.pt --costs costs.csv",
    ),
    section="Use",
    place=20,
)


def execute(run: Run, options: CalibrateOptions) -> Result:
    """Fit and publish each rule for each group of predictions. The result's metrics are by rule."""
    options.check_together()
    groups = find_calibration_predictions(run, options.split, options.posterior, options.integrator)
    if len(options.kinds) * len(groups) > 1 and run.naming.out is not None:
        raise UsageError(
            "--out FILE holds one rule of one posterior: ask for one rule and give --posterior and --integrator"
        )
    if len(options.kinds) > 1 and run.naming.name is not None:
        raise UsageError(f"--name names one rule: give only one of {', '.join(flag_of(name) for name in RULE_OPTIONS)}")
    run.require_device()
    total = Result()
    rules: list[dict[str, Any]] = []
    for group, header in groups:
        require_unused(run, group, header)
        for kind in options.kinds:
            result = _calibrate(run, options, kind, group, header)
            total.add(result)
            if result.metrics:
                rules.append({"rule": kind, "posterior": group.posterior, "variant": group.variant, **result.metrics})
    total.extra["rules"] = rules
    return total


def _calibrate(run: Run, options: CalibrateOptions, kind: str, group: PredictionGroup, header: Header) -> Result:
    """Fit and publish one rule for one group of predictions."""
    if options.score is None:
        options = replace(options, score=default_score([list_arrays(header.path)]))
        if options.score != DEFAULT_SCORE and kind in (OOD, SHIFT):
            run.console.info(
                f"{group.name}: using the {options.score} score, because its predictions lack the {DEFAULT_SCORE} score"
            )
    if kind in (OOD, SHIFT) and options.score == DEFAULT_SCORE and options.split == "val":
        message = (
            f"split 'val' cannot calibrate {group.name} with the {DEFAULT_SCORE} score, which uses ranks within val"
        )
        raise DataError(message, code="split_was_used", hint=fresh_split(run, options.split), path=header.path)
    if kind in (PRECISION, RECALL):
        options = replace(options, class_=_choose_class(options.class_, PredictedSplit(header).file.classes))
    settings, costs = options.settings(kind, run.compute.seed), None
    if kind == COSTS:
        costs = read_costs(str(options.costs), PredictedSplit(header).file.classes)
        settings |= {"costs": f"sha256:{json_sha256(costs.costs.tolist())}", "decisions": list(costs.names)}
    named = run.folder.decision(group.name, run.naming.name or kind)
    target = Path(run.naming.out) if run.naming.out else named
    sources = [Source(f"predictions.{options.split}", header.path, header.content_digest)]
    if kind == SETS and options.shifted_to is not None:
        paths = [run.folder.features(name) for name in (options.split, options.shifted_to)]
        sources += [_find_features(run, path) for path in paths]
    checkpoint = header.provenance.get("checkpoint")
    if kind in OF_LABELS and not header.meta.get("is_labeled"):
        message = f"split {options.split!r} has no labels; {kind} needs them"
        raise DataError(message, code="no_labels", path=header.path)
    request = Request(
        target,
        RULE_KIND,
        f"{RULE_KIND}.{group.name}.{target.stem}",
        {"rule": kind, **settings},
        _revisions.CALIBRATE,
        sources,
        checkpoint,
        lambda: 8 * int(header.meta["num_examples"]) + (1 << 12),
    )

    def compute() -> ComputationOutput:
        rule, classes, metrics = fit_rule(
            header, kind, settings, is_tuned=options.is_tuned, costs=costs, features=[one.path for one in sources[1:]]
        )
        names = ("posterior", "integrator", "split", "num_examples")
        meta = {name: header.meta[name] for name in names} | {"variant": group.variant, "rule": kind}
        meta |= {"classes": classes, "settings": settings, "maker": maker_of(header), "metrics": metrics}

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_decision(target, rule, meta=meta, provenance=provenance, may_replace=may_replace)

        return ComputationOutput(
            publish,
            metrics,
            [f"{group.name}: {format_guarantee(kind, settings, metrics)}"],
            _find_failure(kind, metrics),
        )

    def when_fresh(found: Header) -> ComputationOutput:
        metrics = found.meta["metrics"]
        text = f"{group.name}: {format_guarantee(kind, settings, metrics)}"
        return ComputationOutput(
            lambda provenance, may_replace: found.content_digest, metrics, [text], _find_failure(kind, metrics)
        )

    if kind == SETS:
        _warn_of_missing_classes(run, options.split, PredictedSplit(header).file.classes)
    result = produce(run, request, compute, when_fresh=when_fresh)
    for text in _list_cautions(result.metrics):
        run.console.warn(f"{group.name}: {text}")
    return result


def _warn_of_missing_classes(run: Run, split: str, classes: Sequence[str]) -> None:
    """Warn where the train split has classes that the calibration split lacks."""
    paths = [run.folder.features(name) for name in ("train", split)]
    train, own = (read_header(path).meta.get("class_counts") if path.is_file() else None for path in paths)
    if train is None or own is None:
        return
    missing = [name for name, known, here in zip(classes, train, own, strict=True) if known and not here]
    if missing:
        run.console.warn(
            f"split {split!r} has no examples of {_join_names(missing)}, which train has: nothing is known about the "
            "coverage of such examples, so new data with them may have less than the requested coverage; calibrate on a "
            "split with examples of every class"
        )


def _list_cautions(metrics: Mapping[str, Any]) -> list[str]:
    """Return what limits the use of prediction sets."""
    found = []
    if "pooled" in metrics:
        found.append(
            f"too few examples for a threshold of their own: {_join_names(metrics['pooled'])} share one threshold, and "
            "the coverage holds for them together, not for each"
        )
    if "tied_in_full_sets" in metrics:
        tied = metrics["tied_in_full_sets"]
        saturated = (
            f": {tied} of {metrics['num_examples']} examples have exactly the threshold's score, which saturated "
            "probabilities cause; use a posterior with softer ones, or a lower \0coverage\0"
            if tied > 1
            else "; use a lower \0coverage\0"
        )
        found.append(f"every set contains every class, so the sets say nothing{saturated}")
    return found


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more classes" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"


def fit_rule(
    header: Header,
    kind: str,
    settings: Mapping[str, Any],
    *,
    is_tuned: bool,
    costs: CostRule | None = None,
    features: Sequence[Path] = (),
) -> tuple[Rule, list[str], dict[str, Any]]:
    """Fit a rule. Return it with its classes and the metrics of the fit.

    Args:
        costs: the rule itself if the kind is costs, which only needs to be judged.
        features: files of the split and of the one it has shifted to, if any.

    Raises:
        DataError: too few examples for the level, several labels per example, or an unknown score.
    """
    split = PredictedSplit(header)
    if split.groups is not None and (kind == SHIFT or features):
        name = "shift_level" if kind == SHIFT else "shifted_to"
        message = f"split {split.name!r} has rows in groups, but \0{name}\0 needs independent rows"
        hint = "the other rules take groups into account; or extract the split with one row per group"
        raise DataError(message, code="dependent_rows", hint=hint, path=header.path)
    if kind in OF_LABELS and not split.file.is_exclusive:
        message = (
            "this run is multilabel; sets, acceptance, precision, recall and costs need mutually exclusive classes"
        )
        raise DataError(message, code="several_labels", path=header.path)
    if kind == SETS:
        rule, metrics = _fit_sets(split, settings, is_tuned=is_tuned, features=features)
    elif kind == RISK:
        rule, metrics = _fit_acceptance(split, settings)
    elif kind in (PRECISION, RECALL):
        rule, metrics = _fit_class(split, kind, settings)
    elif costs is not None:
        rule, metrics = costs, _judge_costs(split, costs, settings["confidence"])
    elif kind == OOD:
        rule, metrics = _fit_outliers(split, settings)
    else:
        scores = scores_of(split, settings["score"])
        _require(split, len(scores), 1, what="a test")
        rule, metrics = ShiftRule(np.sort(scores.astype(np.float64)), settings["shift_level"]), {}
    counts = {"num_examples": len(split.examples)}
    counts |= {} if split.groups is None else {"num_groups": len(split.groups)}
    return rule, list(split.file.classes), {**counts, **metrics}


Fit = tuple[Rule, dict[str, Any]]


def _fit_sets(split: PredictedSplit, settings: Mapping[str, Any], *, is_tuned: bool, features: Sequence[Path]) -> Fit:
    probs, labels = split.file.probs, split.examples.labels
    assert labels is not None
    coverage, num_classes = settings["coverage"], probs.shape[1]
    seed = settings["seed"] if settings["randomized"] else None
    uniform = SetScore("aps", seed).uniform(split.name, len(labels))
    rows, groups = np.arange(len(labels)), split.groups
    if is_tuned:
        rows, tuning = _divide_for_tuning(split, stream_seed(settings["seed"], "sets/tuning"))
        score = choose_regularisation(
            probs[tuning], labels[tuning], coverage, seed=seed, uniform=None if uniform is None else uniform[tuning]
        )
    elif settings["sets"] == "raps":
        score = SetScore("raps", seed, settings["penalty"], settings["free_ranks"])
    else:
        score = SetScore(settings["sets"], seed)
    own, labels = score.of_labels(probs, labels, uniform)[rows], labels[rows]
    groups = None if groups is None else groups.of_rows(rows)
    pooled = _pool_classes(split, labels, settings, groups)
    found: dict[str, Any] = {"pooled": [split.file.classes[k] for k in pooled]} if pooled else {}
    if features:
        thresholds, shift = _weigh_threshold(split, own, rows, settings, features)
        found |= shift
    else:
        thresholds = fit_thresholds(
            own,
            labels if settings["class_conditional"] else None,
            coverage,
            num_classes=num_classes,
            confidence=settings["confidence"],
            pooled=pooled,
            groups=groups,
        )
    rule = SetRule(score, thresholds, settings["nonempty"])
    if all(sets.all() for _, sets in rule.set_blocks(probs, uniform)):
        found["tied_in_full_sets"] = int((own == thresholds[labels if len(thresholds) > 1 else 0]).sum())
    chosen = {"penalty": score.penalty, "free_ranks": score.free_ranks} if settings["sets"] == "raps" else {}
    counts = {"num_examples": len(rows)} | ({} if groups is None else {"num_groups": len(groups)})
    return rule, {**counts, "thresholds": thresholds.tolist(), **chosen, **found}


def _divide_for_tuning(split: PredictedSplit, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to calibrate on and those to tune with, TUNING_SHARE of all, by whole groups if there are any."""
    size = len(split.examples)
    count = int(TUNING_SHARE * size)
    _require(split, count, 1, what="choosing the raps penalty")
    if split.groups is not None:
        _require(split, len(split.groups), 2, what="choosing the raps penalty", of="groups")
        return hold_out_groups(split.groups.index, count, seed)
    order = np.random.default_rng(seed).permutation(size)
    return np.sort(order[count:]), np.sort(order[:count])


def _weigh_threshold(
    split: PredictedSplit, scores: np.ndarray, rows: np.ndarray, settings: Mapping[str, Any], paths: Sequence[Path]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the threshold (1,) for the split that the inputs have shifted to, and numbers of the density ratio."""
    here, there = (read_features(path) for path in paths)
    if not np.array_equal(here.sample_id, split.file.sample_id):
        raise DataError(f"{paths[0]} and the predictions have other examples", code="other_rows", path=paths[0])
    for one in (here, there):
        if len(one.features) < FEWEST_WEIGHTED:
            raise DataError(
                f"split {one.name!r} has {len(one.features)} examples; \0shifted_to\0 needs at least {FEWEST_WEIGHTED} "
                "of each split",
                code="too_few",
            )
    ratio = estimate_ratio(np.asarray(here.features)[rows], np.asarray(there.features), seed=settings["seed"])
    size, coverage = ratio.effective_size, settings["coverage"]
    least = max(FEWEST_WEIGHTED, min_scores_for_coverage(coverage))
    threshold = fit_weighted_threshold(scores, ratio.weights, ratio.bound, coverage)
    if size < least or threshold is None:
        raise DataError(
            f"split {split.name!r} is worth {size:.0f} examples of split {there.name!r} (effective sample size, of "
            f"{len(rows)}); a coverage of {coverage:g} needs at least {least}",
            code="too_few",
            hint=f"calibrate on labelled examples like those of {there.name!r}; the shift is too large for weights",
            path=split.header.path,
        )
    return np.array([threshold]), {
        "effective_size": size,
        "largest_weight": ratio.bound / float(ratio.weights.mean()),
        "shift_auroc": ratio.auroc,
    }


def _find_features(run: Run, path: Path) -> Source:
    """Return the features of a split as a source, if they are there and up to date."""
    if not path.is_file():
        raise MissingInput(
            f"{run.checkpoint_path} has no features of split {path.stem!r} (have: {', '.join(run.folder.splits())})",
            hint=run.suggest("extract-features", data=f"{path.stem}=KIND:FILE"),
            path=path,
        )
    header = read_header(path)
    run.use(header)
    return Source(f"features.{path.stem}", path, header.content_digest)


def _pool_classes(
    split: PredictedSplit, labels: np.ndarray, settings: Mapping[str, Any], groups: RowGroups | None
) -> list[int]:
    """Return the classes with too few examples, or groups, for a threshold of their own. Raise DataError where that leaves none."""
    least = min_scores_for_coverage(settings["coverage"], settings["confidence"])
    unit, every = ("examples", len(labels)) if groups is None else ("groups", len(groups))
    if not settings["class_conditional"]:
        _require(split, every, least, what=f"a coverage of {settings['coverage']:g}", of=unit)
        return []
    counts = np.bincount(labels, minlength=len(split.file.classes))
    if groups is not None:  # with examples of each class
        counts = np.array([len(groups.of_rows(np.flatnonzero(labels == k))) for k in range(len(counts))])
    pooled = pool_rare_classes(counts, least)
    if groups is not None and pooled:  # one group may have several of the classes
        together = len(groups.of_rows(np.flatnonzero(np.isin(labels, pooled))))
        pooled = pooled if together >= least else list(range(len(counts)))
    if len(pooled) == len(counts):
        few = [f"{name} {count}" for name, count in zip(split.file.classes, counts, strict=True) if count < least]
        more = f" and {len(few) - 8} more classes" if len(few) > 8 else ""
        raise DataError(
            f"split {split.name!r}: coverage {settings['coverage']:g} for each class needs at least {least} "
            f"{unit} of at least two classes or pools of classes; got {', '.join(few[:8])}{more}",
            code="too_few",
            hint="calibrate on a larger split, or without \0class_conditional\0",
            path=split.header.path,
        )
    return pooled


def _fit_acceptance(split: PredictedSplit, settings: Mapping[str, Any]) -> Fit:
    examples, risk, certainty = split.examples, settings["risk"], settings["confidence"]
    assert examples.is_right is not None
    count, unit = _count_units(split)
    _require(split, count, min_accepted(risk, certainty), what=f"a risk of {risk:g}", of=unit)
    rule = fit_acceptance(examples.confidence, examples.is_right, risk, certainty, groups=split.groups)
    return rule, {
        "most_doubt": rule.most_doubt,
        "threshold": None if rule.most_doubt is None else 1 - rule.most_doubt,
        "num_accepted": rule.num_accepted,
        "num_wrong": rule.num_wrong,
    }


def _choose_class(given: str | None, classes: list[str]) -> str:
    """Return the name of the class of a precision or recall rule."""
    if given is not None:
        return classes[find_class(given, classes, f"\0class_\0 {given}")]
    if len(classes) != 2:
        raise UsageError(
            f"\0class_\0: expected one of the {len(classes)} classes, which \0precision\0 and \0recall\0 need"
        )
    return classes[1]


def _fit_class(split: PredictedSplit, kind: str, settings: Mapping[str, Any]) -> Fit:
    level, name, certainty = settings[kind], settings["class"], settings["confidence"]
    of_class, labels = list(split.file.classes).index(name), split.examples.labels
    assert labels is not None
    probability, is_positive = split.file.probs[:, of_class], labels == of_class
    if kind == PRECISION:
        least = min_accepted(1 - level, certainty, num_shares=NUM_CLASS_SHARES)
        count, unit = _count_units(split)
        _require(split, count, least, what=f"a precision of {level:g}", of=unit)
        rule = fit_precision(probability, is_positive, level, certainty, of_class=of_class, groups=split.groups)
    else:
        least = min_scores_for_coverage(level, certainty)
        count, unit = _count_units(split, np.flatnonzero(is_positive))
        _require(split, count, least, what=f"a recall of {level:g}", of=f"{unit} of {name}")
        rule = fit_recall(probability, is_positive, level, certainty, of_class=of_class, groups=split.groups)
    return rule, {
        "threshold": rule.threshold,
        "num_flagged": rule.num_flagged,
        "num_right": rule.num_right,
        "num_positive": rule.num_positive,
    }


def read_costs(place: str, classes: Sequence[str]) -> CostRule:
    """Read a CSV file of costs: decisions in the first line, then a line for each class, in any order.

    Raises:
        MissingInput, DataError: there is no such file, or it is no matrix of numbers for these classes.
    """
    path = Path(place)

    def refuse(why: str) -> DataError:
        hint = f"expected lines such as: class,{','.join(classes[:2])},abstain and {classes[0]},0,1,0.3"
        return DataError(f"\0costs\0 {place}: {why}", code="bad_costs", path=path, hint=hint)

    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            lines = [line for line in csv.reader(stream) if line]
    except FileNotFoundError:
        raise MissingInput(f"\0costs\0 {place}: no such file", path=path) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise refuse(f"cannot be read as CSV ({' '.join(str(error).split())[:120]})") from None
    names = [name.strip() for name in lines[0][1:]] if lines else []
    if not names or "" in names or len({*names}) < len(names):
        raise refuse("expected a first line with different names of decisions after its first cell")
    rows: dict[str, list[float]] = {}
    for number, (first, *cells) in enumerate(lines[1:], 2):
        name = first.strip()
        if name not in classes or name in rows:
            known = "twice" if name in rows else "which is no class of the run"
            raise refuse(f"line {number} is for {name!r}, {known} (classes: {', '.join(classes[:20])})")
        try:
            rows[name] = [float(cell) for cell in cells]
        except ValueError as error:
            raise refuse(f"line {number}: {error}") from None
        if len(cells) != len(names) or not (np.abs(rows[name]) <= _LARGEST_COST).all():
            raise refuse(
                f"line {number}: expected {len(names)} costs of at most {_LARGEST_COST:g}; got {', '.join(cells)}"
            )
    if missing := [name for name in classes if name not in rows]:
        raise refuse(f"has no line for {_join_names(missing)}")
    return CostRule(np.array([rows[name] for name in classes]), tuple(names))


def _count_units(split: PredictedSplit, rows: np.ndarray | None = None) -> tuple[int, str]:
    """Return the number of independent units among some rows, or all, and what they are: examples or groups."""
    rows = np.arange(len(split.examples)) if rows is None else rows
    return (len(rows), "examples") if split.groups is None else (len(split.groups.of_rows(rows)), "groups")


def _judge_costs(split: PredictedSplit, rule: CostRule, certainty: float) -> dict[str, Any]:
    """Return the mean costs of the decisions, of deciding for the predicted class, and of the best constant decision.

    Savings are differences of the mean costs. The interval of the saving against a constant holds for every decision at
    once, as the best one is chosen on the same examples.
    """
    labels, classes = split.examples.labels, list(split.file.classes)
    assert labels is not None
    _require(split, len(labels), 1, what="judging costs")
    costs, decisions = rule.costs, len(rule.names)
    decided, expected = rule.decide(split.file.probs)
    own, bounds = costs[labels, decided], (float(costs.min()), float(costs.max()))
    spread = bounds[1] - bounds[0]

    def units(values: np.ndarray) -> np.ndarray:
        """Return independent values: of each example, or the mean of each group."""
        return values if split.groups is None else split.groups.means(values)

    def compare(other: np.ndarray, level: float) -> dict[str, Any]:
        savings = units(other - own)
        interval = mean_interval(savings, (-spread, spread), level)
        return {"cost": float(units(other).mean()), "saving": float(savings.mean()), "saving_interval": list(interval)}

    best = int(np.argmin([units(column).mean() for column in costs[labels].T]))
    found = {
        "cost": float(units(own).mean()),
        "cost_interval": list(mean_interval(units(own), bounds, certainty)),
        "expected_cost": float(units(expected).mean()),
        "decided": np.bincount(decided, minlength=decisions).tolist(),
        "constant": {"decision": rule.names[best], **compare(costs[labels, best], 1 - (1 - certainty) / decisions)},
    }
    of_classes = rule.of_classes(classes)
    if of_classes is not None:
        found["argmax"] = compare(costs[labels, of_classes[split.examples.predicted]], certainty)
    return found


def _fit_outliers(split: PredictedSplit, settings: Mapping[str, Any]) -> Fit:
    scores, rate, certainty = scores_of(split, settings["score"]), settings["false_alarm"], settings["confidence"]
    count, unit = _count_units(split)
    _require(split, count, min_scores_for_rate(rate, certainty), what=f"a false-alarm rate of {rate:g}", of=unit)
    rule = fit_outliers(scores, rate, certainty, groups=split.groups)
    return rule, {"threshold": rule.threshold}


def _require(split: PredictedSplit, count: int, least: int, *, what: str, of: str = "examples") -> None:
    """Raise DataError where there are fewer examples than required."""
    if count < least:
        what = f"{what}, by group," if of.startswith("groups") else what
        raise DataError(
            f"split {split.name!r} has {count} {of} to calibrate on; {what} needs at least {least}",
            code="too_few",
            hint="calibrate on a larger split",
            path=split.header.path,
        )


def format_guarantee(kind: str, settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return one line with the guarantee and the fit."""
    certainty = settings.get("confidence")
    often = (
        "on average over calibration splits"
        if certainty is None
        else f"in {percent(certainty, 'g')} of calibration splits"
    )
    count = metrics["num_examples"]
    in_groups = f" in {metrics['num_groups']} groups" if "num_groups" in metrics else ""
    if in_groups:
        often = f"for a random example of a new group, {often}"
    if kind == SETS:
        whose = "of each class's examples" if settings["class_conditional"] else "of examples"
        thresholds = metrics["thresholds"]
        shown = (
            f"threshold {thresholds[0]:.4g}"
            if len(thresholds) == 1
            else f"thresholds {min(thresholds):.4g} to {max(thresholds):.4g}"
        )
        raps = (
            f"; penalty {metrics['penalty']:g} beyond rank {metrics['free_ranks']}"
            if settings["sets"] == "raps"
            else ""
        )
        if "shifted_to" in settings:
            whose = f"of examples like those of split {settings['shifted_to']}"
            often = (
                f"{often} if the density ratio of the features is right: effective sample size "
                f"{metrics['effective_size']:.0f}, largest weight {metrics['largest_weight']:.3g}, AUROC between the "
                f"splits {metrics['shift_auroc']:.3f}"
            )
        return (
            f"{settings['sets']} sets contain the class of at least {percent(settings['coverage'], 'g')} {whose}, "
            f"{often} ({shown}{raps}; {count} examples{in_groups})"
        )
    if kind == RISK:
        if metrics["most_doubt"] is None:
            return f"no threshold keeps wrong predictions to at most {percent(settings['risk'], 'g')} ({count} examples{in_groups})"
        if metrics["threshold"] == 0:
            return (
                f"accept every prediction: at most {percent(settings['risk'], 'g')} are wrong, {often}; here "
                f"{metrics['num_wrong']} of {count}"
            )
        wrong = percent(metrics["num_wrong"] / metrics["num_accepted"]) if metrics["num_accepted"] else "none"
        return (
            f"accept predictions with a confidence of at least {metrics['threshold']:.6g}: at most "
            f"{percent(settings['risk'], 'g')} are wrong, {often}; here {metrics['num_accepted']} of {count} are "
            f"accepted and {metrics['num_wrong']} of those are wrong ({wrong})"
        )
    if kind in (PRECISION, RECALL):
        name, level = settings["class"], percent(settings[kind], "g")
        if metrics["threshold"] is None:
            return f"no threshold gives a precision for {name} of at least {level} ({count} examples{in_groups})"
        promised = (
            f"at least {level} of those are {name}" if kind == PRECISION else f"this flags at least {level} of {name}"
        )
        return (
            f"flag examples with a probability of {name} of at least {metrics['threshold']:.6g}: {promised}, {often}; "
            f"here {metrics['num_flagged']} of {count} are flagged, {metrics['num_right']} of those are {name}, of "
            f"{metrics['num_positive']} in all"
        )
    if kind == COSTS:
        low, high = metrics["cost_interval"]
        return (
            f"decide for the least expected cost of {', '.join(settings['decisions'])}: mean cost {metrics['cost']:.4g} "
            f"({low:.4g} to {high:.4g}, {often}), expected {metrics['expected_cost']:.4g}; saves "
            + " and ".join(_format_savings(metrics))
            + f" ({count} examples{in_groups})"
        )
    if kind == OOD:
        return (
            f"an example is out-of-distribution if its {settings['score']} score is below "
            f"{metrics['threshold']:.6g} (higher is more in-distribution): at most "
            f"{percent(settings['false_alarm'], 'g')} false alarms, {often} ({count} examples{in_groups})"
        )
    return (
        f"a batch has shifted if p is at most {settings['shift_level']:g}: two-sample Kolmogorov-Smirnov test on "
        f"{settings['score']} against {count} examples"
    )


def _format_savings(metrics: Mapping[str, Any]) -> list[str]:
    others = {f"always {metrics['constant']['decision']}": metrics["constant"]}
    if "argmax" in metrics:
        others = {"the most probable class": metrics["argmax"], **others}
    return [
        f"{one['saving']:.4g} ({one['saving_interval'][0]:.4g} to {one['saving_interval'][1]:.4g}) against {name}"
        for name, one in others.items()
    ]


def _find_failure(kind: str, metrics: dict[str, Any]) -> BnnError | None:
    """Return the failure where no threshold is shown to meet the risk or precision, so that the rule accepts nothing."""
    units = "groups" if "num_groups" in metrics else "examples"
    if kind == PRECISION and metrics["threshold"] is None:
        return CheckFailed(
            f"no threshold reaches the requested precision: at the best one, {metrics['num_right']} of "
            f"{metrics['num_flagged']} flagged examples are right; the rule flags nothing",
            code="no_threshold",
            hint=f"use a smaller --precision, or calibrate on more {units} {'with' if units == 'groups' else 'of'} the class",
        )
    if kind != RISK or metrics["most_doubt"] is not None:
        return None
    tried = (
        f"of the {metrics['num_accepted']} most confident predictions, {metrics['num_wrong']} are wrong; "
        if metrics["num_accepted"]
        else ""
    )
    return CheckFailed(
        f"no threshold reaches the requested risk: {tried}the rule accepts nothing",
        code="no_threshold",
        hint=f"use a larger --risk, or calibrate on more {units}",
    )
