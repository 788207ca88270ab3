"""The subject of a report: the intact artifacts of a checkpoint, their origin, and the most and least certain inputs."""

from __future__ import annotations

import importlib
import io
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bnncli import registry
from bnncli.artifacts.features import read_sample_ids
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import carries_our_mark
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.diagnose import DiagnoseOptions, Judgement, judge
from bnncli.commands.status import StatusOptions
from bnncli.commands.verify import check_artifact
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit, open_stored
from bnncli.errors import DAMAGED_HINT, NOT_OF_CONTENT, BnnError, DataError, MissingInput
from bnncli.evaluation.curves import BinnedConfidence, PredictedRow, bin_confidence
from bnncli.evaluation.detectors import usual_score
from bnncli.evaluation.verdict import POINTS
from bnncli.figures.pages import Block, DataTable, Gallery, Missing, ShownInput, TableCell, commands, paragraph
from bnncli.names import posterior_title, printable, quote_name
from bnncli.options.declaration import spell_options
from bnncli.options.scoring import EvaluateOptions
from bnncli.session.inputs import load_split, require_draws
from bnncli.session.predictions import PredictionGroup, maker_of, open_groups
from bnncli.session.recommendation import RecommendedPredictor, metrics_of, open_recommendation
from bnncli.session.run import Run
from bnncli.session.score_rows import PredictedSplit
from bnncli.system.memory import require

if TYPE_CHECKING:
    from bnncli.commands.report import ReportOptions


_READ = ("train", "val")  # splits that posteriors are judged on; of the others the headers are enough


def check_run(run: Run) -> None:
    """Pass where the run is of the checkpoint that was named, with features that can be read: all else is made from them.

    Raises:
        MissingInput: the checkpoint is gone.
        DataError: the features are damaged, stale, or of another checkpoint; or the checkpoint cannot be read.
        Untrusted: the checkpoint is code.
    """
    names = run.folder.splits()
    for name in names:
        try:
            run.belongs(read_header(run.folder.features(name)))
            if name in _READ:
                load_split(run, name)
        except DataError as error:
            if error.hint in (None, DAMAGED_HINT):
                error.hint = _features_command(run, names)
            raise
    run.heads.clear()


class Damaged(NamedTuple):
    """An artifact that is left out, by its name in the run folder: what is wrong with it, and the command that makes it again, where one is known."""

    path: Path
    name: str
    what: str
    command: str | None


def find_damaged(run: Run, named: list[str]) -> list[Damaged]:
    """Posteriors, predictions, metrics and recommendation that cannot be read to the last byte, with a warning for each.

    Args:
        named: posteriors that were asked for by name.

    Raises:
        DataError: one of these is damaged.
    """
    folder = run.folder
    paths = [*folder.posteriors(), *folder.prediction_files(), *folder.metrics_files()]
    paths += [path for path in (folder.recommended,) if path.is_file()]
    found = []
    for path in paths:
        name = str(path.relative_to(folder.root))
        run.console.poll(f"check {name}")
        try:
            _check(run, path)
        except BnnError as error:
            if error.code == "out_of_memory":  # what would read it says so
                continue
            if isinstance(error, NOT_OF_CONTENT):
                raise
            command = _keep_replaceable(path, _find_command(run, path))
            if path.stem in named and path.parent.name == "posteriors":
                raise DataError(error.message, hint=command or error.hint, code=error.code, path=path) from None
            what = error.message.removeprefix(str(path)).lstrip(": ")
            run.console.warn(f"leaving out {name}: {what}" + (f"; run: {command}" if command else ""))
            found.append(Damaged(path, name, what, command))
    return found


def _check(run: Run, path: Path) -> None:
    """Pass where every byte of an artifact is as it was written."""
    header = read_header(path)
    if header.kind == "samples":
        require_draws(run, header)
    check_artifact(path)


