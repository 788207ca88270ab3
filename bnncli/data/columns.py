"""Name the columns of a file (`FILE:KEY=COL+COL,...`), and find inputs, labels and predictions among them by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bnncli.data.table_files import FILE, LIST, OTHER, REAL, TEXT, WHOLE
from bnncli.errors import BnnError, DataError, UsageError
from bnncli.names import by_number, format_names, quote_name

LABEL = "label"
GROUP = "group"
BESIDE = (LABEL, GROUP)  # may be named beside an input or predictions
PAIRS = "pairs"  # what a model of preferences takes: two texts to choose from, with or without a prompt
INPUTS = ("text", "words", "image", "audio", "x")
PROBS, LOGITS = "probs", "logits"

_LABEL_NAMES = ("label", "labels", "target", "targets", "class", "category", "sentiment", "y")
_OTHER_LABEL_NAMES = ("y_true", "true_label", "ground_truth")  # without one of the usual ones
_TEXT_NAMES = ("text", "sentence", "review", "content", "comment", "tweet", "document", "body", "utterance")
_TEXT_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"))
_PREFERRED = ("chosen", "rejected")  # the first is preferred in every row
_PROMPT = "prompt"
_WORD_NAMES = ("words", "tokens", "form")
_TAG_NAMES = ("tags", "ner_tags", "pos_tags", "upos", "labels", "label")
_FILE_NAMES = ("path", "file", "filename", "file_name")
_AUDIO_NAMES = ("audio", "sound", "wav", "clip", "audio_path", "audio_file", *_FILE_NAMES)
_IMAGE_NAMES = ("image", "img", "picture", "photo", "image_path", "image_file", *_FILE_NAMES)
_PREDICTION_NAMES = {
    PROBS: ("probs", "prob", "probabilities", "probability", "proba", "probas", "p", "softmax", "predict_proba", "y_prob", "y_proba", "y_pred_proba"),
    LOGITS: ("logits", "logit"),
}  # fmt: skip
_PREFIXES = {
    PROBS: ("p_", "prob_", "probs_", "proba_", "probability_", "probabilities_"),
    LOGITS: ("logit_", "logits_"),
}
_NUMBER = re.compile(r"[+-]?[0-9]+([.][0-9]+)?")
_MOST_SHOWN = 20


def split_place(place: str, keys: Sequence[str], expected: str) -> tuple[Path, dict[str, str]]:
    """Split a file from the columns named after it, by their keys; a text without keys has the key "".

    A colon belongs to the file's name if such a file exists, and a comma without `KEY=` behind it to a column's name.

    Args:
        keys: those besides label and group, which exclude each other.
        expected: the beginning of messages.

    Raises:
        UsageError: the columns have another form.
    """
    path, key = Path(place).expanduser(), rf"(?:{'|'.join([*keys, *BESIDE])})="
    if path.exists():
        return path, {}
    starts = [match.start() for match in re.finditer(f":(?={key})", place)]
    colons = starts or [match.start() for match in re.finditer(":", place)][-1:]
    start = next((one for one in colons if Path(place[:one]).expanduser().exists()), next(iter(starts), None))
    if start is None or start == len(place) - 1:
        return path, {}
    text, found = place[start + 1 :], {}
    if "=" not in text:
        return Path(place[:start]).expanduser(), {"": text}
    for part in re.split(f",(?={key})", text):
        name, _, value = part.partition("=")
        if name not in (*keys, *BESIDE) or name in found or (not value and name != LABEL):
            raise UsageError(f"{expected}; got {text!r}")
        found[name] = value
    if len(found.keys() - {*BESIDE}) > 1:
        one_of = f"{', '.join(f'{one}=' for one in keys[:-1])} and {keys[-1]}="
        raise UsageError(f"{expected}, with only one of {one_of}; got {text!r}")
    return Path(place[:start]).expanduser(), found


@dataclass(frozen=True)
class Columns:
    """The columns or arrays of a file, and how messages name them.

    Attributes:
        holds: what each column holds.
        where: the file.
        kind: of a data set, as in `--data KIND:FILE`; None for predictions.
        noun: what they are called.
    """

    holds: Mapping[str, str]
    where: str
    kind: str | None = None
    noun: str = "column"

    def resolve(self, text: str) -> tuple[str, ...]:
        """Return a single name, names joined by +, or names that match a pattern with one *.

        Raises:
            DataError: there is no such column.
        """
        if text in self.holds:
            return (text,)
        if text.count("*") == 1:
            first, last = text.split("*")
            found = [
                one for one in self.holds if one.startswith(first) and one.endswith(last) and len(one) >= len(text)
            ]
            if found:
                return tuple(found)
        names = tuple(text.split("+"))
        for name in names:
            if name not in self.holds:
                known = format_names(self.holds, limit=_MOST_SHOWN)
                raise DataError(f"{self.where} has no {self.noun} {quote_name(name)}; it has {known}", code="no_column")
        return names

    def error(self, message: str, advice: str, named: str, *, code: str = "no_column") -> BnnError:
        """Return the error for columns that must be named.

        Args:
            named: what to write behind the file.
        """
        if self.kind is not None:
            where = f"\0data\0 {self.kind}: {self.where}"
            return UsageError(f"{where}: {message}", hint=f"{advice}: {self.kind}:FILE:{named}")
        return DataError(f"{self.where}: {message}", hint=f"{advice}: FILE:{named}", code=code)

    def only(self, found: Sequence[str], what: str, key: str, *, also: str = "") -> str:
        """Return the single name found. Raises the error for several, if there is not exactly one."""
        if len(found) == 1:
            return found[0]
        message = f"several {self.noun}s could be the {what}: {format_names(found, limit=_MOST_SHOWN)}"
        raise self.error(message, "choose one", f"{key}={found[0]}{also}", code=f"several_{self.noun}s")

    def describe(self, *, without: Collection[str] = ()) -> str:
        """Return the first columns with what they hold."""
        shown = [f"{quote_name(name)} ({holds})" for name, holds in self.holds.items() if name not in without]
        return ", ".join(shown[:_MOST_SHOWN]) or "none"


def find_group(columns: Columns, named: Mapping[str, str]) -> str | None:
    """Return the column of groups that the user named, or None. Raises DataError or UsageError unless it is one column."""
    if GROUP not in named:
        return None
    names = columns.resolve(named[GROUP])
    if len(names) > 1:
        raise UsageError(f"{columns.where}: group= takes one {columns.noun}; got {named[GROUP]!r}")
    if named.get(LABEL) == named[GROUP]:
        raise UsageError(f"{columns.where}: label= and group= name the same {columns.noun}, {named[GROUP]!r}")
    return names[0]


def find_labels(
    columns: Columns, given: str | None, *, is_alone: bool = False, has_header: bool = True
) -> tuple[str, ...]:
    """Return the columns of labels: one, one per class, or none.

    Args:
        given: as the user named them; empty for none.
        is_alone: the file is only for labels, so a single column is theirs, whatever its name.
        has_header: whether columns may be called by numbers.

    Raises:
        DataError: a named column is missing.
        UsageError, DataError: the choice is ambiguous, or the header looks like an example.
    """
    if given is not None:
        names = columns.resolve(given) if given else ()
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise UsageError(f"{columns.where}: label= names {columns.noun} {quote_name(twice)} twice")
        return names
    holds = columns.holds
    usual, others = (
        [name for name in holds if name.casefold() in known] for known in (_LABEL_NAMES, _OTHER_LABEL_NAMES)
    )
    found = usual or others
    numbers = [name for name in holds if holds[name] in (WHOLE, REAL) and _NUMBER.fullmatch(name)]
    if not found and numbers and not has_header:
        raise columns.error(
            f"no label column, and a column name is a number: {format_names(holds)} (is the header line missing?)",
            "add a header line, or name the label column (label= if there is none)",
            f"label={numbers[0]}",
        )
    found = found or (list(holds) if is_alone and len(holds) == 1 else [])
    if is_alone and not found:
        message = f"found no label {columns.noun}; its {columns.noun}s: {format_names(holds, limit=_MOST_SHOWN)}"
        raise columns.error(message, f"name the {columns.noun}", columns.noun.upper())
    return (columns.only(found, "labels", LABEL),) if found else ()


class Roles(NamedTuple):
    """The columns of an input, of one kind, of the label and of the group.

    Attributes:
        kind: text, words, image, audio or x.
        inputs: one column; two for a pair of texts, or three with a prompt before it; several for the numbers of a row.
        labels: one column; several for a matrix of zeros and ones, one per class; none without labels. For pairs also
            one of the two texts, which is preferred in every row.
        group: None without groups.
    """

    kind: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    group: str | None = None


def find_roles(columns: Columns, named: Mapping[str, str], *, takes: str | None) -> Roles:
    """Find the columns of input and label.

    Args:
        named: as from `split_place`.
        takes: images, texts, pairs, words or audio, if the model says so.

    Raises:
        DataError: a named column does not exist.
        UsageError: input or label are missing or ambiguous, or the header looks like an example.
    """
    group = find_group(columns, named)
    if group is not None:
        columns = replace(columns, holds={name: holds for name, holds in columns.holds.items() if name != group})
    if takes == PAIRS:
        return _find_pair_roles(columns, named)._replace(group=group)
    if "words" in named or (takes == "words" and not named.keys() - {*BESIDE}):
        return _find_word_roles(columns, named)._replace(group=group)
    labels = find_labels(columns, named.get(LABEL), has_header="x" in named)
    for kind in named.keys() - {*BESIDE}:
        inputs = columns.resolve(named[kind])
        if kind != "x" and len(inputs) > (2 if kind == "text" else 1):
            most = "one column, or two for pairs" if kind == "text" else "one column"
            raise UsageError(f"\0data\0 {columns.kind}: {kind}= takes {most}; got {named[kind]!r}")
        return Roles(kind, inputs, labels, group)
    others = {name: holds for name, holds in columns.holds.items() if name not in labels}
    texts = {name.casefold(): name for name, holds in others.items() if holds == TEXT}
    files = [name for name, holds in others.items() if holds == FILE]
    if takes in ("images", "audio") or (takes is None and files):
        kind, known = ("audio", _AUDIO_NAMES) if takes == "audio" else ("image", _IMAGE_NAMES)
        found = files or [name for folded, name in texts.items() if folded in known]
    else:
        kind = "text"
        for pair in _TEXT_PAIRS:
            if all(name in texts for name in pair):
                return Roles(kind, tuple(texts[name] for name in pair), labels, group)
        found = [texts[name] for name in _TEXT_NAMES if name in texts] or list(texts.values())
    if not found:
        numbers = [name for name, holds in others.items() if holds in (WHOLE, REAL, LIST)]
        as_numbers = f", or use numbers as inputs: x={'+'.join(numbers[:3])}" if numbers and kind == "text" else ""
        message = f"found no {kind} column; its columns, apart from the label: {columns.describe(without=labels)}"
        raise columns.error(message, "name the column", f"{kind}=COLUMN{as_numbers}")
    both = f", or use both as a pair: text={found[0]}+{found[-1]}" if kind == "text" else ""
    return Roles(kind, (columns.only(found, kind, kind, also=both),), labels, group)


def _find_pair_roles(columns: Columns, named: Mapping[str, str]) -> Roles:
    """Find the columns of a pair of texts, with or without a prompt, and of the label."""
    labels, holds = find_labels(columns, named.get(LABEL)), columns.holds
    folded = {name.casefold(): name for name in holds}
    inputs: tuple[str, ...] = ()
    if any(kind != "text" for kind in named.keys() - {*BESIDE}):
        raise columns.error("the model compares two texts", "name their columns", "text=FIRST+SECOND")
    if "text" in named:
        inputs = columns.resolve(named["text"])
        if not 2 <= len(inputs) <= 3:
            message = f"text= takes two columns for this model, or a prompt and two answers; got {named['text']!r}"
            raise columns.error(message, "name them", "text=FIRST+SECOND or text=PROMPT+FIRST+SECOND")
    else:
        for pair in (_PREFERRED, *_TEXT_PAIRS):
            if all(name in folded for name in pair):
                inputs = tuple(folded[name] for name in pair)
                break
        if not inputs:
            message = f"found no pair of texts; its columns, apart from the label: {columns.describe(without=labels)}"
            raise columns.error(message, "name them", "text=FIRST+SECOND or text=PROMPT+FIRST+SECOND")
        prompt = folded.get(_PROMPT)
        if prompt is not None and holds[prompt] == holds[inputs[0]]:  # else the messages contain it
            inputs = (prompt, *inputs)
    if not labels and LABEL not in named and tuple(name.casefold() for name in inputs[-2:]) == _PREFERRED:
        labels = (inputs[-2],)
    return Roles("text", inputs, labels)


def _find_word_roles(columns: Columns, named: Mapping[str, str]) -> Roles:
    """Find the column of each text's words and that of their tags. Raises as `find_roles` does."""
    where = f"\0data\0 {columns.kind}"
    found = [name for name, holds in columns.holds.items() if holds == LIST]
    words = [name for name in found if name.casefold() in _WORD_NAMES]
    if "words" in named:
        words = list(columns.resolve(named["words"]))
        if len(words) > 1:
            raise UsageError(f"{where}: words= takes one column; got {named['words']!r}")
    if not words:
        message = f"found no column of words; its columns: {columns.describe()}"
        if not found:
            hint = "use jsonl:, parquet: or hf-dataset: with a list of words for each text, or conll:"
            raise UsageError(f"{where}: {columns.where}: {message}", hint=hint)
        raise columns.error(message, "name the column", "words=COLUMN")
    inputs = columns.only(words, "words", "words")
    if LABEL not in named:
        tags = [name for name in found if name.casefold() in _TAG_NAMES and name != inputs]
        return Roles("words", (inputs,), (columns.only(tags, "labels", LABEL),) if tags else ())
    labels = columns.resolve(named[LABEL]) if named[LABEL] else ()
    if len(labels) > 1:
        raise UsageError(f"{where}: label= takes one column of tags; got {named[LABEL]!r}")
    return Roles("words", (inputs,), labels)


