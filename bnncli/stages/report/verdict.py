"""The verdict: which posterior to use, whether it pays, how far its confidence can be trusted, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bnncli.detectors import DEFAULT_SCORE
from bnncli.evaluation.paired import holm
from bnncli.evaluation.recommendation import Quality
from bnncli.names import counted, percent
from bnncli.options.assertions import Quantity
from bnncli.pages.blocks import Block, Missing
from bnncli.pages.markup import Markup, bullets, code, element, joined, paragraph, strong
from bnncli.run.network_fit import misread_splits
from bnncli.run.prediction_groups import PredictionGroup
from bnncli.run.recommendation import Recommended, SplitProbabilities, qualities
from bnncli.run.score_rows import PredictedSplit
from bnncli.stages.diagnose.judgement import Judgement
from bnncli.stages.report.calibration import score_metric, score_value
from bnncli.stages.report.subject import Damaged, Subject, tried
from bnncli.stages.report.words import listed_in_words

_MOST_DOUBTED = 3  # posteriors whose doubts are told
_MOST_NAMED = 12  # posteriors that are good, or files that are damaged
_CHANCE = 0.05  # of saying of any that are calibrated that they are not
_KINDS = {"gaussian": "a Gaussian", "flow": "a Gaussian bent by a flow", "samples": "draws by Monte Carlo"}


def verdict(subject: Subject) -> list[Block]:
    """The section."""
    judgement, recommended = subject.judgement, subject.recommended
    words = [*_misread(subject)]
    if recommended is not None:
        words.append(joined(strong("Predict. "), f"{_capital(recommended.sentence.removeprefix('predict '))}."))
    beside = _beside_the_network(subject)
    if isinstance(beside, Missing):
        words.append(joined(strong(f"On {subject.split}. "), beside.sentence))
    elif beside is not None:
        texts = "; ".join(one.sentence for one in beside.qualities)
        words.append(joined(strong(f"On {subject.split}. "), f"{beside.about}, paired by example: {texts}."))
    if isinstance(judgement, Missing):
        words.append(joined(strong("Fit. "), judgement.sentence, *_to_run(judgement.command)))
    else:
        words.append(joined(strong("Fit. "), _fit(judgement)))
    words += [*_calibration(subject), *_outside(subject)]
    is_good = not isinstance(judgement, Missing) and judgement.verdict.is_good
    summary = beside.summary if isinstance(beside, Beside) else ""
    first = paragraph(_first(judgement, recommended, summary))
    box = element("div", first, bullets(words), class_="verdict" if is_good else "verdict doubt")
    blocks: list[Block] = [box, *_left_out_of(subject)]
    if not isinstance(judgement, Missing):
        blocks.append(paragraph("In the words of diagnose: ", element("q", judgement.verdict.sentence), kind="note"))
        blocks += [paragraph(gain.sentence) for gain in judgement.gains]
    return blocks


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


class Beside(NamedTuple):
    """The qualities of the predictions that the words are about beside the network's, on the split that is shown."""

    about: str
    base: str
    split: str
    qualities: list[Quality]

    @property
    def summary(self) -> str:
        """What is better and what is worse, for the headline."""
        found = {
            finding: [one.title for one in self.qualities if one.finding == finding] for finding in ("better", "worse")
        }
        texts = [f"{finding} in {listed_in_words(titles)}" for finding, titles in found.items() if titles]
        return f" On {self.split} it is {' and '.join(texts)} than {self.base}." if texts else ""


def _beside_the_network(subject: Subject) -> Beside | Missing | None:
    """The predictions that the words are about beside those of the network at one temperature, else as trained; None without both."""
    focus, plain = subject.focus, [group for group in _told(subject) if group is not subject.focus]
    base = next((group for group in plain if group.posterior == "temperature"), plain[0] if plain else None)
    if focus is None or base is None:
        return None
    found = tried(lambda: qualities_of(subject, focus, base))
    own, plain_name = subject.titles[focus.name], subject.titles[base.name]
    return (
        found if isinstance(found, Missing) else Beside(f"{own} against {plain_name}", plain_name, subject.split, found)
    )