def _keep_replaceable(path: Path, command: str | None) -> str | None:
    """The command; of a file that does not show any more that it is ours, which nothing replaces, once that is moved away."""
    if command is None or carries_our_mark(path):
        return command
    own, away = (shlex.quote(printable(name, keep_bytes=True)) for name in (str(path), f"{path}.damaged"))
    return f"mv {own} {away} && {command}"


def _find_command(run: Run, path: Path) -> str | None:
    """The command that makes a damaged artifact again, in its place: its own, or, where it does not say, the usual one of its name."""
    kind, name = path.parent.name, path.stem
    beside = sorted(path.parent.glob("[!.]*.h5"), key=lambda one: one != path) if path.suffix == ".h5" else [path]
    headers = (try_find(partial(read_header, one)) for one in beside)  # the splits of predictions come from one command
    header = next((one for one in headers if isinstance(one, Header)), None)
    if header is not None:
        return run.remake(header, force=True)
    if path == run.folder.recommended:
        return run.suggest("auto", force=True)
    if kind == "metrics":
        return run.suggest("evaluate", force=True)
    if kind == "posteriors":
        maker = maker_of(run, name)
        return _features_command(run, run.folder.splits()) if name == "map" else maker and f"{maker} --force"
    posterior, _, variant = kind.partition(".")
    integrators = [one for one in registry.names("integrators") if f"{variant}-".startswith(f"{one}-")]
    if not integrators or posterior not in {one.stem for one in run.folder.posteriors()}:
        return None
    return run.suggest("predict", posterior=posterior, integrator=max(integrators, key=len), force=True)


def _features_command(run: Run, names: list[str]) -> str:
    """Return the command that recomputes the features, from the header of any split that has one."""
    headers = (try_find(partial(read_header, run.folder.features(name))) for name in names)
    made = (run.remake(header, force=True) for header in headers if isinstance(header, Header))
    usual = run.suggest("extract-features", model="MODEL", data=["train=SPEC", "test=SPEC"], force=True)
    return next((command for command in made if command is not None), usual)


MOST_DRAWN = 8  # posteriors in one figure: more could not be told apart
_ROW_BYTES = 64  # of memory for each example of a prediction file


