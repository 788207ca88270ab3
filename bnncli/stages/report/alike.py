"""What sets checkpoints that are compared apart, as far as their runs tell: chance of training, or more than that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import differences
from bnncli.artifacts.headers import Header, interpreting
from bnncli.stages.report.subject import Subject, tried
from bnncli.stages.report.words import listed_in_words

_MOST_NAMED = 12  # checkpoints
_MOST_TOLD = 4  # posteriors whose options differ
_SPLITS = {"train": "training examples", "val": "validation examples"}


def what_differs(subjects: Sequence[Subject], posteriors: Sequence[str], split: str) -> str:
    """What the numbers of different checkpoints differ by, in a sentence or two.

    Args:
        posteriors: whose predictions are compared, by name.
        split: that they are compared on.
    """
    named = listed_in_words([subject.name for subject in subjects], most=_MOST_NAMED)
    weights = {header.weights_digest for one in subjects if (header := _any_features(one)) is not None}
    if len(weights) == 1 and None not in weights:
        return f"{named} are the same network. Differences between their numbers do not come from training."
    found = [*_examples(subjects, split), *_models(subjects), *_options(subjects, posteriors)]
    if found:
        return (
            f"Each posterior was fitted to {named}, which differ by more than their random training: "
            f"{'; '.join(found)}. Standard errors and tests treat all of these differences as chance."
        )
    if not all(_model(subject) for subject in subjects):
        return (
            f"Each posterior was fitted to {named} with the same options. bnncli cannot tell whether the "
            "examples were the same, because the features were given as arrays. If so, differences between its "
            "numbers come from the random training."
        )
    return (
        f"Each posterior was fitted to {named}, on the same examples with the same options. If the networks were "
        "trained alike, differences between its numbers come from the random training."
    )


def _features(subject: Subject, split: str) -> Header | None:
    header = tried(partial(read_header, subject.run.folder.features(split)))
    return header if isinstance(header, Header) else None


def _any_features(subject: Subject) -> Header | None:
    return next((one for name in subject.run.folder.splits() if (one := _features(subject, name)) is not None), None)


def _model(subject: Subject) -> Any:
    """The model that features were made by; None where they came ready."""
    header = _any_features(subject)
    if header is None:
        return None
    with interpreting(header.path):
        return header.provenance["params"].get("model")


def _examples(subjects: Sequence[Subject], shown: str) -> list[str]:
    """The splits whose examples are not the same; those of ready features tell nothing."""
    found = []
    for split, what in {**_SPLITS, shown: f"examples of {shown}"}.items():
        headers = [_features(subject, split) for subject in subjects if _model(subject)]
        known = [one for one in headers if one is not None]
        sizes = [int(one.meta["num_examples"]) for one in known]
        if len({one.meta.get("order_digest") for one in known}) > 1:
            are = (
                f" ({listed_in_words([f'{size:,}' for size in sizes], most=_MOST_NAMED)} of them)"
                if len(set(sizes)) > 1
                else ""
            )
            found.append(f"their {what} are not the same{are}")
    return found


def _models(subjects: Sequence[Subject]) -> list[str]:
    models = list(dict.fromkeys(str(_model(subject)) for subject in subjects))
    return [f"their networks differ ({listed_in_words(models, most=_MOST_NAMED)})"] if len(models) > 1 else []


def _options(subjects: Sequence[Subject], posteriors: Sequence[str]) -> list[str]:
    """The posteriors that were not made with the same options, with the first difference of each."""
    first, *others = subjects
    found = []
    for name in dict.fromkeys(posteriors):
        for other in others:
            headers = [subject.headers.get(name) for subject in (first, other)]
            params = [_params(header) for header in headers if header is not None]
            if len(params) == 2 and params[0] != params[1]:
                told = differences(*params, labels=(first.name, other.name))
                found.append(f"options of {name} ({told})")
                break
    rest = len(found) - _MOST_TOLD
    return found[:_MOST_TOLD] + ([f"options of {rest} more"] if rest > 0 else [])


def _params(header: Header) -> dict[str, Any]:
    """The options that change what a posterior is, but for the seed, which is chance."""
    with interpreting(header.path):
        return {name: value for name, value in header.provenance["params"].items() if name != "seed"}
