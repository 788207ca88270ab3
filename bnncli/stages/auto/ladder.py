"""The rungs: each a command as a user would type it, and whether the posterior that it leaves is good for its target."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.resume import state_path
from bnncli.errors import DataError, DeviceError, MissingInput, NumericError, OutputExists, Untrusted, UsageError
from bnncli.evaluation.excess import WORSE_SHARE
from bnncli.options.auto import AutoOptions
from bnncli.options.command import CommandLine, NameOptions
from bnncli.options.declaration import Checked
from bnncli.options.diagnose import DiagnoseOptions
from bnncli.options.fit_ensemble import TEMPERATURE, FitEnsembleOptions
from bnncli.options.fit_laplace import FitLaplaceOptions
from bnncli.options.fit_temperature import FitTemperatureOptions
from bnncli.options.hmc import HmcOptions
from bnncli.options.refine import RefineOptions
from bnncli.options.shared import INHERIT
from bnncli.options.stack import StackOptions
from bnncli.session.inputs import Split, posterior_source
from bnncli.session.run import Result, Run
from bnncli.system import signals
from bnncli.system.signals import BudgetSpent

ENSEMBLE = "fit-ensemble"
_SURE = 2  # times an estimate that is right to a factor of three


@dataclass(frozen=True)
class Rung:
    """What a step of the ladder left.

    Args:
        name: of the step.
        posterior: its name in the run; of a step that ended without one, the name it would have had.
        source: the posterior's file; None where there is none.
        is_good: for its target; None where that was not asked.
        seconds: that the step took, the judgement with it.
        note: why there is no posterior, or no more of it is known.
        criterion: that chose the prior precision: val or marglik; None where none did.
    """

    name: str
    posterior: str
    source: Source | None
    is_good: bool | None
    seconds: float
    note: str = ""
    criterion: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As --json has it."""
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
    """What the names of posteriors end with where others have their plain names: those of one prior belong together.

    Attributes:
        is_needed: whether the base has it, and so what is made from it.
    """

    text: str
    is_needed: bool = False

    @classmethod
    def of(cls, options: AutoOptions) -> Suffix:
        """-auto, -val, -marglik, or -prior3 of a number."""
        given = options.prior_precision
        if given in ("auto", "val", "marglik"):
            return cls(f"-{given}")
        return cls(f"-prior{float(given):g}".replace(".", "p").replace("+", ""))


