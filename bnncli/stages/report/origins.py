"""What was fitted from what: the commands, as they can be typed again, and every artifact with its digest."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, interpreting
from bnncli.errors import MissingInput
from bnncli.figures.pages import Block, DataTable, Missing, TableCell, commands, paragraph
from bnncli.options.status import StatusOptions
from bnncli.stages.report.subject import Subject, tried

_MOST_ROWS = 120
_SHORT = 16  # digits of a digest that are shown: enough to tell any two apart
_KINDS = {"features": 0, "posterior": 1, "samples": 1, "predictions": 2, "metrics": 3}


def origins(subject: Subject) -> list[Block]:
    """The section."""
    run = subject.run
    found = tried(lambda: importlib.import_module("bnncli.stages.status").run(run, StatusOptions()))
    if isinstance(found, Missing):
        return [found]
    told = {str(one.path): one.what for one in subject.damaged}  # status reads headers alone
    for entry in found.extra["artifacts"]:
        if entry["path"] in told:
            entry |= {"state": "invalid", "why": told[entry["path"]]}
    entries = sorted(found.extra["artifacts"], key=lambda entry: _KINDS.get(entry["kind"], 9))
    entries = [entry for entry in entries if entry["state"] != "missing"]
    if not entries:
        raise MissingInput(f"{run.folder.root} holds no artifacts", hint=run.suggest("status"), path=run.folder.root)
    lines = [entry["remake"] for entry in entries if entry["remake"]]
    made = [entry for entry in entries if _KINDS.get(entry["kind"], 9) <= _KINDS["posterior"]]
    kept = entries[:_MOST_ROWS]
    notes = [f"{len(entries) - len(kept)} more artifacts: {run.suggest('status')} lists them."] * (entries != kept)
    notes += [f"Not fresh: {e['name']}, {e['state']} ({e['why']})." for e in entries if e["state"] != "fresh"][:20]
    columns = ["artifact", "made from", "state", "content digest"]
    table = DataTable(
        f"{subject.key}artifacts",
        f"All {len(entries)} artifacts{subject.of}",
        columns,
        [_row(entry) for entry in kept],
        notes=notes,
        is_folded=True,
    )
    first = DataTable(
        f"{subject.key}posterior-files",
        f"Features and posteriors{subject.of} with their inputs and the start of their content digests",
        columns,
        [_row(entry) for entry in made[:_MOST_ROWS]],
    )
    network = tried(partial(_network, subject))
    blocks: list[Block] = [
        network if isinstance(network, Missing) else paragraph(network),
        commands(list(dict.fromkeys(lines))),
        first,
        table,
    ]
    warnings = _warnings(subject)
    if warnings:
        blocks.append(
            DataTable(
                f"{subject.key}warnings",
                f"Warnings of the commands{subject.of}",
                ["artifact", "warning"],
                [[TableCell(name), TableCell(text)] for name, text in warnings],
            )
        )
    return blocks


def _network(subject: Subject) -> str:
    """Which network the run is of, in a sentence."""
    headers = [tried(partial(read_header, subject.run.folder.features(name))) for name in subject.run.folder.splits()]
    header = next((one for one in headers if isinstance(one, Header)), None)
    if header is None:
        return "These commands, in this order, produce what this report shows."
    with interpreting(header.path):
        record, params = header.provenance.get("checkpoint"), header.provenance.get("params", {})
        model = f"the model {params['model']}" if params.get("model") else "ready features"
        digest = "" if record is None else f" (weights {_short(str(record['weights_digest']))})"
        size = int(header.meta["num_features"])
    return (
        f"Checkpoint {subject.name}{digest}, {model}, {size} features per example. These commands, in this "
        "order, produce what this report shows."
    )


def _row(entry: dict[str, Any]) -> list[TableCell]:
    header = tried(partial(read_header, Path(entry["path"])))
    inputs = [one["role"] for one in header.inputs] if isinstance(header, Header) else []
    digest = _short(str(entry["content_digest"] or "–"))
    return [TableCell(entry["name"]), TableCell(", ".join(inputs) or "–"), TableCell(entry["state"]), TableCell(digest)]


def _short(digest: str) -> str:
    """The first digits of a digest, without the name of its kind."""
    return digest.rpartition(":")[2][:_SHORT]


def _warnings(subject: Subject) -> list[tuple[str, str]]:
    """Warnings that posteriors carry, by name, each text once."""
    found: dict[str, str] = {}
    for name, header in subject.headers.items():
        for text in header.provenance.get("warnings", [])[:5]:
            found.setdefault(str(text), name)
    return [(name, text) for text, name in found.items()][:20]