@dataclass(frozen=True)
class Subject:
    """One checkpoint's run, as its report sees it.

    Args:
        key: what the names of its sections and figures begin with; empty where there is one checkpoint.
        damaged: artifacts that are left out.
    """

    run: Run
    options: ReportOptions
    key: str = ""
    damaged: Sequence[Damaged] = ()
    _binned: dict[tuple[str, str], BinnedConfidence] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The checkpoint, as its file is called."""
        return self.run.checkpoint_path.name

    @cached_property
    def left_out(self) -> frozenset[Path]:
        """Files that nothing is read from, as they are damaged."""
        return frozenset(one.path for one in self.damaged)

    @property
    def of(self) -> str:
        """Return what tells tables from those of other checkpoints on one page."""
        return f" of {self.name}" if self.key else ""

    def check_named(self) -> None:
        """Pass where there are a posterior, or predictions, of every name that was given, and a split. Raises MissingInput otherwise."""
        _ = self.split
        for name in self.options.posterior:
            if name not in self._predicted:
                otherwise = self.run.suggest("status")
                self.run.folder.find_posterior(name, flag="\0posterior\0", maker=otherwise)

    @cached_property
    def headers(self) -> dict[str, Header]:
        """Return headers of the requested posteriors, by name; omits those that cannot be read."""
        named, found = {name.partition(".")[0] for name in self.options.posterior}, {}
        for path in self.run.folder.posteriors():
            if path in self.left_out:
                continue
            header = try_find(partial(read_header, path))
            if isinstance(header, Header) and (not named or path.stem in named):
                found[path.stem] = header
        return found

    @cached_property
    def groups(self) -> list[PredictionGroup] | Missing:
        """Fresh predictions of the split, or why there are none."""
        posteriors = [name for name in self.options.posterior if name in self._predicted]
        if self.options.posterior and not posteriors:
            names = ", ".join(self.options.posterior)
            maker = self.run.suggest("predict", posterior=self.options.posterior)
            return Missing(f"There are no predictions by {names}.", maker)
        found = try_find(lambda: open_groups(self.run, posteriors=posteriors, leave_out=self.left_out))
        if isinstance(found, Missing):
            return found
        kept = [group for group in found if self.split in group.splits(is_ood=False)]
        if not kept:
            return Missing(
                f"There are no predictions for split {self.split}.", self.run.suggest("predict", split=self.split)
            )
        return kept

    @cached_property
    def split(self) -> str:
        """The in-distribution split that is shown. Raises MissingInput where it was named and there are no predictions of it."""
        there = sorted({path.stem for path in self.run.folder.prediction_files()})
        inside = [name for name in there if not self._is_ood(name)]
        wanted = self.options.split
        if wanted is not None and wanted not in inside:
            raise MissingInput(
                f"\0split\0: no predictions for an in-distribution split {wanted!r} (have: "
                f"{', '.join(inside) or 'none'})",
                hint=self.run.suggest("predict", split=wanted),
            )
        return wanted or ("test" if "test" in inside or not inside else inside[0])

    @cached_property
    def titles(self) -> dict[str, str]:
        """Return the name of each group of predictions in figures: the posterior, and the integrator if it has several."""
        assert not isinstance(self.groups, Missing)
        times = Counter(group.posterior for group in self.groups)
        plain = {group.name: posterior_title(group.posterior, group.variant, group.name) for group in self.groups}
        shown = {
            group.name: f"{group.posterior} ({group.variant})"
            if times[group.posterior] > 1 and plain[group.name] == group.posterior
            else plain[group.name]
            for group in self.groups
        }
        return shown

    @cached_property
    def drawn(self) -> list[PredictionGroup]:
        """The groups that figures show, at most MOST_DRAWN."""
        return [] if isinstance(self.groups, Missing) else self.groups[:MOST_DRAWN]

    @property
    def outside(self) -> list[str]:
        """Names of the out-of-distribution splits."""
        return list(dict.fromkeys(name for group in self.drawn for name in group.splits(is_ood=True)))

    @cached_property
    def judgement(self) -> Judgement | Missing:
        """Return what diagnose finds, or why it cannot."""
        named = list(self.headers) if self.options.posterior else []
        if self.options.posterior and not named:
            return Missing(
                f"There is no posterior {', '.join(self.options.posterior)}.", self.run.suggest("fit-laplace")
            )
        options = DiagnoseOptions(posterior=named, trust_code=self.options.trust_code)
        return try_find(lambda: judge(replace(self.run, heads={}), options, leave_out=self.left_out))

    @cached_property
    def recommended(self) -> RecommendedPredictor | None:
        """Return the predictor that auto recommends, else the one by the same rule; None if that is unknown."""
        if not isinstance(self.judgement, Missing):
            return self.judgement.recommended
        if self.run.folder.recommended in self.left_out:
            return None
        found = try_find(lambda: open_recommendation(self.run))
        return None if isinstance(found, Missing) else found

    @cached_property
    def rows(self) -> list[dict[str, Any]] | Missing:
        """Return a row of scores for each group, in the order of the groups."""
        found = try_find(lambda: metrics_of(self.run, posterior=None, split=self.split))
        if isinstance(found, Missing) or isinstance(self.groups, Missing):
            return found
        order = [group.name for group in self.groups]
        kept = [row for row in found if row.get("name") in order]
        rest = [row for row in found if row.get("posterior") == "features" and not self.options.posterior]
        if not kept:
            return Missing("The predictions were not scored.", self.run.suggest("evaluate"))
        return sorted(kept, key=lambda row: order.index(row["name"])) + rest

    @cached_property
    def focus(self) -> PredictionGroup | None:
        """The predictions that the words are about: of the posterior to predict with, as the verdict has it, else the first."""
        if isinstance(self.groups, Missing):
            return None
        use = None if isinstance(self.judgement, Missing) else self.judgement.verdict.use
        if self.recommended is not None:
            name = f"{self.recommended.posterior}.{self.recommended.integrator}"
            found = next((group for group in self.groups if group.name == name), None)
            if found is not None:
                return found
        for wanted in (None if self.recommended is None else self.recommended.posterior, use):
            found = next((group for group in self.groups if group.posterior == wanted), None)
            if found is not None:
                return found
        return next((g for g in self.groups if not self._is_point(g)), self.groups[0])

    def binned(self, group: PredictionGroup, split: str) -> BinnedConfidence:
        """The confidence of a group's predictions of a split; read once."""
        if (group.name, split) not in self._binned:
            header = next(header for header in group.headers if header.meta["split"] == split)
            needed = _ROW_BYTES * int(header.meta["num_examples"])
            require(needed, "cpu", what=f"predictions {header.path}", hint="report on another split, or fewer rows")
            self.run.console.poll(f"read {group.name} {split}")
            file = PredictedSplit(header).file
            self._binned[group.name, split] = bin_confidence(
                file.probs,
                file.labels,
                is_exclusive=file.is_exclusive,
                num_extremes=self.options.examples,
                poll=self.run.console.poll,
            )
        return self._binned[group.name, split]

    def row_of(self, group: PredictionGroup) -> dict[str, Any] | None:
        """The scores of a group on the split; None where it is not scored."""
        rows = [] if isinstance(self.rows, Missing) else self.rows
        return next((row for row in rows if row.get("name") == group.name), None)

    @property
    def shown(self) -> EvaluateOptions:
        """As what evaluate shows its scores here."""
        rows = [] if isinstance(self.rows, Missing) else self.rows
        known = {m.get("score") for row in rows for m in row["metrics"] if m["value"] is not None and "ood" in m}
        return EvaluateOptions(intervals=True, score=[usual_score(known)])

    @cached_property
    def _predicted(self) -> set[str]:
        """Names of posteriors, and of groups, that there are predictions of."""
        folders = {path.parent.name for path in self.run.folder.prediction_files()}
        return folders | {name.partition(".")[0] for name in folders}

    def _is_ood(self, split: str) -> bool:
        header = try_find(lambda: read_header(self.run.folder.features(split)))
        if isinstance(header, Missing):  # the features are gone
            paths = [path for path in self.run.folder.prediction_files() if path.stem == split]
            header = try_find(lambda: read_header(paths[0]))
        return isinstance(header, Header) and bool(header.meta.get("is_ood"))

    def _is_point(self, group: PredictionGroup) -> bool:
        header = self.headers.get(group.posterior)
        return header is not None and header.meta.get("type") in POINTS


