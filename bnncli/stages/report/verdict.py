"""The verdict: which posterior to use, whether it pays, how far its confidence can be trusted, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bnncli.evaluation.paired import holm
from bnncli.names import counted, percent
from bnncli.options.assertions import Quantity
from bnncli.pages.blocks import Block, Missing
from bnncli.pages.markup import Markup, bullets, code, element, joined, paragraph, strong
from bnncli.run.network_fit import misread_splits
from bnncli.run.prediction_groups import PredictionGroup
from bnncli.run.recommendation import Recommended
from bnncli.stages.diagnose.judgement import Judgement
from bnncli.stages.report.calibration import score_metric, score_value
from bnncli.stages.report.gain import Payoff, pays
from bnncli.stages.report.subject import Damaged, Subject
from bnncli.stages.report.words import listed_in_words

_MOST_DOUBTED = 3  # posteriors whose doubts are told
_MOST_NAMED = 12  # posteriors that are good, or files that are damaged
_CHANCE = 0.05  # of saying of any that are calibrated that they are not
_KINDS = {"gaussian": "a Gaussian", "flow": "a Gaussian bent by a flow", "samples": "draws by Monte Carlo"}


def verdict(subject: Subject) -> list[Block]:
    """The section."""
    judgement = subject.judgement
    if isinstance(judgement, Missing):
        first, is_good = "There is no verdict on the posteriors of this run.", False
        fit: list[Markup] = [joined(judgement.sentence, *_to_run(judgement.command))]
    else:
        payoff = pays(subject, judgement)
        first = _first(judgement, payoff, subject.recommended)
        is_good = judgement.verdict.is_good
        fit = [joined(strong("Fit. "), _fit(judgement)), joined(strong("Does it pay? "), payoff.text)]
    if subject.recommended is not None:
        fit.append(joined(strong("What auto recommends. "), recommended_in_words(subject.recommended, judgement)))
    words = [*_misread(subject), *fit, *_calibration(subject), *_outside(subject)]
    box = element("div", paragraph(first), bullets(words), class_="verdict" if is_good else "verdict doubt")
    blocks: list[Block] = [box, *_left_out_of(subject)]
    if not isinstance(judgement, Missing):
        blocks.append(paragraph("In the words of diagnose: ", element("q", judgement.verdict.sentence), kind="note"))
        blocks += [paragraph(gain.sentence) for gain in judgement.gains]
    return blocks


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


def _first(judgement: Judgement, payoff: Payoff, recommended: Recommended | None) -> str:
    """The sentence that a person remembers."""
    use = judgement.verdict.use
    if use is None:
        return "No posterior of this run can be relied on yet." + _to_predict(recommended, None)
    kind = _KINDS.get(judgement.entries[use]["type"], "a posterior")
    if judgement.verdict.is_worse:
        best = judgement.verdict.predicts_best
        to_predict = _to_predict(recommended, best) or f" Predict with {best}."
        return f"{use} ({kind}) is true to its target, but {best} predicts better.{to_predict}"
    to_predict = _to_predict(recommended, use)
    if payoff.is_worse:
        return (
            f"{use} ({kind}) is true to its target, but on data like val one temperature predicts better.{to_predict}"
        )
    if to_predict:
        return f"{use} ({kind}) is true to its target.{to_predict}"
    if judgement.entries[use]["type"] == "samples" and _has_densities(judgement):
        return f"Use {use} ({kind}): no approximation of this run is close enough to its target."
    return f"Use {use} ({kind}): it is true to its target."


def _to_predict(recommended: Recommended | None, other: str | None) -> str:
    """What auto recommends for predictions, where it is another posterior than would be named."""
    if recommended is None or recommended.posterior == other:
        return ""
    return f" To predict, auto recommends {recommended.posterior} by {recommended.integrator}."


def recommended_in_words(recommended: Recommended, judgement: Judgement | Missing) -> str:
    """What auto recommends and why, and how that goes with the verdict, which asks something else."""
    said = recommended.sentence.removeprefix("recommended: ")
    text = f"{said or f'{recommended.posterior} by {recommended.integrator}'}."
    use = None if isinstance(judgement, Missing) else judgement.verdict.use
    if use is None:
        return text
    if recommended.posterior == use:
        return f"{text} The verdict names the same posterior."
    return (
        f"{text} auto asks what to predict with, the plainest of equals on val; the verdict, which posterior is true to its target. Both hold: predict "
        f"with {recommended.posterior}, and take {use} for what asks for the posterior itself."
    )


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
    """How well confidence tells what is out of distribution."""
    sentences = []
    for ood in subject.outside:
        found = [(subject.titles[g.name], score_value(subject, g, Quantity("auroc", (ood,)))) for g in _told(subject)]
        shares = [f"{100 * value:.0f} % of pairs with {ood} for {title}" for title, value in found if value is not None]
        if shares:
            sentences.append(
                listed_in_words([shares[0], *(one.replace(f"of pairs with {ood} ", "") for one in shares[1:])])
            )
    if not sentences:
        return []
    text = f"Shown one example of {subject.split} and one from elsewhere, the first gets the higher confidence in {'; in '.join(sentences)}. Guessing gives 50 %."
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
