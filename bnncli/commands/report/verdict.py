"""Write the verdict of a report: which posterior to use, whether it pays, and how far to trust its confidence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from bnncli.artifacts.files import read_header, read_metrics
from bnncli.commands.diagnose import Judgement
from bnncli.commands.report.sections import score_metric, score_value
from bnncli.commands.report.subject import Damaged, Subject, try_find
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.comparison import holm
from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.evaluation.recommendation import Quality
from bnncli.figures.pages import (
    Block,
    DataTable,
    Markup,
    Missing,
    TableCell,
    bullets,
    code,
    element,
    join_markup,
    paragraph,
    strong,
)
from bnncli.likelihoods import has_exclusive_classes, read_recorded_name
from bnncli.names import count_noun, percent
from bnncli.options.scoring import Quantity
from bnncli.session.network_fit import find_misread_splits
from bnncli.session.predictions import PredictionGroup
from bnncli.session.recommendation import (
    SplitProbabilities,
    compare_paired_scores,
    measure_detection,
    parse_qualities,
    qualities,
)
from bnncli.session.score_rows import PredictedSplit

TERMS = {
    "accuracy": "The share of examples whose most probable class is right.",
    "AUROC": "The probability that a score ranks a known input above an outlier. 0.5 is chance, 1 is perfect.",
    "Brier": "The mean squared error of the probabilities. Lower is better.",
    "calibration map": "A function of the logits or probabilities, such as a scale for each class, fitted to labelled "
    "examples that the network was not trained on.",
    "ECE": "Expected calibration error: the mean gap between stated confidence and accuracy, over bins of confidence. "
    "A calibrated model scores above 0 by chance; the floor says by how much.",
    "ELBO": "Evidence lower bound, in nats: how close an approximation is to the exact posterior, up to a constant. Higher is better.",
    "FPR95": "The share of outliers accepted when 95% of known inputs are accepted. Lower is better.",
    "log-weight sd": "The spread of the log ratio between the exact posterior and an approximation. Below 2, the approximation can be trusted.",
    "MMD^2": "A squared distance between two sets of draws. A p-value that is not small means that they cannot be told "
    "apart; with many draws, even a tiny distance has a small p-value.",
    "mutual information": "How much draws of the posterior disagree about the label of an input.",
    "NLL": "Negative log likelihood of the labels, in nats per example. It judges probabilities as a whole. Lower is better.",
    "Pareto k": "The tail index of importance weights. Below 0.7 (lower with few draws), an approximation covers the tails "
    "of the exact posterior.",
    "posterior": "The distribution of the weights given the training data; also a file that represents it: laplace is a Gaussian, refine a Gaussian bent by a flow, hmc draws by Hamiltonian Monte Carlo.",
    "R-hat": "How well the chains of a sampler agree. 1 is perfect, and values up to 1.05 are accepted.",
    "temperature scaling": "One number divides all logits. It changes confidence, never the predicted class.",
    "95% interval": "A range that contains the true value for 95% of test sets.",
}


def terms() -> list[Block]:
    """Return the section."""
    items = [join_markup(element("dt", term, id=_name(term)), element("dd", text)) for term, text in TERMS.items()]
    return [element("dl", *items)]


def verdict(subject: Subject) -> list[Block]:
    """Return the section."""
    judgement, recommended = subject.judgement, subject.recommended
    beside = find_gains(subject)
    words = [join_markup(strong("The network. "), text) for text in list_misreadings(subject)]
    if recommended is not None and recommended.sentence:
        words.append(join_markup(strong("Why. "), link_terms(f"{_capitalize(recommended.sentence)}.")))
    if isinstance(judgement, Missing):
        words.append(
            join_markup(
                strong("Is the posterior computed well? "), judgement.sentence, *_format_command(judgement.command)
            )
        )
    else:
        words.append(join_markup(strong("Is the posterior computed well? "), _fit(judgement)))
    words += [
        join_markup(strong(title), link_terms(text))
        for title, text in (
            ("Calibration. ", describe_calibration_of(subject)),
            ("Out of distribution. ", describe_detection(subject)),
        )
        if text is not None
    ]
    is_good = not isinstance(judgement, Missing) and judgement.verdict.is_good
    first = paragraph(headline(subject, beside))
    box = element("div", first, bullets(words), class_="verdict" if is_good else "verdict doubt")
    blocks: list[Block] = [box, *_list_left_out(subject)]
    if beside is not None:
        blocks += [
            element("h3", "Does it pay?"),
            *([beside] if isinstance(beside, Missing) else _build_gains_table(beside, subject)),
        ]
    if not isinstance(judgement, Missing):
        blocks += [paragraph(gain.sentence) for gain in judgement.gains]
        blocks.append(paragraph("bnncli diagnose reports: ", element("q", judgement.verdict.sentence), kind="note"))
    return blocks


_MOST_SPLITS = 3  # out of distribution, in the table


class Beside(NamedTuple):
    """Qualities of the recommended predictions and of the network's, on the split shown."""

    own: str
    base: str
    posterior: str
    split: str
    num_examples: int
    qualities: list[Quality]
    detection: dict[str, Quality]  # by out-of-distribution split
    is_multilabel: bool = False

    def of(self, score: str) -> Quality | None:
        """Return the quality with this score; None where unknown."""
        return next((one for one in self.qualities if one.score == score), None)


