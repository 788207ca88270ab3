"""auto: from features, or a checkpoint and data, to a recommended posterior in one command.

The steps are temperature, calibration map, ensemble, stack, laplace and refine. Each runs a command as a user would type it; the val split decides which posterior
and integrator to recommend."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from bnncli.artifacts.files import read_header, write_metrics
from bnncli.artifacts.freshness import REPLACE
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.resume import state_path
from bnncli.commands.diagnose import DiagnoseOptions
from bnncli.commands.fit_calibration import FitCalibrationOptions
from bnncli.commands.fit_ensemble import TEMPERATURE, FitEnsembleOptions, open_member, read_theta
from bnncli.commands.fit_laplace import FitLaplaceOptions
from bnncli.commands.fit_temperature import FitTemperatureOptions
from bnncli.commands.hmc import HmcOptions
from bnncli.commands.refine import RefineOptions
from bnncli.commands.report import ReportOptions
from bnncli.commands.stack import FEWEST_ROWS, StackOptions, estimate_seconds
from bnncli.errors import (
    BnnError,
    CheckFailed,
    DataError,
    DeviceError,
    Interrupted,
    MissingInput,
    NumericError,
    OutputExists,
    Untrusted,
    UsageError,
)
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.decisions import fit_outliers, min_scores_for_rate
from bnncli.evaluation.detection import detection_rows
from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.evaluation.recommendation import (
    FALSE_ALARM,
    LEVEL,
    PLAIN,
    WORSE_SHARE,
    DetectionResult,
    Predictive,
    Quality,
    ScoredPredictive,
    detection_sentence,
    independent_values,
    recommend,
    recommendation_sentence,
    score_predictive,
)
from bnncli.evaluation.scores import detection_forms
from bnncli.integrators import supports
from bnncli.lazy import no_grad, torch
from bnncli.names import percent
from bnncli.options import shared
from bnncli.options.command import COMPUTE, Command, CommandLine, InputOptions, NameOptions, accept_poor_network_option
from bnncli.options.declaration import CheckedOptions, option, parse_positive
from bnncli.options.predict import PredictOptions
from bnncli.options.scoring import EvaluateOptions
from bnncli.options.shared import INHERIT, trust_code_option
from bnncli.parameters.module import STATE
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split, posterior_source
from bnncli.session.network_fit import check_network_fits
from bnncli.session.network_splits import NetworkReader
from bnncli.session.predictor import Predictor, TrainData
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.recommendation import SplitProbabilities, parse_qualities, qualities, read_last_judgements
from bnncli.session.run import Result, Run, Table, run_command
from bnncli.session.val_report import (
    gain_table,
    has_labeled_val,
    predict_split_probs,
    predictive_on_val,
    temperature_on_val,
)
from bnncli.system import signals
from bnncli.system.signals import BudgetSpent

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.commands.extract_features import ExtractFeaturesOptions


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class AutoOptions(CheckedOptions):
    """Options of auto."""

    budget: str | None = option(
        None,
        "Time limit, such as 90s, 5m or 1h. Fits that would exceed it are skipped; the next auto resumes them "
        "where it can.",
        metavar="TIME",
    )
    prior_precision: str = option("auto", "Prior precision, as in fit-laplace.", metavar="NUMBER|val|marglik|auto")
    criterion: str = option(
        "nll-keep-accuracy",
        "What a recommended posterior must improve: the val NLL without a significant loss of accuracy, or just "
        "the NLL.",
        choices=("nll-keep-accuracy", "nll"),
    )
    full: bool = option(False, "Try all methods, even when a simpler posterior already fits well.")
    report: bool = option(
        False, "Also predict with the recommended posterior, evaluate, and write report.html.", numeric=False
    )
    model: str | None = option(
        None, "Extract features first, with this network, as in extract-features.", metavar="MODEL", group="Network"
    )
    from_npz: str | None = option(
        None,
        "Extract features first, from arrays of your own, as in extract-features.",
        metavar="FILE",
        group="Features",
    )
    model_arg: list[str] = shared.model_arg()
    data: list[str] = shared.data()
    ood: list[str] = option(
        [], "Out-of-distribution split, as in extract-features.", metavar="SPLIT=SPEC", group="Data"
    )
    hold_out: list[str] = shared.hold_out()
    mean: str | None = shared.mean()
    std: str | None = shared.std()
    resize: int | None = shared.resize()
    crop: int | None = shared.crop()
    accept_poor_network: bool = accept_poor_network_option()
    trust_code: bool = trust_code_option(is_recorded=False, also=" and for an ensemble")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.budget_seconds, self.extraction
        if self.prior_precision not in ("auto", "val", "marglik"):
            parse_positive(self.prior_precision, "\0prior_precision\0", "auto, val, marglik or a positive number")

    @property
    def extraction(self) -> ExtractFeaturesOptions | None:
        """Return the options of extract-features; None without a network or arrays. Raises UsageError as its own do."""
        from bnncli.commands.extract_features import ExtractFeaturesOptions  # whose imports the help need not wait for

        given = {name: getattr(self, name) for name in _EXTRACTION if getattr(self, name)}
        if given and self.model is None and self.from_npz is None:
            raise UsageError(f"\0{next(iter(given))}\0 needs \0model\0 or \0from_npz\0")
        return ExtractFeaturesOptions(**given) if given else None

    @property
    def budget_seconds(self) -> float | None:
        """Return the budget in seconds; None without a limit."""
        if self.budget is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", self.budget)
        if found is None or float(found[1]) == 0:
            raise UsageError(f"\0budget\0: expected a time such as 90s, 5m or 1h; got {self.budget!r}")
        return float(found[1]) * _SECONDS[found[2]]


# options that are those of extract-features
_EXTRACTION = ("model", "from_npz", "model_arg", "data", "ood", "hold_out", "mean", "std", "resize", "crop")
_NUMBER = re.compile(r"(\d+)")
_TIME = re.compile(
    r"(epoch|step|iter|iteration)s?[^a-z]*$", re.IGNORECASE
)  # words before a number that counts training progress
_SAME_SIZE = 0.01  # relative difference in size, since names of keys and dates differ
_MOST_SIBLINGS = 9
_FOR_FITS = 0.95  # of the budget; the rest is for finishing, judging and writing

COMMAND = Command(
    "Try methods from cheap to costly and recommend one.",
    "Fits a temperature, a calibration map, an ensemble (of sibling checkpoints), a stack of last layers and a Gaussian, then a "
    "flow and hmc if the simpler posterior does not fit well. Compares all of them on val, and recommends the "
    "simplest one that significantly lowers the NLL without losing accuracy, else a stack that lowers it, else "
    "the network. Writes recommended.json, which predict uses by default. With --model and --data, extracts the "
    "features first.",
    (AutoOptions, InputOptions, *COMPUTE),
    (
        "bnncli auto ckpt.pt",
        "bnncli auto ckpt.pt --budget 5m",
        "bnncli auto ckpt.pt --model net.py:make --data train=npz:train.npz --data test=npz:test.npz --hold-out val=test:2000 --report",
    ),
    section="Start",
    place=50,
)


ENSEMBLE = "fit-ensemble"


def execute(run: Run, options: AutoOptions) -> Result:
    """Fit, judge and recommend. The fitted posteriors stay in the run."""
    if run.write.dry_run:
        raise UsageError(
            "auto has no --dry-run, because each step depends on earlier results; use --dry-run with "
            "fit-laplace, refine or hmc"
        )
    if options.extraction is not None:
        run_command(run, "extract-features", run.arguments["ckpt"], options.extraction)
    train = load_split(run, "train").check_labeled()
    if not has_labeled_val(run):
        raise MissingInput(
            f"{run.checkpoint_path} has no labelled val split; the recommendation needs data that the network "
            "was not trained on",
            hint="extract again with a val split, such as --hold-out val=test:2000, with --force",
            path=run.folder.features("val"),
        )
    val = load_split(run, "val")
    check_network_fits(run, ("train", "val"), is_accepted=options.accept_poor_network)
    run.require_device()

    seconds, outside = options.budget_seconds, open_outside_splits(run)
    has_network = train.content.head_weight is not None
    siblings = find_siblings(run.checkpoint_path) if has_network and train.checkpoint is not None else []
    scores = Scores(run, val, trust_code=options.trust_code)
    if seconds is not None:  # what comes after the ladder is done before it, and counts
        scores.detect(outside)
    ladder = Ladder(
        run,
        options,
        {} if run.write.force else read_last_judgements(run),
        score=lambda rung: None if seconds is None else scores.add(rung),
        deadline=None if seconds is None else run.started + _FOR_FITS * seconds,
    )
    rungs = ladder.climb(
        train,
        val,
        has_network=has_network,
        siblings=siblings,
        has_folds=len(val.stored) >= FEWEST_ROWS,
    )
    sources = [one.source for one in (val, *outside)] + [rung.source for rung in rungs if rung.source is not None]
    request = Request(
        run.folder.recommended,
        "metrics",
        "recommended",
        {"seed": run.compute.seed, "prior_precision": options.prior_precision, "criterion": options.criterion},
        _revisions.AUTO,
        sources,
        train.checkpoint,
        lambda: 1 << 16,
        why_anew=lambda recorded: "other options or fitted posteriors",
    )
    keep_accuracy = options.criterion != "nll"
    result = produce(
        run,
        request,
        lambda: compute(request, rungs, scores, outside, keep_accuracy=keep_accuracy),
        when_fresh=read_recommendation,
    )
    rows = result.metrics.pop("rows")
    result.extra |= {"rungs": [rung.to_json() for rung in rungs], "rows": rows, **result.metrics}
    names = {rung.posterior for rung in rungs if rung.source is not None}
    others = [path.stem for path in run.folder.posteriors() if path.stem not in names]
    headers = {rung.posterior: read_header(rung.source.path) for rung in rungs if rung.source is not None}
    tables = _table(rungs, rows, val.content.labels, result.metrics["about"][1] or None), *gain_table(headers)
    result.tables = [*tables, *_build_qualities_table(result.metrics)]
    gaussian = next((rung.posterior for rung in rungs if rung.name == "fit-laplace"), "")
    result.lines = [
        *(f"{rung.name}: {rung.note}" for rung in rungs if rung.note),
        str(result.metrics["sentence"]),
        *_describe_averaging(gaussian, headers.get(gaussian)),
        str(result.metrics["outside"]),
    ]
    took = ", ".join(f"{rung.name} {rung.seconds:.1f} s" for rung in rungs if rung.seconds)
    result.extra["siblings"] = [str(path) for path in siblings]
    result.summary = [f"took: {took}"]
    if others:
        result.summary.append(f"not considered: {', '.join(others)} (compare shows all posteriors)")
    chosen = next((row for row in rows if row["is_recommended"]), None)
    few = {"stack": "too few members for", "ensemble": "too few members for", "calibrated": "no"}
    lacks = None if chosen is None else few.get(str(headers[chosen["posterior"]].meta.get("type")))
    if chosen is not None and lacks is not None and gaussian in headers:
        line = run.suggest("predict", posterior=gaussian)
        result.summary.append(f"{chosen['posterior']} has {lacks} 95% intervals; for these: {line}")
    ensemble = next((rung.posterior for rung in rungs if rung.name == ENSEMBLE and rung.source is not None), None)
    if ensemble is not None and chosen is not None and chosen["posterior"] == ensemble:
        result.summary.append(_describe_ensemble_cost(run, ensemble, rows))
    if options.report:
        _add_report(result, run, trust_code=options.trust_code)
    return result


def _add_report(result: Result, run: Run, *, trust_code: bool) -> None:
    """Predict with what is recommended, evaluate, and write the report."""
    steps = {"predict": PredictOptions(trust_code=trust_code), "evaluate": EvaluateOptions()}
    for command, chosen in steps.items():
        run_command(run, command, run.arguments["ckpt"], chosen)
    made = run_command(run, "report", run.arguments["ckpt"], ReportOptions(trust_code=trust_code))
    result.outputs += made.outputs
    result.lines.append(f"report: {made.outputs[0]['path']}")


_SURE = 2  # times an estimate that is right within a factor of three


@dataclass(frozen=True)
class Rung:
    """Result of one step of the ladder.

    Args:
        name: name of the step.
        posterior: name of its posterior in the run, or the name it would have had.
        source: the posterior's file; None without one.
        is_good: True where diagnose finds the posterior good for its target; None where that was not checked.
        seconds: time of the step, including the judgement.
        note: why there is no posterior, or no more is known about it.
        criterion: criterion that chose the prior precision, val or marglik; None without one.
    """

    name: str
    posterior: str
    source: Source | None
    is_good: bool | None
    seconds: float
    note: str = ""
    criterion: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of --json."""
        return {
            "name": self.name,
            "posterior": self.posterior,
            "is_there": self.source is not None,
            "is_good": self.is_good,
            "seconds": round(self.seconds, 3),
            "note": self.note,
        }