class PredictionColumns(NamedTuple):
    """Columns or arrays with the predictions.

    Attributes:
        names: one that holds a vector per row, or one per class.
        holds: PROBS or LOGITS, judged by their names; None if undecided.
        classes: class names, if the columns have them.
        others: columns or arrays with the same predictions as logits, by name.
        is_ordered: whether the classes are in numerical order: the user gave it, or the names sort that way.
    """

    names: tuple[str, ...]
    holds: str | None
    classes: tuple[str, ...] | None = None
    others: tuple[str, ...] = ()
    is_ordered: bool = True


def find_predictions(columns: Columns, named: Mapping[str, str], wanted: str | None) -> PredictionColumns:
    """Find the columns or array of predictions.

    Args:
        named: as from `split_place`.
        wanted: PROBS or LOGITS if the user says which.

    Raises:
        DataError: there are none, or they are ambiguous.
    """
    for key in (PROBS, LOGITS, ""):
        if key in named:
            names = columns.resolve(named[key])
            classes = _class_names(names)
            is_ordered = "+" in named[key] or _is_sorted(classes)
            return PredictionColumns(names, wanted or key or _infer_content(names[0]), classes, (), is_ordered)
    candidates = {kind: _find_by_name(columns.holds, kind) for kind in (PROBS, LOGITS)}
    for kind in (wanted,) if wanted else (PROBS, LOGITS):
        if candidates[kind]:
            first = columns.only([own[0] for own in candidates[kind]], "predictions", PROBS)
            chosen = next(_sort_classes(own, kind) for own in candidates[kind] if own[0] == first)
            beside = [_sort_classes(own, LOGITS) for own in candidates[LOGITS] if not wanted and kind == PROBS]
            return chosen._replace(others=beside[0].names if [b.classes for b in beside] == [chosen.classes] else ())
    by_class = [name for name, holds in columns.holds.items() if holds in (WHOLE, REAL) and name.isdecimal()]
    if len(by_class) > 1:
        return _sort_classes(by_class, wanted)
    lists = [name for name, holds in columns.holds.items() if holds == LIST]
    if not lists:
        raise columns.error(
            f"found no {columns.noun}s of probabilities or logits (probs, p_NAME, prob_NAME, logits, logit_NAME); its "
            f"{columns.noun}s: {columns.describe()}",
            "name them", "probs=NAME, FILE:probs=NAME+NAME, or FILE:probs='prefix*'",
        )  # fmt: skip
    name = columns.only(lists, "predictions", PROBS)
    return PredictionColumns((name,), wanted or _infer_content(name))