@dataclass
class Ladder:
    """The steps of one climb.

    Args:
        judged: of posteriors, by their content's digest, whether they were found good before.
        score: called with each rung that has a posterior, to say what it is worth while there is time.
        deadline: of time.monotonic(), at which fits end; None for no limit.
    """

    run: Run
    options: AutoOptions
    judged: Mapping[str, bool]
    score: Callable[[Rung], object]
    deadline: float | None
    rungs: list[Rung] = field(default_factory=list)

    def climb(
        self, train: Split, val: Split, *, has_network: bool, siblings: Sequence[Path], can_stack: bool
    ) -> list[Rung]:
        """The rungs that were climbed, the network as trained first where there is one; then what gains most in a second.

        A stack gains more than a Gaussian, and comes first where there is time for both.

        Args:
            siblings: checkpoints that may be networks like the run's own.
            can_stack: whether val has rows enough for folds.
        """
        run, options, plain = self.run, self.options, Suffix("-auto")
        if has_network:
            network = run.folder.posterior("map")
            self._add(Rung("network", "map", posterior_source(run, network, "map")[1], None, 0.0))
            # It takes a moment, and nothing is recommended that is worse: the budget is for what comes after it.
            temperature = FitTemperatureOptions()
            self._step("fit-temperature", temperature, "temperature", suffix=plain, is_judged=False, is_limited=False)
        if siblings:
            self._ensemble(val, siblings)
        is_late = can_stack and not self._has_time_to_stack(train, val)
        if can_stack and not is_late:
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
        """Say what predicts val better than the refined posterior by more than counts; None where nothing does.

        Draws of the same target predict much as the refined posterior does, and take minutes.
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
        from bnncli.stages.stack.work import estimated_seconds

        return _SURE * estimated_seconds(self.run, train, val) < self.deadline - time.monotonic()

    def _add(self, rung: Rung) -> Rung:
        self.rungs.append(rung)
        if rung.source is not None:
            self.score(rung)
        return rung

    def _ensemble(self, val: Split, siblings: Sequence[Path]) -> None:
        """The network and those of its siblings that are like it, at one temperature."""
        from bnncli.stages.auto.siblings import Siblings, usable_siblings  # slow to import

        run, trust, start = self.run, self.options.trust_code, time.monotonic()
        names = ", ".join(path.name for path in siblings)
        run.console.info(
            f"found beside this checkpoint: {names}; checking whether they are separately trained copies of the "
            "same network (one pass over val each)"
        )
        found, note = Siblings([], []), ""
        try:
            with signals.ending_at(self.deadline):
                found = usable_siblings(run, list(siblings), val, trust_code=trust)
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
        options: Checked,
        name: str,
        *,
        suffix: Suffix,
        is_judged: bool = True,
        is_limited: bool = True,
        members: Sequence[Path] = (),
    ) -> Rung:
        """One command, and the judgement of what it left, where one is asked for: as it was, or else made now.

        A posterior of that name by other options stays, and another is made beside it.
        """
        run, start = self.run, time.monotonic()
        source, is_good, note, criterion = None, None, "", None
        try:
            with signals.ending_at(self.deadline if is_limited else None):
                path, name = _made(run, command, options, name, suffix, members)
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


def _as_command(
    run: Run,
    command: str,
    options: Checked,
    *,
    name: str | None = None,
    force: bool = False,
    members: Sequence[Path] = (),
) -> Run:
    """The run as another command sees it."""
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


def _made(
    run: Run, command: str, options: Checked, name: str, suffix: Suffix, members: Sequence[Path]
) -> tuple[Path, str]:
    """The posterior's file and its name.

    What somebody fitted by other options stays, and another is made beside it under a name of its own; that of other members is replaced.
    """
    stage = importlib.import_module(f"bnncli.stages.{command.replace('-', '_')}")
    own = name + suffix.text
    tries = [(None, False)] * (not suffix.is_needed) + [(own, run.write.force)] + [(own, True)] * bool(members)
    for place, (tried, force) in enumerate(tries, start=1):
        step = _as_command(run, command, options, name=tried, force=force, members=members)
        try:
            run.console.info("$ " + step.line.pasted() + (" --force" if force else ""))
            result: Result = _continued(stage, step, options, tried or name)
        except OutputExists as error:
            if place == len(tries):
                error.hint = "add \0force\0 to replace it"
                raise
            if tried is None:
                run.console.info(f"  {name} was fitted with other options and is kept; this one is called {own}")
            continue
        suffix.is_needed = tried == own
        for text in [] if result.action == "up_to_date" else result.summary:
            run.console.info("  " + text)
        return Path(result.outputs[0]["path"]), tried or name
    raise AssertionError("unreachable")


def _continued(stage: Any, step: Run, options: Checked, name: str) -> Result:
    """The result of a command; it goes on from where the budget, or a signal, ended it before."""
    if hasattr(options, "resume"):
        suffix = ".nc" if step.command == "hmc" else ".safetensors"
        if state_path(step.folder.posterior(name, suffix=suffix)).exists():
            try:
                resumed: Result = stage.run(step, replace(options, resume=True))  # type: ignore[type-var]
            except DataError as error:
                if error.code != "resume_mismatch":
                    raise
                step.console.info(f"  {error.message}; starting from scratch")
            else:
                return resumed
    result: Result = stage.run(step, options)
    return result


def _is_good(run: Run, name: str) -> bool:
    """Whether a posterior is good for its target, as diagnose judges it alone."""
    options = DiagnoseOptions(posterior=[name])
    found = importlib.import_module("bnncli.stages.diagnose").run(_as_command(run, "diagnose", options), options)
    return bool(found.extra["verdict"]["is_good"])
