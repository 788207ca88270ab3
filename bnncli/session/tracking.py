"""Log a command's result to an experiment tracker: MLflow, Weights & Biases or TensorBoard.

A tracker is opened before the work, so that a missing library or account costs no time. The result is logged after everything is
written. If that fails, the command warns, and its artifacts and exit code stay as they are.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import UsageError
from bnncli.options.declaration import spell_options
from bnncli.session.run import Result, Run, result_document
from bnncli.system.workers import is_leader

_SHOWN = (".html", ".png", ".svg", ".pdf")  # outputs that trackers show; posteriors and predictions may be large


@dataclass(frozen=True)
class LoggedResult:
    """What is logged of a result.

    Attributes:
        name: command and artifact.
        numbers: by name, such as test/laplace/mc/nll.
        options: of the command, by name, defaults included.
        tags: command line, checkpoint, digests.
        files: pages and figures.
    """

    name: str
    command: str
    numbers: Mapping[str, float]
    options: Mapping[str, Any]
    tags: Mapping[str, str]
    files: Sequence[Path]

    @classmethod
    def of(cls, run: Run, result: Result, options: Any) -> LoggedResult:
        """Collect it after a command's work."""
        document = spell_options(result_document(run, result))
        outputs, checkpoint = document.get("outputs", []), next(iter(run.arguments.values()))
        tags = {
            "bnncli.command": run.line.pasted(),
            "bnncli.checkpoint": " ".join(map(str, checkpoint if isinstance(checkpoint, list) else [checkpoint])),
            "bnncli.ok": str(result.failure is None).lower(),
            **{f"bnncli.digest.{one['role']}": one["content_digest"] for one in outputs if "content_digest" in one},
        }
        return cls(
            name=" ".join([run.command, *(one["role"] for one in outputs if len(outputs) == 1)]),
            command=run.command,
            numbers=list_numbers(document),
            options=_list_options(run, options) | {"device": document.get("device")},
            tags=tags,
            files=[path for one in outputs if (path := Path(one["path"])).suffix in _SHOWN and path.is_file()],
        )


def execute_and_log(module: Any, run: Run, options: Any) -> Result:
    """Execute a command, and log its result to the trackers that were asked for.

    Args:
        module: of the command.

    Raises:
        UsageError: a tracker cannot be used; nothing was done.
    """
    trackers = {text: _open(text, run) for text in dict.fromkeys(run.track.log_to)} if is_leader() else {}
    result: Result = module.execute(run, options)
    if trackers and result.action != "planned":
        logged = LoggedResult.of(run, result, options)
        result.extra["logged"] = [_log(text, tracker, run, logged) for text, tracker in trackers.items()]
    return result


def _open(text: str, run: Run) -> Tracker:
    name, _, place = text.partition(":")
    try:
        return _OPENERS[name](run, place)
    except UsageError:
        raise
    except Exception as error:  # foreign code
        raise UsageError(f"\0log_to\0 {name} cannot be used: {_describe(error)}", code="no_tracker") from error