def prediction_like_columns(columns: Mapping[str, str], kind: str) -> list[str]:
    """Return the columns that hold values of a kind and are named like probabilities or logits."""
    whole = {name for every in _PREDICTION_NAMES.values() for name in every}
    return [
        name
        for name, holds in columns.items()
        if holds == kind and (name.casefold() in whole or _find_prefix([name]) is not None)
    ]


def _find_by_name(holds: Mapping[str, str], kind: str) -> list[list[str]]:
    """Return sets of columns, one per class or one for all, that are named like probabilities or logits."""
    numbers = [name for name in holds if holds[name] in (REAL, WHOLE)]
    sets = [[name for name in numbers if _has_prefix(name, prefix)] for prefix in _PREFIXES[kind]]
    whole = [name for name in holds if holds[name] not in (TEXT, OTHER) and name.casefold() in _PREDICTION_NAMES[kind]]
    # beside a matrix, a vector is a property of the rows
    lists = [name for name in whole if holds[name] == LIST]
    return [own for own in sets if len(own) > 1] or [[name] for name in lists or whole]


def _infer_content(name: str) -> str | None:
    """Infer what a column or array holds from its name."""
    folded = name.casefold()
    if "logit" in folded:
        return LOGITS
    return PROBS if "prob" in folded or "softmax" in folded else None