def check_is_something_left(subject: Subject) -> None:
    """Pass unless artifacts are damaged and neither posteriors nor predictions are left to show. Raises DataError then."""
    if subject.damaged and isinstance(subject.judgement, Missing) and isinstance(subject.groups, Missing):
        first = subject.damaged[0]
        raise DataError(
            f"{subject.run.folder.root} has nothing left to report on: {first.name}: {first.what}",
            code="damaged",
            hint=first.command,
            path=first.path,
        )


_MOST_ROWS = 120
_KINDS = {"features": 0, "posterior": 1, "samples": 1, "predictions": 2, "metrics": 3}


def origins(subject: Subject) -> list[Block]:
    """The section."""
    run = subject.run
    found = try_find(lambda: importlib.import_module("bnncli.commands.status").execute(run, StatusOptions()))
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
    network = try_find(partial(describe_network, subject))
    blocks: list[Block] = [
        network
        if isinstance(network, Missing)
        else paragraph(f"{network} These commands, in this order, produce what this report shows.".lstrip()),
        commands(list(dict.fromkeys(lines))),
        first,
        table,
    ]
    warnings = _collect_warnings(subject)
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


def _row(entry: dict[str, Any]) -> list[TableCell]:
    header = try_find(partial(read_header, Path(entry["path"])))
    inputs = [one["role"] for one in header.inputs] if isinstance(header, Header) else []
    digest = _shorten_digest(str(entry["content_digest"] or "–"))
    return [TableCell(entry["name"]), TableCell(", ".join(inputs) or "–"), TableCell(entry["state"]), TableCell(digest)]


