"""Write a run's section of a Hugging Face model card, and the card's metadata, into a Markdown file.

The rest of the file stays as it is: the section lies between two comments, and of the metadata only the keys are written that change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.outputs import check_side_output
from bnncli.commands.report.sections import score_metric
from bnncli.commands.report.subject import Subject, describe_network, try_find
from bnncli.commands.report.verdict import (
    POSTERIOR_KINDS,
    describe_calibration_of,
    describe_detection,
    find_gains,
    headline,
    list_focus_groups,
    list_misreadings,
)
from bnncli.errors import DataError
from bnncli.figures.pages import Missing
from bnncli.likelihoods import has_exclusive_classes, read_recorded_name
from bnncli.models.libraries import require
from bnncli.names import count_noun, printable
from bnncli.options.scoring import Quantity
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import Run
from bnncli.system.input_files import convert_read_errors

FLAG = "\0model_card\0"
_START, _END = "<!-- bnncli: start -->", "<!-- bnncli: end -->"
_FRONT = re.compile(r"\s*---[ \t]*\n(.*?)(?<=\n)---[ \t]*(?:\n|$)", re.DOTALL)  # as the Hub finds it
_SCORES = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE"}
_TAGS = ("bnncli", "bayesian", "uncertainty")
_OURS = {"posterior", "integrator"}  # arguments of metrics, by which results are recognised that were written here


class CardFile(NamedTuple):
    """A model card.

    Attributes:
        front: the text of its YAML block, without the lines around it.
        metadata: what the block says.
        body: everything after the block.
        newline: how its lines end.
    """

    front: str
    metadata: Mapping[str, Any]
    body: str
    newline: str


def check_card(run: Run, path: Path, others: Sequence[Path]) -> None:
    """Raise before any work unless the card can be written to `path`.

    Args:
        others: files of this command, which are never replaced.

    Raises:
        UsageError: it is one of the others, or PyYAML is missing.
        DataError: there is a file that is no card, or whose metadata cannot be read.
        OutputExists: its folder is not writable.
    """
    require("yaml", extra="hf", what="\0model_card\0")
    check_side_output(path, FLAG, "model card", is_ours=lambda _: True, force=run.write.force, others=others)
    read_card(path)


def read_card(path: Path) -> CardFile:
    """Return the card at `path`; an empty one if there is no file.

    Raises:
        DataError: it is not UTF-8, its metadata cannot be read, or the comments around our section are not a pair.
    """
    if not path.exists():
        return CardFile("", {}, "", "\n")
    yaml = require("yaml", extra="hf", what="\0model_card\0")
    try:
        with convert_read_errors(path):
            text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{FLAG}: {path} is not a text in UTF-8", path=path) from None
    newline = "\r\n" if "\r\n" in text else "\n"
    text = text.replace("\r\n", "\n")
    starts, ends = text.count(_START), text.count(_END)
    if (starts, ends) not in ((0, 0), (1, 1)) or text.find(_END) < text.find(_START):
        hint = f"keep one line {_START} and one line {_END} after it, or remove both"
        raise DataError(f"{FLAG}: {path} has {starts} start and {ends} end comments of bnncli", hint=hint, path=path)
    found = _FRONT.match(text)
    front, body = (found[1], text[found.end() :]) if found else ("", text)
    try:
        metadata = yaml.safe_load(front) or {}
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{FLAG}: {path}: its metadata is not valid YAML: {why}", path=path) from None
    index = metadata.get("model-index", []) if isinstance(metadata, dict) else None
    is_index = isinstance(index, list) and all(
        isinstance(one, dict) and isinstance(one.get("results", []), list) for one in index
    )
    if not is_index:
        raise DataError(
            f"{FLAG}: {path}: expected metadata with a model-index that is a list of models with results", path=path
        )
    return CardFile(front, metadata, body, newline)


def build_card(subject: Subject, path: Path) -> bytes:
    """Return the card at `path` with the section and the metadata of a run; everything else is as it was.

    Raises:
        DataError: as read_card, or the metadata cannot be changed without a change to the rest of them.
    """
    card = read_card(path)
    section = f"{_START}\n{_write_section(subject)}\n{_END}"
    if _START in card.body:
        before, _, rest = card.body.partition(_START)
        body = before + section + rest.partition(_END)[2]
    else:
        start = card.body if card.body.strip() else f"\n# {_escape(subject.name)}\n"
        body = f"{start}{'' if start.endswith(chr(10)) else chr(10)}\n{section}\n"
    front = _change_front(card, build_metadata(subject, card.metadata), path)
    return f"---\n{front}---\n{body}".replace("\n", card.newline).encode()


def build_metadata(subject: Subject, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the metadata to write. What the user has chosen stays: library, task and the dataset's name."""
    task = _find_task(subject)
    tags = known.get("tags") or []
    tags = tags if isinstance(tags, list) else [tags]
    changed: dict[str, Any] = {"tags": [*tags, *(tag for tag in _TAGS if tag not in tags)]}
    changed["library_name"] = known.get("library_name") or "bnncli"
    if known.get("pipeline_tag") or task:
        changed["pipeline_tag"] = known.get("pipeline_tag") or task
    models = [dict(one) for one in known.get("model-index") or []] or [{"name": Path(subject.name).stem}]
    results = list(models[0].get("results") or [])
    kept = [one for one in results if not _is_ours(one)]
    old = [one.get("dataset") for one in results if _is_ours(one)]
    dataset = _describe_dataset(subject)
    dataset = next((one for one in old if isinstance(one, dict) and one.get("split") == subject.split), dataset)
    metrics = _list_metrics(subject)
    if metrics:
        kept.append({"task": {"type": task or "tabular-classification"}, "dataset": dataset, "metrics": metrics})
    models[0]["results"] = kept
    if kept:
        changed["model-index"] = models
    return changed


