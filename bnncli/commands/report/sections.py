"""Write the sections of a report: scores, calibration, detection, decisions, fidelity, fits, chains, posteriors."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.posteriors import DecisionFile, read_posterior
from bnncli.commands.diagnose import Judgement
from bnncli.commands.diagnose.diagnosis import diagnosis_tables
from bnncli.commands.report.subject import MOST_DRAWN, Subject, parameter_name, try_find
from bnncli.evaluation.convergence import GOOD_RHAT, RankStatistics, parameter_statistics
from bnncli.evaluation.curves import (
    HISTOGRAM_EDGES,
    MOST_POINTS,
    Curve,
    block_means,
    density_grid,
    estimate_density,
    histogram,
    quantile_indices,
    rank_band,
    rank_counts,
    reliability_curve_of_predictions,
    roc_curve,
    standardised_distances,
)
from bnncli.evaluation.decisions import COSTS, KINDS, OOD, PRECISION, RECALL, RISK, SETS
from bnncli.evaluation.scores import all_scores
from bnncli.evaluation.statistics import Row
from bnncli.evaluation.verdict import CLOSE_LOG_WEIGHT_SD, DENSITIES, GOOD_ESS, POINTS
from bnncli.figures.chains import ChainTraces, Histogram, Mixing, RankHistograms, Trace
from bnncli.figures.fits import LABELS, LinePanel, LinePanels, PriorPrecisionCurve, Series
from bnncli.figures.pages import Block, DataTable, Missing, TableCell, code, element, paragraph
from bnncli.figures.posteriors import DistanceMatrix, Marginal, Marginals, Weights, WeightSpread
from bnncli.figures.predictions import ConfidenceHistograms, ReliabilityDiagrams, RiskCoverage, Roc, merge_equal_curves
from bnncli.figures.scores import Line, ScoreIntervals, ScorePanel
from bnncli.latent.fit import History
from bnncli.names import percent
from bnncli.options.scoring import Quantity
from bnncli.session.chains import format_deciding_diagnostic
from bnncli.session.decisions import open_decisions
from bnncli.session.inputs import open_samples, require_draws
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import Table
from bnncli.session.score_rows import PredictedSplit, find_metric
from bnncli.session.score_tables import build_score_columns, legend, score_table, score_title
from bnncli.session.val_report import gain_table

if TYPE_CHECKING:
    from torch import Tensor


def scores(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.rows, Missing):
        return [subject.rows]
    options = subject.shown
    rows = _own_scores(subject.rows)
    notes = legend(rows, options, options.shown_scores, _replicates(subject))
    table = score_table(rows, notes, scores=options.shown_scores, intervals=True)
    blocks: list[Block] = [
        paragraph(
            "Each score with its 95% interval over examples. To compare two posteriors, use ",
            code(subject.run.suggest("compare")),
            ", which pairs them by example.",
        ),
        data_table(table, f"{subject.key}score-table", f"Scores on {subject.split}{subject.of}, by evaluate", first=1),
    ]
    figure = _figure(subject)
    blocks += [
        data_table(table, f"{subject.key}gains", f"Source of the gain on val{subject.of}")
        for table in gain_table(subject.headers)
    ]
    return [*blocks, *([figure] if figure is not None else [])]


def _replicates(subject: Subject) -> int:
    assert not isinstance(subject.rows, Missing)
    intervals = [m.get("interval") or {} for row in subject.rows for m in row["metrics"]]
    return max((int(one["replicates"]) for one in intervals if one.get("replicates")), default=0)


_MOST_PANELS = 12
_BETTER = {True: "\n(higher is better)", False: "\n(lower is better)", None: ""}


def _figure(subject: Subject) -> ScoreIntervals | None:
    """Return a figure with a panel for each score that has intervals."""
    assert not isinstance(subject.rows, Missing)
    rows = [row for row in _own_scores(subject.rows) if row.get("name") in {group.name for group in subject.drawn}][
        :MOST_DRAWN
    ]
    panels = []
    for score in build_score_columns(rows, subject.shown.shown_scores):
        lines = []
        for metric in score.metrics:
            ends = None if metric is None else metric.get("interval")
            value = None if metric is None else metric["value"]
            interval = None if ends is None or value is None else (ends["low"], ends["high"])
            lines.append(Line((), value, interval, is_marked=True))
        if any(line.interval is not None for line in lines):
            panels.append(ScorePanel(score.title + _BETTER[score.higher_is_better], lines))
    if not panels:
        return None
    return ScoreIntervals(
        f"{subject.key}scores-{subject.split}",
        [subject.titles[row["name"]] for row in rows],
        panels[:_MOST_PANELS],
        f"Scores on {subject.split} with 95% intervals",
        "The interval for ECE excludes the floor, and may be below the mark.",
    )


def _own_scores(rows: list[Row]) -> list[Row]:
    """Return the rows without comparisons with a reference, which have their own section."""
    return [
        {**row, "metrics": [m for m in row["metrics"] if all_scores()[m["name"]].of_reference is None]} for row in rows
    ]


def calibration(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.groups, Missing):
        return [subject.groups]
    curves = {subject.titles[group.name]: _reliability_curve(subject, group) for group in subject.drawn}
    found = {key: curve for key, curve in curves.items() if curve is not None}
    if not found:
        return [Missing(f"Split {subject.split} has no labels, so calibration cannot be measured.")]
    errors = {subject.titles[group.name]: score_value(subject, group, Quantity("ece")) for group in subject.drawn}
    return [*note_left_out(subject), ReliabilityDiagrams(found, subject.split, errors, subject.key)]


def _reliability_curve(subject: Subject, group: PredictionGroup) -> Curve | None:
    """Return the bins of the confidence; with several labels per example, of all decisions."""
    binned = subject.binned(group, subject.split)
    if binned.right is not None:
        return binned.reliability() if binned.num_examples else None
    split = PredictedSplit(group.splits(is_ood=False)[subject.split])
    return None if split.file.labels is None else reliability_curve_of_predictions(split.file.probs, split.examples)


def note_left_out(subject: Subject) -> list[Any]:
    """Return a sentence where there are more posteriors than a figure shows."""
    assert not isinstance(subject.groups, Missing)
    rest = len(subject.groups) - len(subject.drawn)
    if rest <= 0:
        return []
    return [
        paragraph(f"Figures show the first {MOST_DRAWN} of {len(subject.groups)} sets of predictions.", kind="note")
    ]


_MOST_SPLITS = 3  # out of distribution, in one report


def detection(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.groups, Missing):
        return [subject.groups]
    outside = subject.outside[:_MOST_SPLITS]
    blocks: list[Block] = [_histograms(subject, outside)]
    risk = _risk(subject)
    blocks += [risk] if risk is not None else []
    for ood in outside:
        roc = _roc(subject, ood)
        blocks += [roc] if roc is not None else []
    if not outside:
        command = subject.run.suggest("extract-features", model="MODEL", ood=["NAME=SPEC"])
        blocks.append(
            Missing(
                "The run has no out-of-distribution split, so detection of unknown inputs was not measured.",
                command,
            )
        )
    return blocks


def _histograms(subject: Subject, outside: list[str]) -> ConfidenceHistograms:
    panels = {}
    for group in subject.drawn:
        there = [subject.split, *(name for name in outside if name in group.splits(is_ood=True))]
        panels[subject.titles[group.name]] = {name: subject.binned(group, name).histogram() for name in there}
    return ConfidenceHistograms(HISTOGRAM_EDGES.tolist(), panels, subject.split, subject.key)


def _risk(subject: Subject) -> RiskCoverage | None:
    curves, areas = {}, {}
    for group in subject.drawn:
        curve = subject.binned(group, subject.split).risk_coverage()
        if curve is not None:
            title = subject.titles[group.name]
            curves[title], areas[title] = curve, score_value(subject, group, Quantity("aurc"))
    return RiskCoverage(curves, subject.split, areas, subject.key) if curves else None


def _roc(subject: Subject, ood: str) -> Roc | None:
    curves: dict[str, Curve] = {}
    areas, score = {}, subject.shown.curve_score
    for group in subject.drawn:
        if ood not in group.splits(is_ood=True):
            continue
        curve = _roc_curve(subject, group, ood, score)
        if curve is not None:
            title = subject.titles[group.name]
            curves[title], areas[title] = curve, score_value(subject, group, Quantity("auroc", (ood, score)))
    if not curves:
        return None
    shown, known = merge_equal_curves(curves, areas)
    return Roc(shown, subject.split, ood, known, score, subject.key)


def _roc_curve(subject: Subject, group: PredictionGroup, ood: str, score: str) -> Curve | None:
    """Return the ROC curve of one group; None without the score or without examples."""
    if score == "max_prob":
        return subject.binned(group, subject.split).roc(subject.binned(group, ood))
    headers = group.splits(is_ood=False)[subject.split], group.splits(is_ood=True)[ood]
    inside, outside = (PredictedSplit(header).detection_scores([score])[score] for header in headers)
    if isinstance(inside, str) or isinstance(outside, str) or not len(inside) or not len(outside):
        return None
    return roc_curve(inside, outside, most=MOST_POINTS)


def score_value(subject: Subject, group: PredictionGroup, wanted: Quantity) -> float | None:
    """Return a group's score in its usual form; None where evaluate does not have it."""
    metric = score_metric(subject, group, wanted)
    return None if metric is None or metric["value"] is None else float(metric["value"])


