"""Whether the posterior to use predicts better on val than the network divided by one temperature, in words."""

from __future__ import annotations

from typing import NamedTuple

from bnncli.evaluation.excess import FALSE_ALARM, WORSE_SHARE, Scored, excesses
from bnncli.names import counted, percent
from bnncli.pages.blocks import Missing
from bnncli.run.val_report import temperature_on_val
from bnncli.stages.diagnose.judgement import Judgement
from bnncli.stages.report.subject import Subject, tried
from bnncli.stages.report.words import with_error


class Payoff(NamedTuple):
    """Whether one temperature does better than the posterior to use, beyond chance, and what is to be said of it."""

    is_worse: bool
    text: str


def pays(subject: Subject, judgement: Judgement) -> Payoff:
    """What the posterior to use gains over one temperature."""
    name = judgement.verdict.use
    if name is None:
        return Payoff(False, "Not to be said before a posterior is good for its target.")
    chosen = next(one for one in judgement.diagnoses if one.judged.name == name)
    val = judgement.val
    if val is None or val.content.labels is None or chosen.losses is None:
        return Payoff(False, "Not to be said without a labelled val split, which the network was not trained on.")
    plain = tried(lambda: temperature_on_val(subject.run, val))
    if isinstance(plain, Missing) or plain is None:
        return Payoff(False, "Not to be said: the run has no network whose logits one temperature could divide.")
    return payoff_of(Scored(name, chosen.losses), plain, how=_how(subject), by=_predicted_by(chosen.predicted_by))


def _predicted_by(how: tuple[str, int | None] | None) -> str:
    """By what diagnose has predicted val: other draws than those of predict, whose number is another; of samples all are taken."""
    if how is None:
        return ""
    integrator, size = how
    return f" by {integrator}" + (f" of {counted(size, 'draw')}" if size else "")


def payoff_of(own: Scored, plain: Scored, *, how: str, by: str = "") -> Payoff:
    """What a posterior's losses show against those at one temperature, each way by a test of its own at FALSE_ALARM.

    Args:
        own, plain: on the same examples of val.
        how: the command that predicts with one temperature.
        by: by what the posterior predicts.
    """
    (gap,), (back,) = excesses(own, [plain]), excesses(plain, [own])
    size = counted(len(own.losses), "example")
    numbers = (
        f"on {size} of val the network divided by one temperature, held out, has NLL {plain.nll:.4f}, {own.name}{by} {own.nll:.4f} (difference "
        f"{with_error(gap.value, gap.standard_error)})"
    )
    is_shown = any(one.p_adjusted is not None and one.p_adjusted <= FALSE_ALARM for one in (gap, back))
    if gap.is_worse:
        text = f"Not on data like val: {numbers}. One number does better there ({how})."
    elif back.is_worse:
        text = f"Yes: {numbers}. That is more than chance makes."
    elif is_shown:
        text = f"Hardly either way: {numbers}. That is more than chance makes, and at most {percent(WORSE_SHARE, '.0f')} of the NLL."
    else:
        text = f"Nothing can be shown either way: {numbers}."
    return Payoff(gap.is_worse, text)


def _how(subject: Subject) -> str:
    """The command that predicts with one temperature, or first fits it."""
    if "temperature" in subject.headers:
        return subject.run.suggest("predict", posterior="temperature")
    return subject.run.suggest("fit-temperature")