@dataclass
class Suffix:
    """Suffix for posteriors whose plain names are taken. Posteriors with the same prior share it.

    Attributes:
        is_needed: True where the base has the suffix, and therefore everything fitted from it.
    """

    text: str
    is_needed: bool = False

    @classmethod
    def of(cls, options: AutoOptions) -> Suffix:
        """Return -auto, -val, -marglik or, for a number, such as -prior3."""
        given = options.prior_precision
        if given in ("auto", "val", "marglik"):
            return cls(f"-{given}")
        return cls(f"-prior{float(given):g}".replace(".", "p").replace("+", ""))


class Siblings(NamedTuple):
    """Checkpoints beside the run's own.

    Attributes:
        usable: those that can be members of an ensemble.
        left_out: the others, with reasons.
    """

    usable: list[Path]
    left_out: list[str]


@dataclass
class Ladder:
    """The steps of one climb.

    Args:
        judged: content digest of a posterior to an earlier judgement of it.
        score: called with each rung that has a posterior, to score it while there is time.
        deadline: value of time.monotonic() at which fits end; None for no limit.
    """

    run: Run
    options: AutoOptions
    judged: Mapping[str, bool]
    score: Callable[[Rung], object]
    deadline: float | None
    rungs: list[Rung] = field(default_factory=list)

    def climb(
        self, train: Split, val: Split, *, has_network: bool, siblings: Sequence[Path], has_folds: bool
    ) -> list[Rung]:
        """Climb the ladder and return its rungs: the network as trained, if any, then the steps with the largest gain per second first.

        A stack gains more than a Gaussian, so it comes first where there is time for both.

        Args:
            siblings: checkpoints that may be members of an ensemble.
            has_folds: True where val has enough rows for folds.
        """
        run, options, plain = self.run, self.options, Suffix("-auto")
        if has_network:
            network = run.folder.posterior("map")
            self._add(Rung("network", "map", posterior_source(run, network, "map")[1], None, 0.0))
            # It takes a moment, and nothing is recommended that is worse: the budget is for what comes after it.
            temperature = FitTemperatureOptions()
            self._step("fit-temperature", temperature, "temperature", suffix=plain, is_judged=False, is_limited=False)
            if has_folds:
                self._step("fit-calibration", FitCalibrationOptions(), "calibration", suffix=plain, is_judged=False)
        if siblings:
            self._ensemble(val, siblings)
        is_late = has_folds and not self._has_time_to_stack(train, val)
        if has_folds and not is_late:
            self._step("stack", StackOptions(), "stack", suffix=plain, is_judged=False)
        gaussian, suffix = FitLaplaceOptions(prior_precision=options.prior_precision), Suffix.of(options)
        base = self._step("fit-laplace", gaussian, "laplace", suffix=suffix)
        if is_late:
            self._step("stack", StackOptions(), "stack", suffix=plain, is_judged=False)
        if base.source is None or (base.is_good and not options.full):
            return self.rungs
        # Each searches for the precision that suits it, where that of the Gaussian was searched for on val too.
        prior: dict[str, Any] = {} if options.prior_precision in ("auto", "val") else {"prior_precision": INHERIT}
        refined = self._step("refine", RefineOptions(base=base.posterior, **prior), "refine", suffix=suffix)
        if not refined.is_good or options.full:
            behind = None if options.full else self._behind(refined)
            if behind is None:
                self._step("hmc", HmcOptions(base=base.posterior, **prior), "hmc", suffix=suffix)
            else:
                self._add(Rung("hmc", "hmc", None, None, 0.0, f"skipped: {behind}; --full samples anyway"))
        return self.rungs

    def _behind(self, refined: Rung) -> str | None:
        """Return what predicts val noticeably better than the refined posterior; None where nothing does.

        Draws from the same target would predict much like the refined posterior, and take minutes.
        """
        found: dict[str, float] = {}
        for rung in self.rungs:
            if rung.source is not None:
                entries = read_header(rung.source.path).meta.get("metrics", {}).get("val") or {}
                names = {rung.name.removeprefix("fit-"): rung.posterior, "temperature": "temperature"}
                found |= {name: entries[key]["nll"] for key, name in names.items() if key in entries}
        own_nll = found.pop(refined.posterior, None)
        best = min(found, key=lambda name: found[name], default=None)
        if own_nll is None or best is None or own_nll <= (1 + WORSE_SHARE) * found[best]:
            return None
        return f"{refined.posterior} predicts val worse than {best} (NLL {own_nll:.4f}, {best} {found[best]:.4f})"

    def _has_time_to_stack(self, train: Split, val: Split) -> bool:
        if self.deadline is None or self.run.folder.posterior("stack").is_file():
            return True

        return _SURE * estimate_seconds(self.run, train, val) < self.deadline - time.monotonic()

    def _add(self, rung: Rung) -> Rung:
        self.rungs.append(rung)
        if rung.source is not None:
            self.score(rung)
        return rung

    def _ensemble(self, val: Split, siblings: Sequence[Path]) -> None:
        """Combine the network and its usable siblings, at one temperature."""

        run, trust, start = self.run, self.options.trust_code, time.monotonic()
        names = ", ".join(path.name for path in siblings)
        run.console.info(
            f"found beside this checkpoint: {names}; checking whether they are separately trained copies of the "
            "same network (one pass over val each)"
        )
        found, note = Siblings([], []), ""
        try:
            with signals.time_limit(self.deadline):
                found = select_siblings(run, list(siblings), val, trust_code=trust)
        except BudgetSpent:
            note = "skipped: the budget is spent"
        except (DataError, MissingInput, Untrusted, UsageError, DeviceError) as error:
            note = f"skipped: {error.message}{error.advice}"
        looked = time.monotonic() - start
        others = f"without {'; '.join(found.left_out)}" if found.left_out else ""
        if not found.usable:
            self._add(Rung(ENSEMBLE, "ensemble", None, None, looked, note or others))
            return
        options = FitEnsembleOptions(each=TEMPERATURE, trust_code=trust)
        rung = self._step(ENSEMBLE, options, "ensemble", suffix=Suffix("-auto"), is_judged=False, members=found.usable)
        note = "; ".join(filter(None, (rung.note, others)))
        self.rungs[-1] = replace(rung, seconds=rung.seconds + looked, note=note)

    def _step(
        self,
        command: str,
        options: CheckedOptions,
        name: str,
        *,
        suffix: Suffix,
        is_judged: bool = True,
        is_limited: bool = True,
        members: Sequence[Path] = (),
    ) -> Rung:
        """Run one command and, if asked, judge its posterior or reuse the earlier judgement.

        A posterior of that name with other options stays, and another is made beside it.
        """
        run, start = self.run, time.monotonic()
        source, is_good, note, criterion = None, None, "", None
        try:
            with signals.time_limit(self.deadline if is_limited else None):
                path, name = _run_step(run, command, options, name, suffix, members)
                header, source = posterior_source(run, path, name)
                criterion = header.meta.get("criterion")
                is_good = self.judged.get(source.content_digest) if is_judged else None
                if is_judged and is_good is None:
                    is_good = _is_good(run, name)
        except BudgetSpent as spent:
            hint = f": {spent.hint}" if spent.hint else ""
            what = "skipped" if source is None else "fitted, but not compared with its target"
            note = f"{what}: the budget is spent{hint}"
        except (NumericError, DeviceError) as error:
            run.console.warn(f"skipping {command}: {error.message}{error.advice}")
            source, note = None, f"skipped: {error.message}"
        return self._add(Rung(command, name, source, is_good, time.monotonic() - start, note, criterion))


