"""help: print a topic, which the command line provides."""

from __future__ import annotations

from typing import Any

from bnncli.options.command import Argument, Command, CommonOptions
from bnncli.session.run import Result, Run

COMMAND = Command(
    "Explain exit codes, common options, environment variables or specs.",
    "Without a topic, lists the topics. With the name of a command, prints that command's help.",
    (CommonOptions,),
    ("bnncli help exit-codes", "bnncli help predict"),
    (Argument("topic", "A topic or a command. Default: list the topics.", is_optional=True),),
    section="Start",
    place=60,
)


def execute(run: Run, options: Any) -> Result:
    """Return the lines of the topic."""
    lines: list[str] = run.arguments["lines"]
    return Result(extra={"topic": run.arguments["topic"], "lines": lines}, lines=lines)