def qualities_of(subject: Subject, own: PredictionGroup, base: PredictionGroup) -> list[Quality]:
    """The qualities of stored predictions beside those of others, on the split that is shown."""

    def read(group: PredictionGroup, split: str) -> SplitProbabilities:
        file = PredictedSplit(next(one for one in group.headers if one.meta["split"] == split)).file
        return SplitProbabilities(split, file.probs, file.labels)

    return qualities(read(own, subject.split), read(base, subject.split), seed=subject.run.compute.seed)


def _misread(subject: Subject) -> list[Markup]:
    """What extract-features found wrong with the network on the splits that the report is about."""
    found = misread_splits(subject.run, ("train", "val", subject.split))
    text = f"It probably misreads its inputs or labels, so that all below may be worthless. {'; '.join(found)}."
    return [joined(strong("The network. "), text)] if found else []


def _left_out_of(subject: Subject) -> list[Block]:
    """What is damaged, some of it by name."""
    told: list[Block] = [_left_out(one) for one in subject.damaged[:_MOST_NAMED]]
    rest = len(subject.damaged) - len(told)
    return (
        [*told, Missing(f"{counted(rest, 'more artifact')} damaged.", subject.run.suggest("status"))]
        if rest > 0
        else told
    )


def _left_out(one: Damaged) -> Missing:
    """What is said of a damaged artifact."""
    what = one.what if one.what.startswith("is ") else f"cannot be used: {one.what}"
    return Missing(f"{one.name} is left out: it {what}.", one.command)


def _to_run(command: str | None) -> list[str]:
    return [] if command is None else [" Run ", code(command)]


def _first(judgement: Judgement | Missing, recommended: Recommended | None, summary: str) -> str:
    """The sentences that a person remembers; `summary` says what is better and worse than the network."""
    use = None if isinstance(judgement, Missing) else judgement.verdict.use
    if recommended is not None:
        text = f"Predict with {recommended.posterior} by {recommended.integrator}.{summary}"
    elif isinstance(judgement, Missing):
        return "There is no verdict on the posteriors of this run."
    else:
        text = "What to predict with is unknown without a labelled val split."
    if use is None:
        return f"{text} No posterior of this run is known to be close to its target."
    assert not isinstance(judgement, Missing)
    kind = _KINDS.get(judgement.entries[use]["type"], "a posterior")
    if recommended is not None and recommended.posterior == use:
        return f"{text} {use} is {kind}, close to its target."
    alone = judgement.entries[use]["type"] == "samples" and _has_densities(judgement)
    why = "no approximation of this run is close enough to its target" if alone else "it is close to its target"
    return f"{text} For the posterior itself use {use} ({kind}): {why}."


def _has_densities(judgement: Judgement) -> bool:
    return any(entry["type"] in ("gaussian", "flow") for entry in judgement.entries.values())


def _fit(judgement: Judgement) -> Markup:
    """Which posteriors are good for their target, and which are not; why, the tables say."""
    good = [name for name, entry in judgement.entries.items() if entry["is_good"]]
    bad = [name for name, entry in judgement.entries.items() if entry["is_good"] is False]
    parts = []
    if good:
        parts.append(
            f"{listed_in_words(good, most=_MOST_NAMED)} {'are' if len(good) > 1 else 'is'} as close to the target as can be asked."
        )
    if bad:
        shown = [f"{name} ({_why(judgement, name)})" for name in bad[:_MOST_DOUBTED]]
        rest = [f"{len(bad) - len(shown)} more"] if len(bad) > len(shown) else []
        verb = "is" if len(bad) == 1 else "are"
        parts.append(f"{listed_in_words([*shown, *rest])} {verb} not{'' if good else ' close enough to the target'}.")
    if not parts:
        parts = ["There is no posterior with a target that could be judged."]
    command = judgement.verdict.run
    return joined(" ".join(parts), *([" Next: ", code(command), "."] if command.startswith("bnncli ") else []))