_INTEGRATORS = ("mc", "probit", "mean-field", "plug-in")  # the first whose uncertainty says most


class Scores:
    """Scores on val, computed once: of the network as trained and at its best temperature, cross-validated, and of every
    posterior by every integrator it supports.

    Attributes:
        points: scores of the network, under `network` and `temperature`.
        candidates: scores of the posteriors, in the order of the ladder.
    """

    def __init__(self, run: Run, val: Split, *, trust_code: bool) -> None:
        self.run, self.val, self.train = run, val, TrainData(run, trust_code)
        self.points: dict[str, ScoredPredictive] = {}
        self.candidates: list[Predictive] = []
        self._added: set[str] = set()
        self._networks: dict[
            Path, tuple[Any, Split]
        ] = {}  # of more than the last layer, whose inputs are read for them
        self._detected: list[DetectionResult] | None = None

    def add(self, rung: Rung) -> None:
        """Score a rung that has a posterior."""
        if rung.source is None or rung.posterior in self._added:
            return
        self._added.add(rung.posterior)
        if rung.name == "fit-temperature":
            found = temperature_on_val(self.run, self.val)
            if found is not None:
                self.points["temperature"] = found
            return
        posterior, val = self.judged_on(rung.source.path)
        if rung.name == "network":
            self.points["network"] = predictive_on_val(self.run, posterior, val, "plug-in", key="network")
            return
        whole, is_stack = getattr(posterior, "whole", posterior), rung.name == "stack"
        for name in ("mc",) if is_stack else _INTEGRATORS:  # the mean of a stack is another head
            if supports(name, whole):
                scored = predictive_on_val(self.run, posterior, val, name, key=f"{rung.posterior}.{name}")
                self.candidates.append(Predictive(rung.posterior, name, scored, has_network=is_stack))

    def judged_on(self, path: Path) -> tuple[Any, Split]:
        """Return a posterior on the device, or its folds for rows it was fitted to, and val as the posterior sees it."""
        if path in self._networks:
            return self._networks[path]
        header = read_header(path)
        posterior = Predictor(self.run, path, header, self.train).posterior
        found = self.train.judged_on(header, posterior, self.val), self.train.seen_by(header, self.val)
        if header.meta.get("layers") is not None:
            self._networks[path] = found
        return found

    def detect(self, outside: list[Split]) -> list[DetectionResult]:
        """Score detection of each out-of-distribution split by the combined feature score; empty where val is too small."""
        if self._detected is None:
            self._detected = _measure_detection(self.run, self.train, self.val, outside)
        return self._detected