def _is_ours(result: Any) -> bool:
    metrics = result.get("metrics") if isinstance(result, dict) else None
    return isinstance(metrics, list) and any(
        isinstance(one, dict) and isinstance(one.get("args"), dict) and one["args"].keys() >= _OURS for one in metrics
    )


def _list_metrics(subject: Subject) -> list[dict[str, Any]]:
    """Return the scores of the predictions in focus, as model-index has them."""
    group = subject.focus
    found = [] if group is None else [(name, score_metric(subject, group, Quantity(name))) for name in _SCORES]
    return [
        {
            "type": name,
            "name": _SCORES[name],
            "value": float(metric["value"]),
            "args": {"posterior": group.posterior, "integrator": group.variant},
        }
        for name, metric in found
        if group is not None and metric is not None and metric["value"] is not None
    ]


def _describe_dataset(subject: Subject) -> dict[str, str]:
    header = try_find(partial(read_header, subject.run.folder.features(subject.split)))
    name = (isinstance(header, Header) and _name_source(header)) or subject.split
    return {"type": re.sub(r"[^\w.-]+", "-", Path(name).stem).lower(), "name": name, "split": subject.split}


def _find_task(subject: Subject) -> str | None:
    """Return the Hub's name of the task, by the inputs of the network; None where features were given."""
    for name in subject.run.folder.splits():
        header = try_find(partial(read_header, subject.run.folder.features(name)))
        statistics = header.provenance.get("input_statistics") if isinstance(header, Header) else None
        if isinstance(statistics, dict) and isinstance(header, Header):
            if str(header.provenance.get("source")).startswith("audio:"):
                return "audio-classification"
            if "tokens" in statistics:
                return "text-classification"
            return f"{'image' if len(statistics.get('shape', ())) == 3 else 'tabular'}-classification"
    return None


def _change_front(card: CardFile, wanted: Mapping[str, Any], path: Path) -> str:
    """Return the YAML block with the wanted keys. Lines of other keys, and of those that are as wanted, stay."""
    yaml = require("yaml", extra="hf", what="\0model_card\0")
    front = card.front
    for key, value in wanted.items():
        if card.metadata.get(key) == value:
            continue
        lines = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True)
        block = re.compile(rf"^{re.escape(key)}[ \t]*:.*\n(?:(?:[ \t-].*)?\n)*?(?=[^ \t\n-]|\Z)", re.MULTILINE)
        found = block.search(front)
        front = front + lines if found is None else front[: found.start()] + lines + front[found.end() :]
    try:
        is_merged = yaml.safe_load(front) == {**card.metadata, **wanted}
    except yaml.YAMLError:
        is_merged = False
    if not is_merged:
        hint = "write each key of the metadata on a line of its own, as KEY: VALUE"
        raise DataError(f"{FLAG}: cannot add to the metadata of {path}", hint=hint, path=path)
    return front