def find_gains(subject: Subject) -> Beside | Missing | None:
    """Compare the recommended predictions with the network's; where they are not stored, as auto measured it on val."""
    recommended = subject.recommended
    beside = try_find(partial(_compare_with_network, subject))
    if beside is None or (
        recommended is not None and not isinstance(beside, Missing) and beside.posterior != recommended.posterior
    ):
        beside = try_find(partial(_read_recorded_gains, subject)) or beside
    return beside


def _compare_with_network(subject: Subject) -> Beside | None:
    """Compare the recommended predictions with the network's at one temperature, else as trained; None without both."""
    focus, plain = subject.focus, [group for group in list_focus_groups(subject) if group is not subject.focus]
    plain.sort(key=lambda group: (group.posterior != "temperature", group.variant != "plug-in"))
    base = plain[0] if plain else None
    if focus is None or base is None:
        return None
    found = compare_predictions(subject, focus, base)
    outside = [name for name in subject.outside[:_MOST_SPLITS] if name in base.splits(is_ood=True)]
    detection = {name: _detection(subject, focus, base, name) for name in outside if name in focus.splits(is_ood=True)}
    return Beside(
        subject.titles[focus.name],
        subject.titles[base.name],
        focus.posterior,
        subject.split,
        int(focus.splits(is_ood=False)[subject.split].meta["num_examples"]),
        found,
        {name: one for name, one in detection.items() if one is not None},
        not has_exclusive_classes(read_recorded_name(focus.splits(is_ood=False)[subject.split].meta)),
    )


def compare_predictions(subject: Subject, own: PredictionGroup, base: PredictionGroup) -> list[Quality]:
    """Return the qualities of stored predictions relative to others, on the split shown."""

    def read(group: PredictionGroup, split: str) -> SplitProbabilities:
        found = PredictedSplit(next(one for one in group.headers if one.meta["split"] == split))
        return SplitProbabilities(split, found.file.probs, found.file.labels, groups=found.groups)

    return qualities(read(own, subject.split), read(base, subject.split), seed=subject.run.compute.seed)


_OWN_SCORE = "max_prob"  # an outlier score of the posterior's own, as compare has it: the default one depends on the features alone