def score_metric(subject: Subject, group: PredictionGroup, wanted: Quantity) -> dict[str, Any] | None:
    """Return a group's score in its usual form with all its details; None where evaluate does not have it."""
    row = subject.row_of(group)
    found = [] if row is None else find_metric(row["metrics"], wanted)
    return found[0] if found else None


def decisions(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.rows, Missing):
        return [subject.rows]
    rows = []
    for row in subject.rows:
        own = [m for m in row["metrics"] if all_scores()[m["name"]].is_of_rule and m["value"] is not None]
        rules = {one.name: one for one in open_decisions(subject.run, row["name"])}
        known = sorted(
            (m for m in own if m["rule"] in rules), key=lambda m: (KINDS.index(rules[m["rule"]].kind), m["rule"])
        )
        rows += [_cells(subject.titles[row["name"]], rules[m["rule"]], m) for m in known]
    if not rows:
        sentence = (
            f"No rule of calibrate was scored on {subject.split}. Prediction sets, accepted predictions, "
            "outliers and shift alarms with guarantees need a split that was not used to choose anything else."
        )
        return [Missing(sentence, subject.run.suggest("calibrate", sets="lac"))]
    return [
        DataTable(
            f"{subject.key}decisions-table",
            f"Decisions on {subject.split}",
            ["posterior", "rule", "guaranteed", "result", "value"],
            rows,
            notes=[
                "Brackets: 95% interval. Guarantees hold for examples like those the rule was calibrated on; a "
                "small shift p means that a split is not like them."
            ],
        )
    ]