def _write_section(subject: Subject) -> str:
    """Return the section in Markdown."""
    group = subject.focus
    parts = ["## Uncertainty", f"**{_escape(headline(subject, find_gains(subject)))}**"]
    if subject.recommended is not None and subject.recommended.sentence:
        sentence = subject.recommended.sentence
        parts.append(_escape(f"{sentence[:1].upper()}{sentence[1:]}."))
    if group is None:
        assert isinstance(subject.groups, Missing)
        parts.append(_say(subject.groups))
    else:
        parts += ["### Posterior", _table(("", ""), _describe_posterior(subject, group))]
    parts += ["### Data", _table(("Split", "Use", "Rows", "Data"), _describe_splits(subject)), *_list_classes(subject)]
    parts += ["### Scores", *_write_scores(subject)]
    if group is not None:
        parts += ["### Use", *_write_use(subject, group)]
    parts += ["### Limits", "\n".join(f"- {_escape(text)}" for text in _list_limits(subject))]
    return "\n\n".join(parts)


def _describe_posterior(subject: Subject, group: PredictionGroup) -> list[tuple[str, str]]:
    """Return rows of a table: the network, and what the posterior is."""
    model = _find_model(subject) or ""
    rows = [("Network", _escape(describe_network(subject).replace(model, _shorten(model))))]
    header = subject.headers.get(group.posterior)
    if header is not None:
        with convert_lookup_errors(header.path):
            meta, found = header.meta, dict(header.meta.get("metrics") or {})
            kind = POSTERIOR_KINDS.get(str(meta.get("type")))
            rows.append(("Posterior", _escape(f"{group.posterior}{f', {kind}' if kind else ''}")))
            rows.append(("Method", f"`bnncli {header.provenance['command'][1]}`"))
            layout = meta.get("param_layout") or []
            names = [str(part["name"]) for part in layout]
            size = sum(prod(part["shape"]) for part in layout)
            where = f"the last layer ({', '.join(names)})" if _is_head(header) else count_noun(len(names), "tensor")
            rows.append(("Parameters", _escape(f"{size:,}, of {where}")))
        base = next((Path(one["path"]).stem for one in header.inputs if one["role"] == "base"), None)
        told = {
            "Base": base,
            "Structure": meta.get("structure"),
            "Flow": meta.get("flow"),
            "Prior precision": found.get("prior_precision"),
            "Temperature": found.get("temperature"),
        }
        rows += [(title, _escape(_spell(value))) for title, value in told.items() if value is not None]
    draws = group.splits(is_ood=False)[subject.split].meta.get("draws")
    drawn = f", {count_noun(int(draws), 'draw')}" if draws else ""
    return [*rows, ("Integrator", _escape(f"{group.variant}{drawn}"))]


def _is_head(header: Header) -> bool:
    return all(str(part["name"]).startswith("head.") for part in header.meta.get("param_layout") or [])