_CODE = "py:"  # data that are read by the user's code
_MOST_OUTSIDE = 2  # splits out of distribution
_MOST_GALLERIES = 3 + _MOST_OUTSIDE
_IMAGE_BYTES = 150_000  # of all pictures together, of a page that has at most a megabyte


class _Look:
    """Examples of one split, as stored, with their captions."""

    def __init__(self, subject: Subject, group: PredictionGroup, split: str) -> None:
        header = next(header for header in group.headers if header.meta["split"] == split)
        self.classes = read_predictions(header.path).classes
        self.most_bytes = _IMAGE_BYTES // (_MOST_GALLERIES * subject.options.examples)
        self.stored = try_find(partial(_open, subject, split))

    def gallery(self, title: str, rows: Sequence[PredictedRow]) -> list[Block]:
        """The examples with a title; nothing where there are none."""
        return [Gallery(title, [self._example(one) for one in rows])] if rows else []

    def _example(self, one: PredictedRow) -> ShownInput:
        predicted = class_name(list(self.classes), one.predicted)
        label = None if one.label is None else class_name(list(self.classes), one.label)
        what = "right" if one.label == one.predicted else f"in truth {label}" if label is not None else "no label"
        item, name = (None, None) if isinstance(self.stored, Missing) else self.stored.item(one.row)
        place = f"row {one.row}" + (f", {quote_name(name, limit=60)}" if name else "")
        said = f"{predicted}, {one.confidence:.4f} ({what}); {place}"
        png, text = encode_png(item, most_bytes=self.most_bytes), shorten_text(item)
        kind = "Image" if png is not None else "Text" if text is not None else "Input"
        truth = f" of {label}" if label is not None else ""
        return ShownInput(
            said, f"{kind}{truth}, predicted {predicted} with probability {one.confidence:.4f}", png, text
        )


class _StoredSplit:
    """A split's data, opened again and known to be those that were predicted."""

    def __init__(self, split: InputSplit) -> None:
        self.split = split

    def item(self, row: int) -> tuple[Any, str | None]:
        """An example by its place in the split, as stored, and its name."""
        one = self.split.take(np.array([row]))
        stored: Any = one.dataset.read(one.rows)[0]
        names = one.names
        return (None if isinstance(stored, dict) else stored[0]), (None if names is None else names[0])


def inputs(subject: Subject) -> list[Block]:
    """The section."""
    group = subject.focus
    if group is None:
        assert isinstance(subject.groups, Missing)
        return [subject.groups]
    if subject.options.examples == 0:
        return [Missing("No inputs are shown (--examples 0).")]
    inside, found = subject.binned(group, subject.split), _Look(subject, group, subject.split)
    looks = {ood: _Look(subject, group, ood) for ood in list(group.splits(is_ood=True))[:_MOST_OUTSIDE]}
    blocks: list[Block] = [
        paragraph(
            f"Each input is shown with the class that {subject.titles[group.name]} predicts, and its probability."
        )
    ]
    blocks += dict.fromkeys(look.stored for look in (found, *looks.values()) if isinstance(look.stored, Missing))
    blocks += [
        paragraph(
            f"Inputs of {split} are what its code returns now. They may differ from those that were predicted.",
            kind="note",
        )
        for split, look in {subject.split: found, **looks}.items()
        if isinstance(look.stored, _StoredSplit) and look.stored.split.spec.startswith(_CODE)
    ]
    blocks += found.gallery(f"Least certain of {subject.split}", inside.least_certain)
    blocks += found.gallery(f"Most certain of {subject.split}", inside.most_certain)
    blocks += found.gallery(f"Most confident errors on {subject.split}", inside.most_certain_errors)
    for ood, look in looks.items():
        blocks += look.gallery(f"Most certain of {ood}, out of distribution", subject.binned(group, ood).most_certain)
    return blocks