def _cells(posterior: str, rule: DecisionFile, metric: dict[str, Any]) -> list[TableCell]:
    ends, title = metric.get("interval"), score_title(metric)
    interval = f"[{ends['low']:.3f}, {ends['high']:.3f}]" if ends else ""
    other = f" on {metric['ood']}" if metric.get("ood") else ""
    value = TableCell(f"{metric['value']:.3g}", float(metric["value"]), interval)
    return [
        TableCell(posterior),
        TableCell(rule.name),
        TableCell(_describe_guarantee(rule)),
        TableCell(f"{title}{other}"),
        value,
    ]


def _describe_guarantee(rule: DecisionFile) -> str:
    """In a few words."""
    settings = rule.header.meta["settings"]
    sure = settings.get("confidence")
    of_splits = "" if sure is None else f" ({percent(sure, 'g')} sure)"
    if rule.kind == SETS:
        whose = " of each class" if settings["class_conditional"] else ""
        whose = f" on {settings['shifted_to']}" if "shifted_to" in settings else whose
        return f"{settings['sets']}: {percent(settings['coverage'], 'g')} covered{whose}{of_splits}"
    if rule.kind == RISK:
        return f"at most {percent(settings['risk'], 'g')} wrong{of_splits}"
    if rule.kind in (PRECISION, RECALL):
        return f"{rule.kind} for {settings['class']} of at least {percent(settings[rule.kind], 'g')}{of_splits}"
    if rule.kind == COSTS:
        return f"least expected cost of {len(settings['decisions'])} decisions"
    if rule.kind == OOD:
        return f"at most {percent(settings['false_alarm'], 'g')} false alarms{of_splits}"
    return f"at most {percent(settings['shift_level'], 'g')} false alarms for batches"