def open_outside_splits(run: Run) -> list[Split]:
    """Return the run's out-of-distribution splits. Skip unusable ones with a warning."""
    found = []
    for name in run.folder.splits():
        try:
            if read_header(run.folder.features(name)).meta.get("is_ood"):
                found.append(load_split(run, name))
        except DataError as error:
            run.console.warn(f"skipping split {name}: {error.message}{error.advice}")
    return found


def find_siblings(path: Path) -> list[Path]:
    """Return the files beside a checkpoint whose names differ in one number only, and whose sizes are nearly equal.

    Numbers of epochs or steps do not count, since such files come from one training.
    """
    parts = _NUMBER.split(path.name)
    if len(parts) < 3 or not path.is_file():
        return []
    size, found = path.stat().st_size, []
    for other in sorted(path.parent.iterdir()):
        theirs = _NUMBER.split(other.name)
        differing = [place for place, pair in enumerate(zip(parts, theirs, strict=False)) if pair[0] != pair[1]]
        is_alike = len(theirs) == len(parts) and len(differing) == 1 and differing[0] % 2 == 1
        if not is_alike or _TIME.search("".join(parts[: differing[0]])):
            continue
        if other.is_file() and abs(other.stat().st_size - size) <= _SAME_SIZE * size:
            found.append(other)
    return found[:_MOST_SIBLINGS]