def _spell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_spell(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_spell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _describe_splits(subject: Subject) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in subject.run.folder.splits():
        header = try_find(partial(read_header, subject.run.folder.features(name)))
        if isinstance(header, Header):
            is_ood = bool(header.meta.get("is_ood"))
            use = {"train": "fit", "val": "tuning"}.get(name, "unlike the training data" if is_ood else "scores")
            count = f"{int(header.meta['num_examples']):,}"
            rows.append((_escape(name), use, count, _escape(_name_source(header) or "features")))
    return rows


def _name_source(header: Header) -> str | None:
    """Return the file or folder of a split without its place, which is a matter of one machine; None where features were given."""
    source = header.provenance.get("source")
    if not isinstance(source, str) or "model" not in header.provenance.get("params", {}):
        return None
    return Path(source.partition(":")[2].partition("@")[0].partition(":")[0]).name or None


_MOST_CLASSES = 20


def _list_classes(subject: Subject) -> list[str]:
    classes: list[Any] = next(
        (header.meta["classes"] for header in subject.headers.values() if header.meta.get("classes")), []
    )
    rest = f" and {len(classes) - _MOST_CLASSES} more" if len(classes) > _MOST_CLASSES else ""
    shown = ", ".join(_escape(str(name)) for name in classes[:_MOST_CLASSES])
    return [f"{len(classes)} classes: {shown}{rest}."] if classes else []


def _write_scores(subject: Subject) -> list[str]:
    """Return the table of the network as trained, at one temperature, and of the recommended posterior."""
    if isinstance(subject.rows, Missing):
        return [_say(subject.rows)]
    groups = sorted(list_focus_groups(subject), key=lambda group: _ORDER.get(group.posterior, len(_ORDER)))
    rows = []
    for group in groups:
        metrics = [score_metric(subject, group, Quantity(name)) for name in _SCORES]
        title = _TITLES.get(group.posterior, subject.titles[group.name])
        rows.append((_escape(title), *map(_spell_score, metrics)))
    count = int(groups[0].splits(is_ood=False)[subject.split].meta["num_examples"]) if groups else 0
    note = (
        f"On {_escape(subject.split)}, {count:,} examples, with 95% intervals over examples. NLL is in nats. "
        "ECE is the mean difference between stated confidence and accuracy."
    )
    meta = subject.focus.splits(is_ood=False)[subject.split].meta if subject.focus is not None else {}
    if meta and not has_exclusive_classes(read_recorded_name(meta)):
        note += " Accuracy is the share of examples with every label right."
    return [_table(("", *_SCORES.values()), rows), note]


_ORDER = {"map": 0, "temperature": 1}
_TITLES = {"map": "as trained", "temperature": "one temperature"}


def _spell_score(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric["value"] is None:
        return "–"
    ends = metric.get("interval")
    return f"{metric['value']:.4f}" + (f" [{ends['low']:.4f}, {ends['high']:.4f}]" if ends else "")


def _write_use(subject: Subject, group: PredictionGroup) -> list[str]:
    """Return code that predicts with the recommended posterior, and the files that it needs."""
    run, model = subject.run, _find_model(subject)
    words = [f'"{printable(subject.name)}"']
    words += [f'run_dir="{printable(run.folder.root.name)}"'] if run.run_options.run_dir else []
    words += [f'model="{_shorten(model)}"'] if model is not None and ":" in model else []
    code = (
        "```python\nimport bnncli\n\n"
        f"run = bnncli.open({', '.join(words)})\n"
        f'answer = run.predict(x, posterior="{group.posterior}", integrator="{group.integrator}")\n'
        "print(answer.classes, answer.probs, answer.interval)\n```"
    )
    needed = [subject.name] * run.checkpoint_path.exists() + [run.folder.root.name]
    return [code, f"This needs {' and '.join(f'`{printable(name)}`' for name in needed)}."]


def _find_model(subject: Subject) -> str | None:
    """Return what extract-features was given as --model; None where features were given."""
    for name in subject.run.folder.splits():
        header = try_find(partial(read_header, subject.run.folder.features(name)))
        if isinstance(header, Header) and header.provenance["params"].get("model"):
            return str(header.provenance["params"]["model"])
    return None


def _shorten(model: str) -> str:
    """Return a model without the place of its file or folder on this machine."""
    return printable(re.sub(r"(^|:)/[^:]*/", r"\1", model))


def _list_limits(subject: Subject) -> list[str]:
    judgement, found = subject.judgement, list_misreadings(subject)
    if isinstance(judgement, Missing):
        found.append(judgement.sentence)
    else:  # what to predict with is said above
        found.append(f"{judgement.verdict.sentence.partition('; predict with ')[0]}.")
    calibration, detection = describe_calibration_of(subject), describe_detection(subject)
    found += [calibration] if calibration else []
    found.append(detection or "Detection of inputs unlike the training data was not measured.")
    header = None if subject.focus is None else subject.headers.get(subject.focus.posterior)
    if header is not None and header.meta.get("type") in POSTERIOR_KINDS and _is_head(header):
        found.append(
            "The posterior is over the last layer. It does not express doubt about the features that the network computes."
        )
    found.append(
        "Probabilities, intervals and error rates hold for inputs like those of the splits above. For other inputs, "
        "confidence can be high and wrong."
    )
    return [re.sub(r"\.\.$", ".", text) for text in found]


def _say(missing: Missing) -> str:
    return _escape(missing.sentence) + (f" Run `{missing.command}`." if missing.command else "")


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_|\[\]<>#])", r"\\\1", printable(text.replace("\n", " ")))