def fidelity(subject: Subject) -> list[Block]:
    """The section."""
    if isinstance(subject.rows, Missing):
        return [subject.rows]
    found = [
        (
            row,
            [m for m in row["metrics"] if all_scores()[m["name"]].of_reference is not None and m["value"] is not None],
        )
        for row in subject.rows
    ]
    held = [(row, metrics) for row, metrics in found if metrics]
    if not held:
        has_draws = any(header.kind == "samples" for header in subject.headers.values())
        command = (
            subject.run.suggest("evaluate", reference="hmc", force=True) if has_draws else subject.run.suggest("hmc")
        )
        sentence = "The predictions were not compared with those of a reference."
        return [Missing(sentence, command)]
    titles = list(dict.fromkeys(score_title(metric) for _, metrics in held for metric in metrics))
    rows = []
    for row, metrics in held:
        cells = {score_title(metric): metric for metric in metrics}
        rows.append([TableCell(subject.titles[row["name"]]), *(_fidelity_cell(cells.get(title)) for title in titles)])
    reference = held[0][1][0].get("reference", "a reference")
    table = DataTable(
        f"{subject.key}fidelity-table",
        f"Predictions on {subject.split} compared with those of {reference}",
        ["posterior", *titles],
        rows,
        notes=[
            "Brackets: 95% interval. Floor: the difference between two halves of the reference's own draws; no "
            "posterior can do better."
        ],
    )
    return [table]


def _fidelity_cell(metric: dict | None) -> TableCell:
    if metric is None:
        return TableCell("–")
    ends, floor = metric.get("interval"), metric.get("floor")
    below = [f"[{ends['low']:.4f}, {ends['high']:.4f}]"] if ends else []
    below += [f"(floor {floor:.4f})"] if floor is not None else []
    return TableCell(f"{metric['value']:.4f}", float(metric["value"]), below)


_MOST_CURVES = 4  # searches for a prior precision


def fits(subject: Subject) -> list[Block]:
    """The section."""
    curves: list[Block] = []
    panels = []
    for name, header in list(subject.headers.items())[:MOST_DRAWN]:
        curve = try_find(partial(_search_curve, subject, name, header)) if len(curves) < _MOST_CURVES else None
        curves += [curve] if curve is not None else []
        trace = try_find(partial(_epoch_trace, name, header))
        if isinstance(trace, Missing):
            curves.append(trace)
        elif trace is not None:
            panels.append(trace)
    blocks = curves
    if panels:
        blocks.append(
            LinePanels(
                f"{subject.key}elbo",
                "Progress of each fit",
                "The objective of each fit by epoch, estimated with noise: the evidence lower bound (ELBO) of "
                "flows and variational fits, the log joint of SWAG. A fit that has finished has levelled off.",
                panels,
            )
        )
    if not blocks:
        run = subject.run
        blocks.append(
            Missing(
                "No fit of this run searched for a prior precision or ran in epochs.",
                run.suggest("refine"),
            )
        )
    return blocks


def _search_curve(subject: Subject, name: str, header: Header) -> PriorPrecisionCurve | None:
    """Return the curve of the search for the prior precision; None without a search."""
    with convert_lookup_errors(header.path):
        points, criterion = header.meta.get("curve"), header.meta.get("criterion")
        if not points or criterion not in LABELS:
            return None
        metrics = header.meta.get("metrics", {})
        curve = [(float(precision), float(value)) for precision, value in points]
        network = metrics.get("val_nll_network") if criterion == "val" else None
        at_edge = bool(metrics.get("prior_precision_at_edge"))
    return PriorPrecisionCurve(name, curve, criterion, at_edge, network, subject.key)