def _detection(subject: Subject, own: PredictionGroup, base: PredictionGroup, ood: str) -> Quality | None:
    """Return the paired AUROC of each posterior's own largest probability for a split; None where undefined."""

    pairs = [
        (PredictedSplit(group.splits(is_ood=False)[subject.split]), PredictedSplit(group.splits(is_ood=True)[ood]))
        for group in (own, base)
    ]
    sides: list[Any] = [tuple(split.detection_scores([_OWN_SCORE]) for split in pair) for pair in pairs]
    if any(isinstance(side[_OWN_SCORE], str) for pair in sides for side in pair):
        return None
    inside, outside = (len(side[_OWN_SCORE]) for side in sides[0])
    measured = measure_detection(
        sides,
        [Quantity("auroc", (ood, _OWN_SCORE))],
        split=(subject.split, inside),
        ood=(ood, outside),
        bootstrap=Bootstrap(level=0.95, seed=subject.run.compute.seed).of_splits(*pairs[0]),
    )
    return compare_paired_scores("auroc", measured, level=0.95)


def _read_recorded_gains(subject: Subject) -> Beside | None:
    """Return what auto measured on val for its recommendation; None without one, or if its posterior is not shown."""
    chosen = subject.recommended
    header = None if chosen is None else subject.headers.get(chosen.posterior)
    if chosen is None or chosen.by != "auto" or header is None:
        return None
    told = read_metrics(subject.run.folder.recommended).meta["rows"][-1]
    own, base = told["about"]
    found = parse_qualities(told["qualities"])
    if not found or own != f"{chosen.posterior} ({chosen.integrator})":
        return None
    count = int(read_header(subject.run.folder.features("val")).meta["num_examples"])
    is_multilabel = not has_exclusive_classes(read_recorded_name(header.meta))
    return Beside(own, base, chosen.posterior, "val", count, found, {}, is_multilabel)


def list_misreadings(subject: Subject) -> list[str]:
    """Return what extract-features found wrong with the network on the splits shown."""
    found = find_misread_splits(subject.run, ("train", "val", subject.split))
    text = f"It probably misreads its inputs or labels. Everything below may be worthless. {'; '.join(found)}."
    return [text] if found else []


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _format_command(command: str | None) -> list[str]:
    return [] if command is None else [" Run ", code(command)]


_MOST_DOUBTED = 3  # posteriors whose doubts are listed
_MOST_NAMED = 12  # posteriors that are good, or files that are damaged


def _fit(judgement: Judgement) -> Markup:
    """Describe which posteriors are good for their target and which are not."""
    good = [name for name, entry in judgement.entries.items() if entry["is_good"]]
    bad = [name for name, entry in judgement.entries.items() if entry["is_good"] is False]
    parts = []
    if good:
        parts.append(
            f"{join_names(good, most=_MOST_NAMED)} {'match' if len(good) > 1 else 'matches'} the exact posterior closely."
        )
    if bad:
        shown = [f"{name} ({_explain_doubt(judgement, name)})" for name in bad[:_MOST_DOUBTED]]
        rest = [f"{len(bad) - len(shown)} more"] if len(bad) > len(shown) else []
        verb = "does" if len(bad) == 1 else "do"
        parts.append(f"{join_names([*shown, *rest])} {verb} not.")
    if not parts:
        parts = ["No posterior of this run has a target to compare it with."]
    command = judgement.verdict.run
    return join_markup(
        link_terms(" ".join(parts)), *([" Next: ", code(command), "."] if command.startswith("bnncli ") else [])
    )


def _explain_doubt(judgement: Judgement, name: str) -> str:
    """Return why a posterior is not good, by its first doubt."""
    doubts = judgement.entries[name]["doubts"]
    return doubts[0] + (f", {count_noun(len(doubts) - 1, 'more doubt')}" if len(doubts) > 1 else "")


def describe_calibration_of(subject: Subject) -> str | None:
    """Describe how far to trust the confidences of the posterior in focus and of the network; None if unknown."""
    found = [
        (subject.titles[group.name], score_metric(subject, group, Quantity("ece")))
        for group in list_focus_groups(subject)
    ]
    known = [(title, metric) for title, metric in found if metric is not None and metric["value"] is not None]
    return describe_calibration(subject.split, known) if known else None


