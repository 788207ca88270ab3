"""What a report is about: the artifacts of one checkpoint, each looked at once, or a sentence that says what is not there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.errors import NOT_OF_CONTENT, BnnError, MissingInput
from bnncli.evaluation.binned_confidence import BinnedConfidence, bin_confidence
from bnncli.evaluation.detectors import usual_score
from bnncli.evaluation.verdict import POINTS
from bnncli.figures.pages import Missing
from bnncli.names import posterior_title
from bnncli.options.declaration import spelled
from bnncli.options.diagnose import DiagnoseOptions
from bnncli.options.report import ReportOptions
from bnncli.options.scoring import EvaluateOptions
from bnncli.session.predictions import PredictionGroup, open_groups
from bnncli.session.recommendation import Recommended, metrics_of, recommended
from bnncli.session.run import Run
from bnncli.session.score_rows import PredictedSplit
from bnncli.stages.diagnose.judgement import Judgement, judge
from bnncli.system.memory import require

MOST_DRAWN = 8  # posteriors in one figure: more could not be told apart
_OPTION = re.compile(r"^--[a-z][a-z-]*: ")  # that an error begins with, which is another command's
_ROW_BYTES = 64  # of memory for each example of a prediction file
Found = TypeVar("Found")


class Damaged(NamedTuple):
    """An artifact that is left out, by its name in the run folder: what is wrong with it, and the command that makes it again, where one is known."""

    path: Path
    name: str
    what: str
    command: str | None


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
        """What tells tables from those of other checkpoints on one page."""
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
        """Of the posteriors that were asked for, by name; those that cannot be read are left out."""
        named, found = {name.partition(".")[0] for name in self.options.posterior}, {}
        for path in self.run.folder.posteriors():
            if path in self.left_out:
                continue
            header = tried(partial(read_header, path))
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
        found = tried(lambda: open_groups(self.run, posteriors=posteriors, leave_out=self.left_out))
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
        """What figures call each group of predictions: the posterior, and the integrator where it has several."""
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
        """What diagnose finds, or why it cannot."""
        named = list(self.headers) if self.options.posterior else []
        if self.options.posterior and not named:
            return Missing(
                f"There is no posterior {', '.join(self.options.posterior)}.", self.run.suggest("fit-laplace")
            )
        options = DiagnoseOptions(posterior=named, trust_code=self.options.trust_code)
        return tried(lambda: judge(replace(self.run, heads={}), options, leave_out=self.left_out))

    @cached_property
    def recommended(self) -> Recommended | None:
        """What to predict with, as diagnose has it: what auto recommends, else by the same rule; None where that is unknown."""
        if not isinstance(self.judgement, Missing):
            return self.judgement.recommended
        if self.run.folder.recommended in self.left_out:
            return None
        found = tried(lambda: recommended(self.run))
        return None if isinstance(found, Missing) else found

    @cached_property
    def rows(self) -> list[dict[str, Any]] | Missing:
        """What evaluate knows of the split, a row for each group, in the order of the groups."""
        found = tried(lambda: metrics_of(self.run, posterior=None, split=self.split))
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
        header = tried(lambda: read_header(self.run.folder.features(split)))
        if isinstance(header, Missing):  # the features are gone
            paths = [path for path in self.run.folder.prediction_files() if path.stem == split]
            header = tried(lambda: read_header(paths[0]))
        return isinstance(header, Header) and bool(header.meta.get("is_ood"))

    def _is_point(self, group: PredictionGroup) -> bool:
        header = self.headers.get(group.posterior)
        return header is not None and header.meta.get("type") in POINTS


def tried(find: Callable[[], Found]) -> Found | Missing:
    """What is found, or as something missing what is wrong with the artifacts that it is found in.

    Raises:
        BnnError: what is no fault of the artifacts: a device, a disk, an interrupt. Of what has no room in memory the rest can be shown.
    """
    try:
        return find()
    except BnnError as error:
        if isinstance(error, NOT_OF_CONTENT) and error.code != "out_of_memory":
            raise
        return missing(error)


def missing(error: BnnError) -> Missing:
    """An error as a sentence, and the command that helps, where the hint is one."""
    message, hint = _OPTION.sub("", spelled(error.message)), spelled(error.hint) if error.hint else None
    is_word = message.split(" ", 1)[0].isalpha()  # and no file's name
    sentence = (f"{message[:1].upper()}{message[1:]}" if is_word else message).rstrip(".")
    is_command = hint is not None and hint.startswith("bnncli ")
    return Missing(f"{sentence}." if is_command or not hint else f"{sentence}; {hint}.", hint if is_command else None)
