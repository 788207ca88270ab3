"""Format --help: options in named groups, rare and common ones by name only, colours on a terminal."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from bnncli.cli.options import option_fields
from bnncli.options.command import COMPUTE, Command

MAX_WIDTH = 110
FEW = 8  # up to this many options are shown without groups
EVERYTHING = "help_all"
_FLAG = re.compile(r"(?<!\S)--?[a-z][a-z-]*")


class HelpCommand(TyperCommand):
    """A command whose help describes its own options by group; only --help-all describes rare and common ones."""

    command: ClassVar[Command]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options by group, and the names of the other options."""
        everything = bool(ctx.meta.get(EVERYTHING))
        specs, sections = option_fields(self.command), dict[str, list[Any]]()
        common: list[Any] = []
        rare: list[Any] = []
        for one in self.get_params(ctx):
            if one.name in common_names() or (one.name not in specs and one.param_type_name == "option"):
                common.append(one)
            elif one.name in specs and specs[one.name][0].metadata["is_rare"] and not everything:
                rare.append(one)
            else:
                is_option = one.param_type_name == "option"
                title = (specs[one.name][0].metadata["group"] or "Options") if is_option else "Arguments"
                sections.setdefault(title, []).append(one)
        shown = [one for title, each in sections.items() if title != "Arguments" for one in each]
        if len(shown) <= FEW:
            sections = {"Arguments": sections.get("Arguments", []), "Options": shown}
        if everything:
            sections["Common options"] = common
        for title, each in sections.items():
            _write_records(formatter, title, [one.get_help_record(ctx) for one in each])
        if not everything:
            _write_names(formatter, f"More options (see {ctx.command_path} --help-all)", rare)
            _write_names(formatter, "Common options (see bnncli help common)", common)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, ready to paste."""
        with formatter.section(style_text("Examples", bold=True)):
            formatter.write("".join(f"{_pasteable(example)}\n" for example in self.command.examples))


class HelpGroup(TyperGroup):
    """A group of commands, listed by section in help."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the --help option, renamed so that it does not clash with the defaults of the command help."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.name = "show_help"
        return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands."""
        _write_records(formatter, "Options", [one.get_help_record(ctx) for one in self.get_params(ctx)])
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their summaries, by section."""
        sections: dict[str, list[Any]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                sections.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, command))
        for title, commands in sections.items():
            limit = formatter.width - 6 - max(len(name) for name, _ in commands)
            records = [(style_text(name, fg="cyan"), command.get_short_help_str(limit)) for name, command in commands]
            _write_records(formatter, title if len(sections) > 1 else "Commands", records)


def print_everything(ctx: typer.Context, is_asked: bool) -> None:
    """Print the help of all options and exit."""
    if is_asked:
        ctx.meta[EVERYTHING] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


@cache
def common_names() -> frozenset[str]:
    """Return the names of the options that most commands have."""
    return frozenset(field.name for group in COMPUTE for field in fields(group))


def style_text(text: str, **style: Any) -> str:
    """Style the text if stdout and stderr are terminals that show colours; help for a usage error goes to stderr."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return typer.style(text, **style) if is_terminal and not os.environ.get("NO_COLOR") else text


def _write_records(formatter: Any, title: str, records: Sequence[tuple[str, str] | None]) -> None:
    shown = [record for record in records if record is not None]
    if shown:
        with formatter.section(style_text(title, bold=True)):
            formatter.write_dl(
                [(_FLAG.sub(lambda flag: style_text(flag[0], fg="cyan"), name), text) for name, text in shown]
            )


def _write_names(formatter: Any, title: str, options: Sequence[Any]) -> None:
    if options:
        with formatter.section(style_text(title, bold=True)):
            names, indent = (
                ", ".join("/".join(sorted(one.opts, key=len)) for one in options),
                " " * formatter.current_indent,
            )
            lines = textwrap.wrap(names, formatter.width - len(indent), break_on_hyphens=False)
            formatter.write("".join(f"{indent}{line}\n" for line in lines))


def _pasteable(example: str, width: int = 74) -> str:
    """Wrap a command to the narrowest terminal, with a backslash at each line end but the last."""
    lines = textwrap.wrap(example, width, break_long_words=False, break_on_hyphens=False)
    return " \\\n      ".join(["  " + lines[0], *lines[1:]])