_HISTORIES = {  # by method: what its history is of, and what an epoch gives
    "refine": ("history.elbo", "ELBO, nats"),
    "vi": ("history.elbo", "ELBO, nats"),
    "swag": ("history.log_joint", "log joint, nats"),
}
_LATENT = "lbbnn"


def _epoch_trace(name: str, header: Header) -> LinePanel | None:
    """Return the objective of each epoch; None for a posterior that was not fitted in epochs."""
    method = str(header.meta.get("method"))
    if method not in (*_HISTORIES, _LATENT):
        return None
    tensors, _ = read_posterior(header.path)
    if method == _LATENT:
        history, what = History.from_tensors(tensors).bound(), "ELBO, nats"
    else:
        key, what = _HISTORIES[method]
        if key not in tensors:
            return None
        history = tensors[key]
    if len(history) == 0:
        return None
    return LinePanel(name, "epoch", what, _lines(history))


_MOST_POINTS = 200  # of a trace
_MOST_LINES = 5  # of a panel


def _lines(history: Tensor) -> list[Series]:
    """Return a line, or one per repeat for (E, R). Epochs are thinned evenly, keeping the first and the last."""
    values = history.double().flatten(1).numpy() if history.ndim > 1 else history.double().numpy()[:, None]
    places = np.unique(np.linspace(0, len(values) - 1, min(_MOST_POINTS, len(values))).round().astype(int))
    names = [f"repeat {line + 1}" if values.shape[1] > 1 else "ELBO" for line in range(values.shape[1])]
    return [
        Series(name, (places + 1).tolist(), values[places, line].tolist())
        for line, name in enumerate(names[:_MOST_LINES])
    ]


def posteriors(subject: Subject) -> list[Block]:
    """The section."""
    judgement = subject.judgement
    if isinstance(judgement, Missing):
        return [judgement]
    blocks: list[Block] = []
    captions = ("Gaussians, flows and points", "Draws") if len(_tables(judgement)) > 1 else ("Posteriors",)
    for place, table in enumerate(_tables(judgement)):
        blocks.append(
            data_table(table, f"{subject.key}diagnosis-{place}", f"{captions[place]}{subject.of}, by diagnose")
        )
    spread = _spread(subject, judgement)
    matrix = _matrix(subject, judgement)
    blocks += [one for one in (spread, matrix, _marginals(subject, judgement)) if one is not None]
    return blocks


def _tables(judgement: Judgement) -> list[Table]:
    """Return the tables of diagnose except that of the pairs, which is a figure here."""
    return diagnosis_tables(judgement.entries, [])


def data_table(table: Table, name: str, caption: str, *, first: int = 0) -> DataTable:
    """Convert a terminal table to one of the page. Cells that begin with a number are sorted by it.

    Args:
        first: column that heads the rows; those before it are left out.
    """
    rows = [[TableCell(row[first]), *(_score_cell(cell.strip()) for cell in row[first + 1 :])] for row in table.rows]
    heads = [_typeset(column) for column in table.columns[first:]]
    return DataTable(name, caption, heads, rows, notes=[_sentence(_typeset(note)) for note in table.notes])


_NUMBER = re.compile(r"^[*\s]*([+-]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?)")


def _score_cell(text: str) -> TableCell:
    """Split a cell into a number and what follows it in brackets or after a sign; a dash without a number."""
    found = _NUMBER.match(text)
    if found is None:
        return TableCell("–" if text == "-" else text)
    rest = _typeset(text[found.end() :].strip())
    is_whole = bool(rest) and rest[0] not in "[(±p"
    shown = (text if is_whole else found[0].strip()).replace("-", "−")
    below = (
        [] if is_whole or not rest else re.split(r"(?<=\)) (?=\[)| (?=\(p )", rest)
    )  # a floor, an interval, a p-value
    return TableCell(shown, float(found[1].replace(",", "")), below)


def _typeset(text: str) -> str:
    """Replace ASCII notation of the terminal by typographic characters."""
    return text.replace("+-", "±").replace("MMD^2", "MMD²")


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}" + ("" if note.endswith(".") else ".")


