"""The rungs: each a command as a user would type it, and whether the posterior that it leaves is good for its target."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bnncli import options as o
from bnncli.errors import DataError, DeviceError, NumericError, OutputExists
from bnncli.options.command_line import CommandLine
from bnncli.options.declaration import Checked
from bnncli.options.target import INHERIT
from bnncli.run.inputs import posterior_source
from bnncli.run.session import Result, Run
from bnncli.stages.auto.budget import BudgetSpent, LimitedVoice
from bnncli.storage.provenance import Source
from bnncli.storage.resume import state_path


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
    def of(cls, options: o.AutoOptions) -> Suffix:
        """-auto, -val, -marglik, or -prior3 of a number."""
        given = options.prior_precision
        if given in ("auto", "val", "marglik"):
            return cls(f"-{given}")
        return cls(f"-prior{float(given):g}".replace(".", "p").replace("+", ""))


def climb(
    run: Run,
    voice: LimitedVoice,
    *,
    options: o.AutoOptions,
    has_network: bool,
    can_stack: bool,
    judged: Mapping[str, bool],
) -> list[Rung]:
    """The rungs that were climbed, the network as trained first where there is one.

    Args:
        voice: ends fits when the budget is spent.
        options: `full` goes on where a posterior is good already; `prior_precision` is that of all fits.
        can_stack: whether val has rows enough for folds.
        judged: of posteriors, by their content's digest, whether they were found good before.
    """
    rungs = []
    if has_network:
        network = run.folder.posterior("map")
        rungs.append(Rung("network", "map", posterior_source(run, network, "map")[1], None, 0.0))
        # It takes a moment, and nothing is recommended that is worse: the budget is for what comes after it.
        unlimited = LimitedVoice(voice.console, None)
        rungs.append(
            _step(
                run,
                unlimited,
                "fit-temperature",
                o.FitTemperatureOptions(),
                "temperature",
                judged=None,
                suffix=Suffix("-auto"),
            )
        )
    if can_stack:
        rungs.append(_step(run, voice, "stack", o.StackOptions(), "stack", judged=None, suffix=Suffix("-auto")))
    gaussian, suffix = o.FitLaplaceOptions(prior_precision=options.prior_precision), Suffix.of(options)
    base = _step(run, voice, "fit-laplace", gaussian, "laplace", judged=judged, suffix=suffix)
    rungs.append(base)
    if base.source is None or (base.is_good and not options.full):
        return rungs
    # Each searches for the precision that suits it, where that of the Gaussian was searched for on val too.
    prior: dict[str, Any] = {} if options.prior_precision in ("auto", "val") else {"prior_precision": INHERIT}
    flow = o.RefineOptions(base=base.posterior, **prior)
    refined = _step(run, voice, "refine", flow, "refine", judged=judged, suffix=suffix)
    rungs.append(refined)
    if refined.is_good and not options.full:
        return rungs
    chains = o.HmcOptions(base=base.posterior, **prior)
    rungs.append(_step(run, voice, "hmc", chains, "hmc", judged=judged, suffix=suffix))
    return rungs


def _as_command(
    run: Run, voice: LimitedVoice, command: str, options: Checked, *, name: str | None = None, force: bool = False
) -> Run:
    """The run as another command sees it."""
    naming = o.NameOptions(name=name)
    line = CommandLine.of(command, str(run.arguments["ckpt"]), options, run.compute, naming, run.run_options)
    return replace(
        run,
        command=command,
        line=line,
        naming=naming,
        write=replace(run.write, force=force),
        console=voice,
        started=time.monotonic(),
    )


def _step(
    run: Run,
    voice: LimitedVoice,
    command: str,
    options: Checked,
    name: str,
    *,
    judged: Mapping[str, bool] | None,
    suffix: Suffix,
) -> Rung:
    """One command, and the judgement of what it left, where one is asked for: as it was, or else made now.

    A posterior of that name by other options stays, and another is made beside it.
    """
    start = time.monotonic()

    def seconds() -> float:
        return time.monotonic() - start

    source, is_good, note, criterion = None, None, "", None
    try:
        voice.check()
        path, name = _made(run, voice, command, options, name, suffix)
        header, source = posterior_source(run, path, name)
        criterion = header.meta.get("criterion")
        is_good = None if judged is None else judged.get(source.content_digest)
        if judged is not None and is_good is None:
            is_good = _is_good(run, voice, name)
    except BudgetSpent as spent:
        hint = f": {spent.hint}" if spent.hint else ""
        what = "left out" if source is None else "fitted, but not judged for its target"
        note = f"{what}, the budget is spent{hint}"
    except (NumericError, DeviceError) as error:
        run.console.warn(f"{command} is left out: {error.message}{error.advice}")
        return Rung(command, name, None, None, seconds(), f"left out: {error.message}")
    return Rung(command, name, source, is_good, seconds(), note, criterion)


def _made(run: Run, voice: LimitedVoice, command: str, options: Checked, name: str, suffix: Suffix) -> tuple[Path, str]:
    """The posterior's file and its name.

    What somebody fitted by other options stays, and another is made beside it under a name of its own.
    """
    stage = importlib.import_module(f"bnncli.stages.{command.replace('-', '_')}")
    own = name + suffix.text
    for tried in (own,) if suffix.is_needed else (None, own):
        step = _as_command(run, voice, command, options, name=tried, force=run.write.force and tried is not None)
        try:
            run.console.info("$ " + step.line.pasted())
            result: Result = _continued(stage, step, options, tried or name)
        except OutputExists as error:
            if tried == own:
                error.hint = "add \0force\0 to replace it"
                raise
            run.console.info(f"  {name} was made with other options: it stays, and this is {own}")
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
                step.console.info(f"  {error.message}: starting afresh")
            else:
                return resumed
    result: Result = stage.run(step, options)
    return result


def _is_good(run: Run, voice: LimitedVoice, name: str) -> bool:
    """Whether a posterior is good for its target, as diagnose judges it alone."""
    options = o.DiagnoseOptions(posterior=[name])
    found = importlib.import_module("bnncli.stages.diagnose").run(_as_command(run, voice, "diagnose", options), options)
    return bool(found.extra["verdict"]["is_good"])