def _measure_detection(run: Run, train: TrainData, val: Split, outside: list[Split]) -> list[DetectionResult]:
    found = []
    own = train.combined_scores(val)
    if own is None:
        return []
    groups = val.groups
    if groups is not None and len(groups) < min_scores_for_rate(FALSE_ALARM):
        groups = None  # too few for a threshold by group
    threshold, bootstrap = fit_outliers(own, FALSE_ALARM, groups=groups), Bootstrap(level=LEVEL, seed=run.compute.seed)
    for split in outside:
        bootstrap = bootstrap.of_splits(val, split)
        far, name = train.combined_scores(split), split.content.name
        if far is None or not len(far):
            continue
        forms = {"auroc": detection_forms()["auroc"]}
        inside, other = ({DEFAULT_SCORE: scores} for scores in (own, far))
        (row,) = detection_rows(inside, other, forms, split="val", ood=name, bootstrap=bootstrap)
        ends = row["interval"] or {"low": None, "high": None}
        caught = float(threshold.is_outlier(far).mean())
        found.append(DetectionResult(name, DEFAULT_SCORE, row["value"], ends["low"], ends["high"], caught))
    return found


_MOST_ALIKE = 0.9  # cosine of two last layers: LeNet-5 trained apart -0.06 to 0.02, after 4, 6 and 12 epochs of one seed 0.98 to 0.996
_FAR_OFF = 0.1  # difference in accuracy on val
_ROWS = 1000  # of val, to estimate that accuracy


