"""config show: every option's value, and where it comes from. The command line resolves; this arranges."""

from __future__ import annotations

from typing import Any

from bnncli.options.declaration import flag_of
from bnncli.run.session import Result, Run, Table


def run(run: Run, options: Any) -> Result:
    """A table of command, option, value and source."""
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
