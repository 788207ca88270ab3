"""verify: read every byte of artifacts, and check digests and invariants."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from bnncli.artifacts.exports import KIND as EXPORT
from bnncli.artifacts.exports import check_export
from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import RULE_KIND as DECISION
from bnncli.artifacts.posteriors import read_decision, read_trained
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import BnnError, DataError, DeviceError, Interrupted, MissingInput
from bnncli.evaluation.statistics import check_probabilities
from bnncli.options.command import Argument, Command, CommonOptions
from bnncli.session.calibration import KIND as CALIBRATION
from bnncli.session.calibration import read_map
from bnncli.session.inputs import open_posterior
from bnncli.session.monitoring import KIND as MONITOR
from bnncli.session.monitoring import read_state
from bnncli.session.run import Result, Run, Table

COMMAND = Command(
    "Check artifacts in full: digests and invariants. Exit 65 if any is bad.",
    "Reads every byte. `inspect` and `status` read only headers.",
    (CommonOptions,),
    ("bnncli verify ckpt.pt.bnn", "bnncli verify ckpt.pt.bnn/features/*.h5"),
    (Argument("file", "Artifacts, or folders of them, to check.", is_many=True),),
    section="Files",
    place=20,
)

SUFFIXES = (".h5", ".safetensors", ".nc", ".json", ".onnx", ".pt2")


def execute(run: Run, options: Any) -> Result:
    """Check each file and report one line per file. The failure has the first problem's exit code."""
    entries: list[dict[str, Any]] = []
    failure: BnnError | None = None
    for path in _files(run.arguments["file"]):
        run.console.poll(str(path))
        try:
            header = check_artifact(path)
            entries.append({"path": str(path), "kind": header.kind, "is_valid": True, "problem": None})
        except (DeviceError, Interrupted):
            raise
        except BnnError as error:
            beside = path.with_name(f"{path.name}.bnn")
            if error.hint is None and beside.is_dir():
                error.hint = f"{path.name} is the checkpoint of a run: bnncli verify {shlex.quote(str(beside))}"
            entries.append({"path": str(path), "kind": None, "is_valid": False, "problem": error.message})
            failure = failure or type(error)(error.message, hint=error.hint, code=error.code, path=path)
    rows = [
        [entry["path"], entry["kind"] or "-", "ok" if entry["is_valid"] else "BAD", entry["problem"] or ""]
        for entry in entries
    ]
    return Result(extra={"files": entries}, tables=[Table(["file", "kind", "state", "problem"], rows)], failure=failure)


def _files(given: list[Path]) -> list[Path]:
    """Return the named files, and the artifacts in named folders."""
    found: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            files = sorted(file for suffix in SUFFIXES for file in path.rglob(f"*{suffix}"))
            inside = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
            if not inside:
                raise MissingInput(f"{path} holds no artifacts ({', '.join(SUFFIXES)})", path=path)
            found += inside
        else:
            found.append(path)
    return found


def check_artifact(path: Path) -> Header:
    """Check every byte and invariant of an artifact and return its header. Raises DataError where a check fails."""
    header = read_header(path)
    if header.kind == "features":
        read_features(path, is_full_check=True)
    elif header.kind == "predictions":
        content = read_predictions(path)
        check_probabilities(content.probs, len(content.classes), is_exclusive=content.is_exclusive)
        if content.group_probs is not None and content.group_weights is not None:
            # A group without weight has no probabilities, and zeros in their place.
            for group in content.group_probs[content.group_weights > 0]:
                check_probabilities(group, len(content.classes), is_exclusive=content.is_exclusive)
    elif header.kind == "metrics":
        read_metrics(path)
    elif header.kind == DECISION:
        _ = read_decision(path).rule
    elif header.kind == "checkpoint":
        read_trained(path)
    elif header.kind == CALIBRATION:
        read_map(path)
    elif header.kind == MONITOR:
        read_state(path)
    elif header.kind == EXPORT:
        check_export(path)
    else:
        posterior, _ = open_posterior(path)
        if _places(posterior.layout.to_json()) != _places(header.meta.get("param_layout")):
            raise DataError(
                f"{path}: its tensors do not match its layout {header.meta.get('param_layout')}",
                code="damaged",
                path=path,
            )
    return header


def _places(param_layout: Any) -> list[tuple[Any, Any]] | None:
    """Return the shape and offset of each part, ignoring names: a latent network's only layer is a head. None if malformed."""
    if not isinstance(param_layout, list) or not all(isinstance(part, dict) for part in param_layout):
        return None
    return [(part.get("shape"), part.get("offset")) for part in param_layout]