_CHANCE = 0.05  # of saying of any that are calibrated that they are not


def describe_calibration(split: str, known: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Describe how far confidences are off, and for which predictions that is more than chance (Holm over all).

    Args:
        known: title of each to its calibration error from evaluate.
    """
    values = join_names([f"{percent(metric['value'])} ({title})" for title, metric in known])
    text = f"On {split}, stated confidence and accuracy differ by {values} on average (ECE)."
    judged = [(title, metric) for title, metric in known if metric.get("p_calibrated") is not None]
    if judged:
        floors = [metric["floor"] for _, metric in judged]
        adjusted = holm([metric["p_calibrated"] for _, metric in judged])
        real = [title for (title, _), p in zip(judged, adjusted, strict=True) if p is not None and p <= _CHANCE]
        low, high = percent(min(floors)), percent(max(floors))
        text += f" A calibrated model would differ by {low if low == high else f'{low} to {high}'} by chance"
        if real:
            text += f"; {'only ' if len(real) < len(judged) else ''}{join_names(real)} {'is' if len(real) == 1 else 'are'} significantly miscalibrated."
        else:
            text += "; none is significantly miscalibrated."
    return text


def describe_detection(subject: Subject) -> str | None:
    """Describe how well outliers are detected; None if unknown. A score of the features is the same for all posteriors."""
    score, focus = subject.shown.curve_score, subject.focus
    groups = [focus] if score == DEFAULT_SCORE and focus is not None else list_focus_groups(subject)
    sentences = []
    for ood in subject.outside:
        found = [
            (subject.titles[group.name], score_value(subject, group, Quantity("auroc", (ood, score))))
            for group in groups
        ]
        known = [(title, value) for title, value in found if value is not None]
        if known and len(groups) == 1:
            sentences.append(f"{ood} {known[0][1]:.3f}")
        elif known:
            sentences.append(f"{ood} {join_names([f'{value:.3f} ({title})' for title, value in known])}")
    if not sentences:
        return None
    alike = ", which depends on the features and not on the posterior" if score == DEFAULT_SCORE else ""
    return f"AUROC of the outlier score {score}{alike}: {'; '.join(sentences)}. 0.5 is chance, 1 is perfect."


def list_focus_groups(subject: Subject) -> list[PredictionGroup]:
    """Return the predictions in focus, and those of the network as trained, at one temperature, and through a calibration map."""
    if subject.focus is None or isinstance(subject.groups, Missing):
        return []
    plain = [group for group in subject.groups if group.posterior in ("map", "temperature", "calibration")]
    return [subject.focus, *(group for group in plain if group is not subject.focus)]


def join_names(names: list[str], *, most: int | None = None) -> str:
    """Join names as `a`, `a and b`, `a, b and c`; above `most`, as `a, b and 7 more`."""
    if most is not None and len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


_FOUND = re.compile("|".join(rf"(?<![\w-]){re.escape(term)}(?![\w-])" for term in sorted(TERMS, key=len, reverse=True)))


def link_terms(text: str) -> Markup:
    """Link each term in a text to its explanation, once."""
    parts: list[str] = []
    place, seen = 0, set()
    for found in _FOUND.finditer(text):
        if found[0] not in seen:
            seen.add(found[0])
            parts += [text[place : found.start()], element("a", found[0], href=f"#{_name(found[0])}", class_="term")]
            place = found.end()
    return join_markup(*parts, text[place:])


def _name(term: str) -> str:
    return f"term-{re.sub(r'[^a-z0-9]+', '-', term.lower())}"


_PLAIN = {"temperature": "temperature scaling", "map": "the network as trained"}
POSTERIOR_KINDS = {"gaussian": "a Gaussian", "flow": "a Gaussian refined by a flow", "samples": "Monte Carlo draws"}


def headline(subject: Subject, beside: Beside | Missing | None) -> str:
    """Return what to do, and what it gains and costs, in one or two sentences."""
    judgement, recommended = subject.judgement, subject.recommended
    if recommended is None:
        if isinstance(judgement, Missing):
            return "There is no verdict on the posteriors of this run."
        use = judgement.verdict.use
        text = "No recommendation: that needs a labelled validation split."
        if use is None:
            return f"{text} No posterior is known to match the exact posterior."
        kind = POSTERIOR_KINDS.get(judgement.entries[use]["type"], "a posterior")
        return f"{text} {use} ({kind}) matches the exact posterior closely."
    if recommended.posterior in _PLAIN:
        return f"Keep {_PLAIN[recommended.posterior]}."
    found = f"Use {recommended.posterior}"
    if beside is None or isinstance(beside, Missing) or beside.posterior != recommended.posterior:
        return f"{found}."
    parts = []
    if (nll := beside.of("nll")) is not None:
        parts.append(f"NLL {nll.value:.3f} instead of {nll.baseline:.3f}{_describe_doubt(nll)}")
    if (accuracy := beside.of("accuracy")) is not None:
        parts.append(
            f"{'label accuracy' if beside.is_multilabel else 'accuracy'} {_format_signed(100 * accuracy.difference, 1)} points{_describe_doubt(accuracy)}"
        )
    for ood, one in beside.detection.items():
        parts.append(
            f"AUROC of its own confidence {_format_signed(one.difference, 2)} against {ood}{_describe_doubt(one)}"
        )
    return f"{found}: {', '.join(parts)} on {beside.split}." if parts else f"{found}."


def _describe_doubt(one: Quality) -> str:
    """Return the remark on a difference that may be chance."""
    return "" if one.finding in ("better", "worse") else " (not significant)"


def _format_signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _list_left_out(subject: Subject) -> list[Block]:
    """List what is damaged, some of it by name."""
    told: list[Block] = [_describe_left_out(one) for one in subject.damaged[:_MOST_NAMED]]
    rest = len(subject.damaged) - len(told)
    return (
        [
            *told,
            Missing(
                f"{count_noun(rest, 'more artifact')} {'is' if rest == 1 else 'are'} damaged.",
                subject.run.suggest("status"),
            ),
        ]
        if rest > 0
        else told
    )


def _describe_left_out(one: Damaged) -> Missing:
    """Describe a damaged artifact."""
    what = one.what if one.what.startswith("is ") else f"cannot be used: {one.what}"
    return Missing(f"{one.name} is skipped: it {what}.", one.command)


def _build_gains_table(beside: Beside, subject: Subject) -> list[Block]:
    """Return a table of the differences, and how to read it."""
    titles = {"accuracy": "label accuracy"} if beside.is_multilabel else {}
    named = [(titles.get(one.title, one.title), one) for one in beside.qualities]
    named += [(f"AUROC {ood}, by largest probability", one) for ood, one in beside.detection.items()]
    if not named:
        return [Missing(f"Split {beside.split} has no labels, so predictions cannot be scored.")]
    rows = [[TableCell(title), *map(TableCell, one.cells[1:])] for title, one in named]
    columns = ["score", beside.own, beside.base, "difference", "95% interval", "finding"]
    caption = f"{beside.own} against {beside.base} on {beside.split}, {beside.num_examples:,} examples"
    note = "Differences are paired by example. If an interval contains zero, these examples cannot tell the two apart."
    if beside.split == "val":
        note += " Fits were tuned on val, so their scores are slightly optimistic."
        if subject.split != "val":
            note += f" For {subject.split}: {subject.run.suggest('predict', posterior='all')}"
    return [DataTable(f"{subject.key}pays", caption, columns, rows, [note])]


def format_summary(subject: Subject) -> str:
    """Return one line for the terminal."""
    judgement = subject.judgement
    return judgement.sentence if isinstance(judgement, Missing) else judgement.verdict.sentence


SECTION = "terms"