def _sort_classes(names: Sequence[str], holds: str | None) -> PredictionColumns:
    """Return columns of one class each, sorted numerically if named by numbers."""
    classes = _class_names(names)
    if classes is not None and all(one.isdecimal() for one in classes):
        names = [name for _, name in sorted(zip(classes, names, strict=True), key=lambda pair: int(pair[0]))]
        classes = _class_names(names)
    return PredictionColumns(tuple(names), holds, classes, is_ordered=_is_sorted(classes))


def _is_sorted(classes: Sequence[str] | None) -> bool:
    """Return whether names are sorted, ignoring case, with numbers compared as numbers."""
    keys = [by_number(name.casefold()) for name in classes or ()]
    return keys == sorted(keys)


def _class_names(names: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names without their common prefix; None for a single name."""
    prefix = _find_prefix(names) or ""
    return tuple(name[len(prefix) :] for name in names) if len(names) > 1 else None


def _find_prefix(names: Sequence[str]) -> str | None:
    """Return the prefix of predictions that all names have."""
    known = [prefix for prefixes in _PREFIXES.values() for prefix in prefixes]
    return next((prefix for prefix in known if all(_has_prefix(name, prefix) for name in names)), None)


def _has_prefix(name: str, prefix: str) -> bool:
    return name.casefold().startswith(prefix) and len(name) > len(prefix)