def _spread(subject: Subject, judgement: Judgement) -> WeightSpread | None:
    """Return Pareto k of the posteriors with a density; None without any."""
    found = [
        Weights(
            name,
            entry["pareto_k"]["value"],
            entry["pareto_k"].get("threshold", 0.7),
            entry["log_weight_sd"]["value"],
        )
        for name, entry in judgement.entries.items()
        if entry["type"] in DENSITIES and entry["log_weight_sd"]["value"] is not None
    ]
    return WeightSpread(found[: 2 * MOST_DRAWN], CLOSE_LOG_WEIGHT_SD, subject.key) if found else None


def _matrix(subject: Subject, judgement: Judgement) -> DistanceMatrix | None:
    """Return the distances between the posteriors over the most common layers."""
    pairs = {(one["posteriors"][0], one["posteriors"][1]): one for one in judgement.pairs}
    names = [name for name in judgement.entries if any(name in pair for pair in pairs)][: MOST_DRAWN + 1]
    kept = {pair: one for pair, one in pairs.items() if set(pair) <= set(names)}
    if not any(one["unbiased"] is not None for one in kept.values()):
        return None
    values = {pair: one["unbiased"] for pair, one in kept.items()}
    return DistanceMatrix(names, values, {pair: one["p_value"] for pair, one in kept.items()}, subject.key)


_SHARES = (1.0, 0.99, 0.9, 0.5)  # of parameters in order of how far posteriors lie apart, that are drawn


def _marginals(subject: Subject, judgement: Judgement) -> Marginals | Missing | None:
    """Return densities of diagnose's draws, for the posteriors over the same parameters as the reference."""
    chains = [one for one in judgement.diagnoses if one.judged.type == "samples"]
    reference = next((one for one in chains if one.entry["is_good"]), chains[0] if chains else None)
    if reference is None:
        return Missing(
            "Densities of single weights need draws from a sampler to compare with.",
            subject.run.suggest("hmc"),
        )
    alike = [
        one
        for one in judgement.diagnoses
        if one.judged.layers == reference.judged.layers
        and one.draws.draws.shape[1] == reference.draws.draws.shape[1]
        and bool(one.draws.draws.isfinite().all())
    ][:MOST_DRAWN]
    if reference not in alike:
        alike = [reference, *alike[: MOST_DRAWN - 1]]
    draws = {one.judged.name: one.draws.draws.numpy() for one in alike}
    own = reference.judged.name
    wide = {one.judged.name for one in alike if one.judged.type not in POINTS}
    others = {name: values for name, values in draws.items() if name != own and name in wide}
    chosen = quantile_indices(standardised_distances(draws[own], others), _SHARES)
    meta = judgement.headers[own].meta
    panels = [_marginal(parameter_name(meta, index), index, draws, own, wide) for index in chosen]
    shares = ", ".join(f"{100 * share:g}%" for share in _SHARES[1:])
    how = (
        f"The first weight is the one where posteriors differ most from {own}, in its standard deviations; the "
        f"others are at {shares} of that order."
        if others
        else f"Weights are spread evenly over those of {own}."
    )
    return Marginals(panels, own, how, bool(reference.entry["is_good"]), subject.key)


_MOST_POSTERIORS = 2  # with chains, in one report


def chains(subject: Subject) -> list[Block]:
    """The section."""
    found = {name: header for name, header in subject.headers.items() if header.kind == "samples"}
    blocks: list[Block] = []
    for name, header in list(found.items())[:_MOST_POSTERIORS]:
        blocks.append(element("h3", name))
        made = try_find(partial(_build_figures, subject, name, header))
        blocks += [made] if isinstance(made, Missing) else made
    if not found:
        blocks = [
            Missing(
                "The run has no draws from a sampler to compare the other posteriors with.",
                subject.run.suggest("hmc"),
            )
        ]
    return blocks


_MOST_CHAINS = 8
_NUM_BINS = 10
_MOST_PARAMETERS = 4096  # judged one by one, evenly over all
LOG_POSTERIOR = "log posterior density"