def _open(subject: Subject, split: str) -> _StoredSplit:
    """The data of a split.

    Raises:
        DataError: it cannot be opened by what its features record, or has changed since.
        MissingInput: it is no longer where it was.
    """
    path = subject.run.folder.features(split)
    header = read_header(path)
    with convert_lookup_errors(path):
        spec = header.provenance.get("source")
    if not isinstance(spec, str) or "model" not in header.provenance["params"]:
        raise DataError(f"the inputs of {split} are unknown: its features were given as arrays")
    if spec.startswith(_CODE) and not subject.options.trust_code:
        raise DataError(
            f"the inputs of {split} are read by code, which is not executed",
            hint="add \0trust_code\0 if the code is yours",
        )
    dataset, rows = open_stored(spec), read_sample_ids(path)
    return _StoredSplit(_open_predicted_split(header, spec, dataset, rows))


_MODES = ("L", "RGB")


def _open_predicted_split(header: Header, spec: str, dataset: Any, rows: np.ndarray) -> InputSplit:
    """The split of these rows. Raises DataError unless its content is what the features were made of."""
    if len(rows) and int(rows.max()) >= len(dataset):
        raise DataError(f"{spec} has changed since the features were extracted: it has {len(dataset)} rows now")
    others = [replace(dataset, mode=mode) for mode in _MODES] if hasattr(dataset, "mode") else []
    for one in (dataset, *others):
        split = InputSplit(spec, one, rows, Preprocess(), one.is_labeled and not header.meta.get("is_ood"))
        if split.order_digest == header.meta.get("order_digest"):
            return split
    raise DataError(f"{spec} has changed since the features were extracted, and is not shown")


_SIDES = (64, 48, 32, 24)  # the most pixels along a side, until the file is small enough
_WIDE = ("I", "F")  # modes of more than 8 bits, which PIL cuts at 255 where arrays are scaled


def encode_png(item: Any, *, most_bytes: int = 1 << 14) -> bytes | None:
    """A small PNG of an image: an array (H, W), (H, W, C) or (C, H, W) of one or three channels, or a PIL image; None of what is none.

    Args:
        most_bytes: of the file, where that can be had by fewer pixels.
    """
    if isinstance(item, Image.Image) and item.mode.startswith(_WIDE):
        item = np.asarray(item)
    image = item if isinstance(item, Image.Image) else _convert_image(np.asarray(item)) if _is_array(item) else None
    if image is None:
        return None
    image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    found = b""
    for side in _SIDES:
        if max(image.size) > side:
            image.thumbnail((side, side))
        content = io.BytesIO()
        image.save(content, "PNG", optimize=True)
        found = content.getvalue()
        if len(found) <= most_bytes:
            break
    return found


def _is_array(item: Any) -> bool:
    return isinstance(item, np.ndarray) or hasattr(item, "__array__")


def _convert_image(array: NDArray[Any]) -> Image.Image | None:
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if not is_image or min(array.shape[:2]) < 2 or not np.issubdtype(array.dtype, np.number):
        return None
    if array.dtype != np.uint8:
        values = np.nan_to_num(array.astype(np.float64))
        low, high = float(values.min()), float(values.max())
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
        array = np.round(255 * (values - low) / ((high - low) or 1.0)).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))


_MOST_LETTERS = 300


