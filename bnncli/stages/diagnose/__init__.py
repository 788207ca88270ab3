"""diagnose: every posterior of the run judged against its target, and one sentence on which is close to it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bnncli.errors import CheckFailed
from bnncli.evaluation.verdict import Verdict
from bnncli.options.command import READ, Command, ComputeOptions, InputOptions
from bnncli.options.diagnose import DiagnoseOptions
from bnncli.session.run import Result, Run, source_json
from bnncli.session.val_report import gain_table
from bnncli.stages.diagnose.judgement import judge
from bnncli.stages.diagnose.tables import diagnosis_tables

COMMAND = Command(
    "Check how closely each posterior matches its target.",
    "A Gaussian or flow fits well if its log importance weights spread by at most 2 nats and Pareto k is below "
    "its threshold. Draws fit well if R-hat is at most 1.05, there are at least 400 effective draws and none "
    "diverged. Also shows which posterior predicts best on val. Writes nothing.",
    (DiagnoseOptions, InputOptions, ComputeOptions, *READ),
    (
        "bnncli diagnose ckpt.pt",
        "bnncli diagnose ckpt.pt --posterior laplace --strict --json | jq .verdict",
        "bnncli diagnose ckpt.pt --layers all",
    ),
    section="Judge",
    place=30,
)


def run(run: Run, options: DiagnoseOptions) -> Result:
    """Judge and print; nothing is written."""
    found = judge(run, options)
    recommended = found.recommended
    return Result(
        extra={
            "posteriors": found.entries,
            "pairs": found.pairs,
            **({"layers": [gain.to_json() for gain in found.gains]} if found.gains else {}),
            "verdict": _verdict_json(found.verdict) | {"predict": None if recommended is None else asdict(recommended)},
            "inputs": [source_json(source) for source in found.sources],
            "environment": run.environment(),
        },
        tables=[*diagnosis_tables(found.entries, found.pairs), *gain_table(found.headers)],
        lines=[
            found.verdict.sentence,
            *(gain.sentence for gain in found.gains),
            *([] if found.verdict.run in found.verdict.sentence else [f"next: {found.verdict.run}"]),
        ],
        failure=None if found.verdict.is_good or not options.strict else _failure(found.verdict),
    )


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    target = verdict.target
    return {
        "sentence": verdict.sentence,
        "use": verdict.use,
        "prior_precision": None if target is None else target.weight_precision,
        "bias_precision": None if target is None or target.is_isotropic else target.bias_precision,
        "is_good": verdict.is_good,
        "run": verdict.run,
    }


def _failure(verdict: Verdict) -> CheckFailed:
    return CheckFailed(
        "--strict: none of the judged posteriors matches its target closely", hint=verdict.run, code="no_good_posterior"
    )