def _log(text: str, tracker: Tracker, run: Run, logged: LoggedResult) -> dict[str, Any]:
    """Log a result, and return its entry in the document; warn if that fails."""
    place = None
    run.console.poll(f"logging to {text}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where results go
            place = tracker.log(logged)
    except Exception as error:  # foreign code, and the network
        run.console.warn(f"\0log_to\0 {text} failed, but the result is complete: {_describe(error)}")
    else:
        run.console.info(f"logged to {text.partition(':')[0]}: {place}")
    return {"tracker": text.partition(":")[0], "place": place}


def _describe(error: Exception) -> str:
    return _hide_password(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _hide_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)


class Tracker(Protocol):
    """An opened experiment tracker."""

    def log(self, result: LoggedResult) -> str:
        """Log a result and return where it is."""


_MOST_AT_ONCE = 100  # parameters or tags in one request to a server of MLflow
_LONGEST_PARAMETER = 6000


@dataclass(frozen=True)
class MLflow:
    """MLflow. Logs into the active run, or that of MLFLOW_RUN_ID, else into one of its own."""

    library: ModuleType

    @classmethod
    def open(cls, run: Run, place: str) -> MLflow:
        """Import the library and open its store."""
        library = _require("mlflow")
        library.MlflowClient()  # raises where the store needs another library
        return cls(library)

    def log(self, result: LoggedResult) -> str:
        """Log metrics, parameters, tags and artifacts."""
        name, active = None if os.environ.get("MLFLOW_RUN_ID") else result.name, self.library.active_run()
        with contextlib.nullcontext(active) if active else self.library.start_run(run_name=name) as run:
            for some in _in_blocks(result.numbers, _MOST_AT_ONCE):
                self.library.log_metrics(some)
            given = {f"{result.command}.{name}": str(one)[:_LONGEST_PARAMETER] for name, one in result.options.items()}
            for some in _in_blocks(given, _MOST_AT_ONCE):
                self.library.log_params(some)
            for some in _in_blocks(result.tags, _MOST_AT_ONCE):
                self.library.set_tags(some)
            for path in result.files:
                self.library.log_artifact(str(path))
        return f"{_hide_password(self.library.get_tracking_uri())}, run {run.info.run_id}"


@dataclass(frozen=True)
class WeightsAndBiases:
    """Weights & Biases. Logs into the active run, else into one of its own."""

    library: ModuleType

    @classmethod
    def open(cls, run: Run, place: str) -> WeightsAndBiases:
        """Import the library and, unless it is offline, log in."""
        library = _require("wandb")
        if library.run is None and library.setup().settings.mode == "online":
            with contextlib.redirect_stderr(io.StringIO()):
                is_known = library.login(verify=False, prompt=False)  # an outage of the server does not stop the work
            if not is_known:
                raise UsageError(
                    "\0log_to\0 wandb: no API key", hint="wandb login, or WANDB_MODE=offline", code="no_tracker"
                )
        return cls(library)

    def log(self, result: LoggedResult) -> str:
        """Log numbers, configuration and an artifact with the files."""
        is_own = self.library.run is None
        settings = self.library.Settings(silent=True, console="off")
        run = (
            self.library.init(name=result.name, job_type=result.command, settings=settings)
            if is_own
            else self.library.run
        )
        try:
            run.config.update({result.command: {**result.options, **result.tags}}, allow_val_change=True)
            run.log(dict(result.numbers))
            if result.files:
                artifact = self.library.Artifact(_clean(result.command), type="report")
                for path in result.files:
                    artifact.add_file(str(path))
                run.log_artifact(artifact)
            return str(run.dir if run.offline else run.url)
        finally:
            if is_own:
                run.finish()


@dataclass(frozen=True)
class TensorBoard:
    """TensorBoard, by torch's writer."""

    writer: Callable[..., Any]
    folder: Path

    @classmethod
    def open(cls, run: Run, place: str) -> TensorBoard:
        """Import the library, and find the folder: the one given, else tensorboard/ in the run folder."""
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        if place:
            return cls(SummaryWriter, Path(place))
        if "ckpt" not in run.arguments:
            raise UsageError(f"\0log_to\0 tensorboard: {run.command} has no run folder; add a folder: tensorboard:DIR")
        given = run.arguments["ckpt"]
        checkpoint = Path(given[0] if isinstance(given, list) else given)
        return cls(SummaryWriter, RunFolder.of(checkpoint, run.run_options.run_dir).root / "tensorboard")

    def log(self, result: LoggedResult) -> str:
        """Write scalars, options and tags as text, and PNG figures."""
        folder = self.folder / _clean(result.name)
        with self.writer(str(folder)) as writer:
            for name, number in result.numbers.items():
                writer.add_scalar(name, number)
            for title, texts in (("options", result.options), ("tags", result.tags)):
                writer.add_text(title, "\n".join(f"- {name}: `{one}`" for name, one in texts.items()))
            for path in result.files:
                if path.suffix == ".png":
                    import numpy as np
                    from PIL import Image

                    writer.add_image(path.stem, np.asarray(Image.open(path).convert("RGB")), dataformats="HWC")
        return str(folder)


_OPENERS: dict[str, Callable[[Run, str], Tracker]] = {
    "mlflow": MLflow.open,
    "wandb": WeightsAndBiases.open,
    "tensorboard": TensorBoard.open,
}


def _require(name: str) -> ModuleType:
    from bnncli.models.libraries import require  # slow to import

    return require(name, extra=name, what=f"\0log_to\0 {name}")


def _in_blocks(items: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    pairs = list(items.items())
    yield from (dict(pairs[start : start + size]) for start in range(0, len(pairs), size))


def _list_options(run: Run, options: Any) -> dict[str, Any]:
    """Return a command's own options and the seed by name, without those that have no value."""
    found: dict[str, Any] = {"seed": run.compute.seed}
    for spec in () if options is None else fields(options):
        value = getattr(options, spec.name)
        found |= value if isinstance(value, Mapping) else {spec.name: value}
    return {name: value for name, value in found.items() if value not in (None, [], "")}


_LONGEST_NAME = 250  # of MLflow
_NO_NUMBERS = {"inputs", "outputs", "seed", "environment", "checks", "exit"}
_TRANSPARENT = {"metrics", "rows", "scores", "groups"}  # keys that say nothing beside the names below them
_NAMES = ("split", "group", "posterior", "variant", "rule", "ood", "score")  # what tells the entries of a list apart


def list_numbers(document: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a result's document by name, such as test/laplace/mc/nll.

    A score is its value, with `_standard_error`, `_low` and `_high` where it has them. Curves, and lists of numbers, are left out.
    """
    found: dict[str, float] = {}
    for parts, number in _walk({key: one for key, one in document.items() if key not in _NO_NUMBERS}, ()):
        name = "/".join(map(_clean, parts))[:_LONGEST_NAME]
        names = (name if tried == 1 else f"{name}-{tried}" for tried in count(1))
        found[next(one for one in names if found.get(one, number) == number)] = number
    return found


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers in a value, each with its path."""
    if isinstance(value, Mapping):
        if "value" in value:
            *above, last = path
            for suffix, one in _parts_of_score(value).items():
                yield from _walk(one, (*above, f"{last}{suffix}"))
            return
        for key, one in value.items():
            yield from _walk(one, path if key in _TRANSPARENT else (*path, key))
    elif isinstance(value, list):
        entries = [one for one in value if isinstance(one, dict)]
        for own, one in zip(_name_entries(entries), entries, strict=True):
            yield from _walk(one, (*path, *own))
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield path, float(value)


def _parts_of_score(score: Mapping[str, Any]) -> dict[str, Any]:
    """Return a score's value, standard error and interval, which is that of the difference if there is one."""
    ends, of = score.get("interval") or score, "_difference" if "difference" in score else ""
    parts = {"": score["value"], "_difference": score.get("difference"), "_standard_error": score.get("standard_error")}
    return parts | {f"{of}_low": ends.get("low"), f"{of}_high": ends.get("high")}


def _name_entries(entries: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the names of a list's entries, which are forms of scores or have a split, posterior and the like."""
    if all("name" in one and "value" in one for one in entries):
        return _name_scores(entries)
    found = []
    for index, one in enumerate(entries):
        names = {key: one[key] for key in _NAMES if isinstance(one.get(key), str)}
        if "posterior" in names and "variant" not in names and isinstance(one.get("integrator"), str):
            names["variant"] = one["integrator"]
        texts = [names[key] for key in _NAMES if key in names]
        found.append(tuple(texts or [str(one.get("name", index))]))
    return found


def _name_scores(scores: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the names of scores: that of the usual form is plain, others have the choices that tell them apart."""
    from bnncli.options.scoring import Quantity
    from bnncli.session.score_rows import find_metric, spell_metrics  # slow to import

    alike: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in scores:
        alike[one.get("ood") or "", one["name"]].append(one)
    names: dict[int, tuple[str, ...]] = {}
    for (ood, name), rows in alike.items():
        usual = find_metric(rows, Quantity(name))
        for row, spelled in zip(rows, spell_metrics(rows), strict=True):
            own = name if len(usual) == 1 and row is usual[0] else spelled
            names[id(row)] = (ood, own) if ood else (own,)
    return [names[id(one)] for one in scores]


def _clean(part: str) -> str:
    """Return a part of a name in letters, digits, dots, dashes and underscores, which all trackers accept."""
    return re.sub(r"[^\w.-]+", "-", part).strip(".") or "-"