def shorten_text(item: Any) -> str | None:
    """The beginning of a text, or of a pair of them, on one line; None of what is none."""
    parts = [item] if isinstance(item, str) else item if isinstance(item, tuple | list) else []
    if not parts or not all(isinstance(part, str) for part in parts):
        return None
    text = " / ".join(" ".join(part.split()) for part in parts)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def describe_network(subject: Subject) -> str:
    """Describe the network of the run in a sentence; "" if no features can be read."""
    headers = [
        try_find(partial(read_header, subject.run.folder.features(name))) for name in subject.run.folder.splits()
    ]
    header = next((one for one in headers if isinstance(one, Header)), None)
    if header is None:
        return ""
    with convert_lookup_errors(header.path):
        record, params = header.provenance.get("checkpoint"), header.provenance.get("params", {})
        model = f"the model {params['model']}" if params.get("model") else "ready features"
        digest = "" if record is None else f" (weights {_shorten_digest(str(record['weights_digest']))})"
        size = int(header.meta["num_features"])
    return f"Checkpoint {subject.name}{digest}, {model}, {size} features per example."


Found = TypeVar("Found")


def try_find(find: Callable[[], Found]) -> Found | Missing:
    """Return what is found, or the error of a damaged artifact as something missing.

    Raises:
        BnnError: what is no fault of the artifacts: a device, a disk, an interrupt. Of what has no room in memory the rest can be shown.
    """
    try:
        return find()
    except BnnError as error:
        if isinstance(error, NOT_OF_CONTENT) and error.code != "out_of_memory":
            raise
        return describe_error(error)


_OPTION = re.compile(r"^--[a-z][a-z-]*: ")  # that an error begins with, which is another command's


def describe_error(error: BnnError) -> Missing:
    """An error as a sentence, and the command that helps, where the hint is one."""
    message, hint = _OPTION.sub("", spell_options(error.message)), spell_options(error.hint) if error.hint else None
    is_word = message.split(" ", 1)[0].isalpha()  # and no file's name
    sentence = (f"{message[:1].upper()}{message[1:]}" if is_word else message).rstrip(".")
    is_command = hint is not None and hint.startswith("bnncli ")
    return Missing(f"{sentence}." if is_command or not hint else f"{sentence}; {hint}.", hint if is_command else None)


_SHORT = 16  # digits of a digest that are shown: enough to tell any two apart


def _shorten_digest(digest: str) -> str:
    """The first digits of a digest, without the name of its kind."""
    return digest.rpartition(":")[2][:_SHORT]


def _collect_warnings(subject: Subject) -> list[tuple[str, str]]:
    """Warnings that posteriors carry, by name, each text once."""
    found: dict[str, str] = {}
    for name, header in subject.headers.items():
        for text in header.provenance.get("warnings", [])[:5]:
            found.setdefault(str(text), name)
    return [(name, text) for text, name in found.items()][:20]


def parameter_name(meta: dict[str, Any], index: int) -> str:
    """The parameter at a place of theta, by the header of its posterior: of a head with its class and feature.

    Args:
        meta: of the posterior, with its `param_layout`, and `classes`.
    """
    for part in meta.get("param_layout", []):
        size = int(np.prod(part["shape"]))
        if part["offset"] <= index < part["offset"] + size:
            place = [int(one) for one in np.unravel_index(index - part["offset"], part["shape"])]
            classes = meta.get("classes") or []
            own = _name_head_parameter(str(part["name"]), place, classes) if part["shape"][0] == len(classes) else None
            return own or printable(f"{part['name']}{place}")
    return f"parameter {index}"


def _name_head_parameter(name: str, place: list[int], classes: list[Any]) -> str | None:
    if name not in ("head.weight", "head.bias"):
        return None
    shown = class_name(classes, place[0])
    return f"{shown}: bias" if name == "head.bias" else f"{shown}: weight of feature {place[1]}"


_LONGEST = 24  # letters of a class's name


def class_name(classes: list[Any], index: int) -> str:
    """The name of a class, cut, on one line; a number says what it is."""
    name = printable(str(classes[index])) if 0 <= index < len(classes) else str(index)
    if name.isdecimal():
        return f"class {name}"
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