def _why(judgement: Judgement, name: str) -> str:
    """Why a posterior is not good, by the first of its doubts."""
    doubts = judgement.entries[name]["doubts"]
    return doubts[0] + (" and more" if len(doubts) > 1 else "")


def _calibration(subject: Subject) -> list[Markup]:
    """How far confidences can be taken at their word, of the posterior that the words are about and of the network."""
    found = [(subject.titles[group.name], score_metric(subject, group, Quantity("ece"))) for group in _told(subject)]
    known = [(title, metric) for title, metric in found if metric is not None and metric["value"] is not None]
    return [joined(strong("Calibration. "), calibration_in_words(subject.split, known))] if known else []


def calibration_in_words(split: str, known: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """How far confidences are off, and of which predictions that is more than chance, by Holm over all of them.

    Args:
        known: the title of each, and its calibration error as evaluate has stored it.
    """
    values = listed_in_words([f"{percent(metric['value'])} for {title}" for title, metric in known])
    text = f"On {split} stated confidences are off by {values}, on average."
    judged = [(title, metric) for title, metric in known if metric.get("p_calibrated") is not None]
    if judged:
        floors = [metric["floor"] for _, metric in judged]
        adjusted = holm([metric["p_calibrated"] for _, metric in judged])
        real = [title for (title, _), p in zip(judged, adjusted, strict=True) if p is not None and p <= _CHANCE]
        low, high = percent(min(floors)), percent(max(floors))
        text += f" Calibrated ones would be off by {low if low == high else f'{low} to {high}'} on so many examples, by chance alone; "
        text += f"more than chance is the error of {listed_in_words(real)}." if real else "none shows more than that."
    return text


def _outside(subject: Subject) -> list[Markup]:
    """How well the default score tells what is out of distribution; where that is of the features, once for all posteriors."""
    sentences, score = [], subject.shown.curve_score
    if score == DEFAULT_SCORE and subject.focus is not None:
        values = {ood: score_value(subject, subject.focus, Quantity("auroc", (ood, score))) for ood in subject.outside}
        shares = [f"{100 * value:.0f} % of pairs with {ood}" for ood, value in values.items() if value is not None]
        text = f"Shown one example of {subject.split} and one from elsewhere, the {score} score of the features, the same for every posterior, is higher for the first in {listed_in_words(shares)}. Guessing gives 50 %."
        return [joined(strong("Out of distribution. "), text)] if shares else []
    for ood in subject.outside:
        found = [
            (subject.titles[g.name], score_value(subject, g, Quantity("auroc", (ood, score)))) for g in _told(subject)
        ]
        shares = [f"{100 * value:.0f} % of pairs with {ood} for {title}" for title, value in found if value is not None]
        if shares:
            sentences.append(
                listed_in_words([shares[0], *(one.replace(f"of pairs with {ood} ", "") for one in shares[1:])])
            )
    if not sentences:
        return []
    text = f"Shown one example of {subject.split} and one from elsewhere, {score} is higher for the first in {'; in '.join(sentences)}. Guessing gives 50 %."
    return [joined(strong("Out of distribution. "), text)]


def _told(subject: Subject) -> list[PredictionGroup]:
    """The predictions that words are about, and those of the network as trained and at one temperature."""
    if subject.focus is None or isinstance(subject.groups, Missing):
        return []
    plain = [group for group in subject.groups if group.posterior in ("map", "temperature")]
    return [subject.focus, *(group for group in plain if group is not subject.focus)]


def summary_of(subject: Subject) -> str:
    """One line for a terminal."""
    judgement = subject.judgement
    return judgement.sentence if isinstance(judgement, Missing) else judgement.verdict.sentence
