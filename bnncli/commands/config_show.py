"""config show: print every option's value and where it comes from, as the command line resolves them."""

from __future__ import annotations

from typing import Any

from bnncli.options.command import Argument, Command, CommonOptions
from bnncli.options.declaration import flag_of
from bnncli.session.run import Result, Run, Table

COMMAND = Command(
    "Print the value of every option of a command, and where it comes from.",
    "Precedence: command line, environment (BNNCLI_<COMMAND>_<OPTION>), configuration file, default.",
    (CommonOptions,),
    ("bnncli config show refine", "BNNCLI_REFINE_EPOCHS=5 bnncli config show refine --json"),
    (Argument("of", "A command. Default: all.", is_optional=True),),
    parent="config",
    section="Files",
    place=60,
)


def execute(run: Run, options: Any) -> Result:
    """Return a table of command, option, value and source."""
    resolved: dict[str, dict[str, Any]] = run.arguments["resolved"]
    rows = [
        [command, flag_of(name)[2:], "" if setting.value is None else str(setting.value), setting.source]
        for command, settings in resolved.items()
        for name, setting in settings.items()
    ]
    document = {
        command: {name: {"value": setting.value, "source": setting.source} for name, setting in settings.items()}
        for command, settings in resolved.items()
    }
    return Result(extra={"settings": document}, tables=[Table(["command", "option", "value", "source"], rows)])