def _build_figures(subject: Subject, name: str, header: Header) -> list[Block]:
    """Return the figures of one sampled posterior."""
    require_draws(subject.run, header)
    posterior, content = open_samples(header.path)
    draws = posterior.draws.numpy()
    places = np.unique(np.linspace(0, draws.shape[2] - 1, min(_MOST_PARAMETERS, draws.shape[2])).round().astype(int))
    statistics = parameter_statistics(draws[:, :, places], device=subject.run.device)
    shown = np.unique(np.linspace(0, len(draws) - 1, min(_MOST_CHAINS, len(draws))).round().astype(int))
    worst = int(places[_find_worst_parameter(statistics)]) if statistics is not None else 0
    quantity = f"{parameter_name(header.meta, worst)}{' (mixes worst)' if statistics is not None else ''}"
    values = {quantity: np.asarray(draws[:, :, worst], dtype=np.float64)}
    log_density = content.stats.get("lp")
    if log_density is not None:
        values = {LOG_POSTERIOR: np.asarray(log_density, dtype=np.float64), **values}
    numbers = (shown + 1).tolist()
    found: list[Block] = [
        paragraph(_describe_draws(header)),
        ChainTraces(
            name, [_chain_trace(what, one[shown], numbers) for what, one in values.items()], len(draws), subject.key
        ),
    ]
    if draws.shape[1] >= 2 * _NUM_BINS:
        counts = rank_counts(values[quantity], _NUM_BINS)[shown].tolist()
        band = rank_band(draws.shape[1], _NUM_BINS)
        found.append(RankHistograms(name, quantity, numbers, counts, band, len(draws), subject.key))
    if statistics is None:
        found.append(
            Missing(
                "R-hat and effective sample sizes of single parameters are undefined: the chains are too short, "
                "or do not move."
            )
        )
    else:
        found.append(_mixing(subject, name, statistics))
    return found


def _find_worst_parameter(statistics: RankStatistics) -> int:
    """Return the parameter with the largest R-hat or, where that is undefined, the smallest effective sample size."""
    r_hat: Any = statistics.r_hat
    return int(r_hat.argmax()) if bool(r_hat.isfinite().all()) else int(statistics.ess_bulk.argmin())


def _describe_draws(header: Header) -> str:
    """Describe how many draws there are, and how they agree on what decides."""
    with convert_lookup_errors(header.path):
        return f"{format_deciding_diagnostic(header.meta['metrics'])}."


_NUM_BLOCKS = 32


def _chain_trace(quantity: str, draws: NDArray[np.float64], numbers: list[int]) -> Trace:
    middles, means = block_means(draws, _NUM_BLOCKS)
    return Trace(quantity, numbers, middles, means.tolist())


def _mixing(subject: Subject, name: str, statistics: RankStatistics) -> Mixing:
    r_hat, bulk, tail = (part.numpy() for part in statistics)
    ratio = Histogram("R-hat", *histogram(r_hat, 30)) if np.isfinite(r_hat).all() else None
    edges = np.array(histogram(np.concatenate([bulk, tail]), 30)[0])
    sizes = [
        Histogram(what, edges.tolist(), np.histogram(part, edges)[0].tolist())
        for what, part in (("bulk", bulk), ("tail", tail))
    ]
    return Mixing(name, ratio, sizes, GOOD_RHAT, GOOD_ESS, len(r_hat), subject.key)


_GRID = 49


def _marginal(title: str, index: int, draws: dict[str, NDArray[np.float32]], own: str, wide: set[str]) -> Marginal:
    """Return the densities of one parameter."""
    parts = {name: values[:, index].astype(np.float64) for name, values in draws.items()}
    grid = density_grid([part for name, part in parts.items() if name in wide], _GRID)
    densities, points = {}, {}
    for name in sorted(parts, key=lambda name: name != own):  # the reference lies below the others
        estimate = estimate_density(parts[name], grid) if name in wide else None
        if estimate is None:
            points[name] = float(parts[name][0])
        else:
            densities[name] = estimate.tolist()
    return Marginal(title, grid.tolist(), densities, points)