@no_grad
def select_siblings(run: Run, paths: list[Path], val: Split, *, trust_code: bool) -> Siblings:
    """Return the siblings that have the run's architecture, were trained independently, and predict val about as well.

    Raises:
        BnnError: the run's own network, or its inputs, cannot be opened.
    """
    reader = NetworkReader(run, trust_code)
    usable, left_out = [], []
    with reader.recorded.visible():
        seen, first = reader.split(val, STATE), reader.recorded.network
        assert val.content.header is not None
        head_name = f"{reader.network(reader.input_split(val, val.content.header))[1].name}.weight"
        some = slice(None, None, -(-len(seen.inputs) // _ROWS))  # val may be in the order of its classes
        layout, inputs, labels = seen.layout, seen.inputs[some], val.labels(torch.device("cpu"))[some].numpy()

        def looked_at(theta: Tensor) -> tuple[Tensor, float]:
            """Return the last layer's weights, or all weights where it has no own name, and the accuracy on val."""
            stacked = theta.to(run.device).unsqueeze(0)
            logits = torch.cat([layout.logits(block.to(run.device), stacked)[0] for block in inputs.split(500)])
            probs = layout.likelihood.class_probabilities(logits.double(), dim=1).cpu().numpy()
            head = layout.split(theta).get(head_name, theta).flatten().double()
            return head / head.norm(), score_predictive("", probs, labels).accuracy or 0.0

        own, accuracy = looked_at(read_theta(first.module, layout, run.checkpoint_path, run.checkpoint_path))
        heads = {run.checkpoint_path: own}
        for path in paths:
            run.console.poll(f"checking {path}")
            try:
                theta = read_theta(open_member(run, first, path).module, layout, path, run.checkpoint_path)
            except Interrupted:
                raise
            except BnnError as error:
                left_out.append(f"{path.name} ({error.message})")
                continue
            head, theirs = looked_at(theta)
            near = next((other for other, one in heads.items() if float(one @ head) > _MOST_ALIKE), None)
            if near is not None:
                left_out.append(
                    f"{path.name} (its last layer is nearly that of {near.name}; probably the same training run)"
                )
            elif theirs < accuracy - _FAR_OFF:
                left_out.append(f"{path.name} (accuracy on val {percent(theirs)}, here {percent(accuracy)})")
            else:
                usable.append(path)
                heads[path] = head
    return Siblings(usable, left_out)


def _run_step(
    run: Run, command: str, options: CheckedOptions, name: str, suffix: Suffix, members: Sequence[Path]
) -> tuple[Path, str]:
    """Run a step's command, and return the posterior's file and name.

    A posterior that was fitted with other options stays, and the new one gets another name. An ensemble of other members is replaced.
    """
    module = importlib.import_module(f"bnncli.commands.{command.replace('-', '_')}")
    own = name + suffix.text
    tries = [(None, False)] * (not suffix.is_needed) + [(own, run.write.force)] + [(own, True)] * bool(members)
    for place, (tried, force) in enumerate(tries, start=1):
        step = _derive_run(run, command, options, name=tried, force=force, members=members)
        try:
            run.console.info("$ " + step.line.pasted() + (" --force" if force else ""))
            result: Result = _run_command(module, step, options, tried or name)
        except OutputExists as error:
            if error.code != "exists":
                raise
            if place == len(tries):  # which has no --name
                can_replace = str(error.hint).startswith(REPLACE)
                error.hint = REPLACE if can_replace else f"move it away: auto writes {error.path}"
                raise
            if tried is None:
                run.console.info(f"  {name} was fitted with other options and is kept; this one is called {own}")
            continue
        suffix.is_needed = tried == own
        for text in [] if result.action == "up_to_date" else result.summary:
            run.console.info("  " + text)
        return Path(result.outputs[0]["path"]), tried or name
    raise AssertionError("unreachable")


def _run_command(module: Any, step: Run, options: CheckedOptions, name: str) -> Result:
    """Run a command, resuming where the budget or a signal ended it before."""
    if hasattr(options, "resume"):
        suffix = ".nc" if step.command == "hmc" else ".safetensors"
        state = state_path(step.folder.posterior(name, suffix=suffix))
        if state.exists():
            try:
                resumed: Result = module.execute(step, replace(options, resume=True))  # type: ignore[type-var]
            except DataError as error:
                if error.path != str(state):  # something else than the state
                    raise
                step.console.info(f"  {error.message}; starting from scratch")
            else:
                return resumed
    result: Result = module.execute(step, options)
    return result


def _is_good(run: Run, name: str) -> bool:
    """True where diagnose, judging the posterior alone, finds it good for its target."""
    options = DiagnoseOptions(posterior=[name])
    found = importlib.import_module("bnncli.commands.diagnose").execute(_derive_run(run, "diagnose", options), options)
    return bool(found.extra["verdict"]["is_good"])


def _derive_run(
    run: Run,
    command: str,
    options: CheckedOptions,
    *,
    name: str | None = None,
    force: bool = False,
    members: Sequence[Path] = (),
) -> Run:
    """Return the run as seen by another command."""
    naming = NameOptions(name=name)
    line = CommandLine.of(command, str(run.arguments["ckpt"]), options, run.compute, naming, run.run_options)
    return replace(
        run,
        command=command,
        line=replace(line, parts=(*line.parts, *((None, str(path)) for path in members))),
        arguments={**run.arguments, **({"member": list(members)} if members else {})},
        naming=naming,
        write=replace(run.write, force=force),
        started=time.monotonic(),
    )


_SHOWN = ("sentence", "pays", "qualities", "about", "detection", "outside")


class _Paired:
    """Predictions of single candidates on val, paired with the baseline's."""

    def __init__(self, scores: Scores, rungs: list[Rung], baseline: str, losses: NDArray | None) -> None:
        self.scores, self.losses = scores, losses
        self.files = {rung.posterior: rung.source.path for rung in rungs if rung.source is not None}
        step = {"temperature": "fit-temperature"}.get(baseline, baseline)
        self.base = next((rung.posterior for rung in rungs if rung.name == step), None)

    def qualities(self, one: Predictive) -> list[Quality]:
        """Return the qualities of a candidate."""
        assert self.base is not None
        own, base = self._predicted(one.posterior, one.integrator), self._predicted(self.base, "plug-in")
        return qualities(own, replace(base, losses=self.losses), seed=self.scores.run.compute.seed)

    def _predicted(self, posterior: str, integrator: str) -> SplitProbabilities:
        judged, val = self.scores.judged_on(self.files[posterior])
        probs = predict_split_probs(self.scores.run, judged, val, integrator)
        return SplitProbabilities(val.content.name, probs, val.content.labels, groups=val.groups)


def compute(
    request: Request, rungs: list[Rung], scores: Scores, outside: list[Split], *, keep_accuracy: bool
) -> ComputationOutput:
    """Return the rows of all candidates, the recommended one with its qualities and detection, and the recommendation's text."""
    task = scores.run.console.task("val", len(rungs))
    for rung in rungs:
        scores.add(rung)
        task.advance()
    ensembles = {rung.posterior for rung in rungs if rung.name == ENSEMBLE}
    points = scores.points
    candidates = sorted(
        scores.candidates, key=lambda one: one.posterior in ensembles
    )  # several networks are no simple choice
    name = min(points, key=lambda key: points[key].nll, default="")
    baseline, words = points.get(name), PLAIN.get(name, "")
    if baseline is None and not candidates:
        raise CheckFailed("no posterior was fitted, and this run has no network to recommend", code="nothing_fitted")
    paired = _Paired(scores, rungs, name, None if baseline is None else baseline.losses)
    found = recommend(candidates, baseline, words=words, keep_accuracy=keep_accuracy)
    names = {
        "temperature": next((rung.posterior for rung in rungs if rung.name == "fit-temperature"), ""),
        "network": "map",
    }
    rows = [
        _build_row(names[key], "plug-in", scored, baseline, is_recommended=found.chosen is None and key == name)
        for key, scored in points.items()
    ]
    rows += [
        _build_row(one.posterior, one.integrator, one.scored, baseline, is_recommended=one is found.chosen)
        for one in candidates
    ]
    text = recommendation_sentence(found, baseline, names.get(name, ""), words)
    beside = [] if found.contender is None or baseline is None else paired.qualities(found.contender)
    about = None if found.contender is None else str(found.contender)
    judged = [(rung.source.content_digest, rung.is_good) for rung in rungs if rung.source and rung.is_good is not None]
    told = {"is_recommended": False, "sentence": text, "pays": found.pays, "judged": judged}
    told |= {"qualities": [one.to_json() for one in beside], "about": [about, words]}
    detected = scores.detect(outside)
    told |= {"detection": [asdict(one) for one in detected], "outside": detection_sentence(detected)}

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_metrics(
            request.target,
            rows=[*rows, told],
            predictions=[],
            provenance=provenance,
            may_replace=may_replace,
        )

    return ComputationOutput(publish, {"rows": rows, **{key: told[key] for key in _SHOWN}})


def _build_row(
    posterior: str,
    integrator: str,
    scored: ScoredPredictive,
    baseline: ScoredPredictive | None,
    *,
    is_recommended: bool,
) -> dict[str, Any]:
    gain = None
    if baseline is not None and scored is not baseline:
        gap = independent_values(baseline.losses - scored.losses, scored.groups)
        gain = {
            "value": float(gap.mean()),
            "standard_error": float(gap.std(ddof=1) / len(gap) ** 0.5) if len(gap) > 1 else None,
        }
    return {
        "posterior": posterior,
        "integrator": integrator,
        "split": "val",
        **scored.to_json(),
        "gain": gain,
        "is_recommended": is_recommended,
    }


def read_recommendation(header: Header) -> ComputationOutput:
    """Return the same from an up-to-date recommendation."""
    *rows, told = header.meta["rows"]
    metrics = {"rows": rows, **{key: told[key] for key in _SHOWN}}
    return ComputationOutput(lambda provenance, may_replace: header.content_digest, metrics)


def _table(rungs: list[Rung], rows: list[dict[str, Any]], labels: Any, baseline: str | None) -> Table:
    """Return a table with one row per step, by its best integrator, with its gain over the baseline."""
    cells = []
    for rung in rungs:
        own = [row for row in rows if row["posterior"] == rung.posterior]
        best = min(own, key=lambda row: float(row["nll"]), default=None)
        mark = "*" if any(row["is_recommended"] for row in own) else ""
        shown = next((row for row in own if row["is_recommended"]), best)
        if shown is None:
            cells.append([rung.name, "-", "-", "-", "-", "-"])
            continue
        gain = shown["gain"]
        told = "-" if gain is None else f"{gain['value']:+.4f}"
        if gain is not None and gain["standard_error"] is not None:
            told += f" +- {gain['standard_error']:.4f}"
        good = "-" if rung.is_good is None else "yes" if rung.is_good else "no"
        ece = f"{shown['ece']:.4f}"
        cells.append([f"{rung.posterior}{mark}", shown["integrator"], f"{shown['nll']:.4f}", ece, told, good])
    note = f"* recommended; {len(labels)} examples of val"
    if baseline is not None and any(cell[4] != "-" for cell in cells):
        note += f"; gain: NLL of {baseline} minus NLL of the row"
    if any(cell[5] != "-" for cell in cells):
        note += "; good: matches the exact posterior closely (see diagnose)"
    if any(rung.name == "fit-temperature" and rung.source is not None for rung in rungs):
        note += "; the temperature's scores are leave-one-out"
    if any(rung.name == "fit-calibration" and rung.source is not None for rung in rungs):
        note += "; the calibration map's are out of fold"
    if any(rung.criterion == "val" or (rung.name == ENSEMBLE and rung.source is not None) for rung in rungs):
        note += "; fits were tuned on val too, so their scores are slightly optimistic"
    columns = ["posterior", "integrator", "NLL", "ECE", "gain", "good"]
    return Table(columns, cells, notes=[note])


def _build_qualities_table(metrics: dict[str, Any]) -> list[Table]:
    """Return a table with one row per quality of the recommended posterior; None without one."""
    found = parse_qualities(metrics["qualities"])
    if not found:
        return []
    columns = ["val", *metrics["about"], "difference", "95% interval", "finding"]
    notes = ["paired by example; each interval holds on its own"]
    return [Table(columns, [one.cells for one in found], notes=notes)]


def _describe_averaging(name: str, gaussian: Header | None) -> list[str]:
    """Describe how averaging over the Gaussian changes the NLL on val."""
    gain = None if gaussian is None else gaussian.meta["metrics"].get("val_gain")
    if gain is None:
        return []
    averaging = gain["averaging"]
    error = averaging["standard_error"]
    shown = f"{-averaging['value']:+.4f}" + ("" if error is None else f" +- {error:.4f}")
    return [f"averaging over {name} changes the val NLL by {shown} nats"]


def _describe_ensemble_cost(run: Run, ensemble: str, rows: list[dict[str, Any]]) -> str:
    """Describe what predicting with an ensemble costs, and the best choice without it."""
    members = read_header(run.folder.posterior(ensemble)).meta["metrics"]["num_members"]
    other = min((row for row in rows if row["posterior"] != ensemble), key=lambda row: float(row["nll"]))
    line = run.suggest("predict", posterior=other["posterior"], integrator=other["integrator"])
    return (
        f"{ensemble} takes {members} network passes per input and cannot be exported; the best choice that uses "
        f"one network has NLL {other['nll']:.4f} on val: {line}"
    )
