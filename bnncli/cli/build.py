"""The Typer application, made from the list of commands and the option classes."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from bnncli import __version__
from bnncli.cli.commands import all_commands
from bnncli.cli.option_values import default_of, option_fields
from bnncli.cli.quick_values import QuickCommand, QuickGroup
from bnncli.options.command import COMPUTE, Argument, Command
from bnncli.options.declaration import choices_of, flag_of, help_of

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_EVERYTHING = "help_all"
ABOUT = """Turn a saved classifier checkpoint into a Bayesian one, post hoc.

The shortest way: extract-features, auto, predict, report. Try `bnncli demo` first. Each command reads files and writes files.

Exit codes: 0 done or up to date, 1 a bug, 2 usage, 3 check failed, 65 bad data, 66 input missing or
unreadable, 69 device or memory, 70 numeric, 73 output exists, 74 reading or writing failed, 75 locked, 77 untrusted, 78 config, 128+n signal n.
"""


@cache
def parser(only: Command | None = None) -> Callable[..., Any]:
    """What parses a command line, built once: called without standalone mode it returns the command and its values.

    Args:
        only: the command that is named, where one is: the options of the others take longer to build than to run many a command.
    """
    app = typer.Typer(
        name="bnncli",
        cls=QuickGroup,
        help=ABOUT,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings=SETTINGS,
    )
    app.callback()(_root)
    groups: dict[str, typer.Typer] = {}
    for command in all_commands() if only is None else (only,):
        parent, name = app, command.name
        if command.parent:
            if command.parent not in groups:
                groups[command.parent] = typer.Typer(
                    cls=QuickGroup,
                    help="Show how options are set.",
                    rich_markup_mode=None,
                    no_args_is_help=True,
                    context_settings=SETTINGS,
                )
                app.add_typer(groups[command.parent], name=command.parent, rich_help_panel=command.section)
            parent, name = groups[command.parent], command.name.removeprefix(command.parent + "-")
        examples = "\b\nExamples:\n" + "\n".join(_pasteable(example) for example in command.examples)
        parent.command(
            name,
            cls=_Command,
            help=f"{command.summary}\n\n{command.details}",
            short_help=command.summary,
            epilog=examples,
            rich_help_panel=command.section,
            context_settings=SETTINGS,
            no_args_is_help=any(not a.is_optional for a in command.arguments),
        )(_function(command))
    parse: Callable[..., Any] = get_command(app)
    return parse


class _Command(QuickCommand):
    """A command whose help describes its own options, and names those that most commands have; --help-all describes all."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options, and the names of the common ones."""
        if ctx.meta.get(_EVERYTHING):
            super().format_options(ctx, formatter)
            return
        common = [one for one in self.get_params(ctx) if one.name in _common_names()]
        own = [one for one in self.get_params(ctx) if one not in common]
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            records = [one.get_help_record(ctx) for one in own if one.param_type_name == kind]
            if any(records):
                with formatter.section(title):
                    formatter.write_dl([record for record in records if record is not None])
        with formatter.section("Common options (see --help-all)"):
            names, indent = ", ".join("/".join(reversed(one.opts)) for one in common), " " * formatter.current_indent
            lines = textwrap.wrap(names, formatter.width - len(indent), break_on_hyphens=False)
            formatter.write("".join(f"{indent}{line}\n" for line in lines))


@cache
def _common_names() -> frozenset[str]:
    """Names of the options that most commands have."""
    return frozenset(field.name for group in COMPUTE for field in fields(group))


def _print_everything(ctx: typer.Context, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[_EVERYTHING] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _pasteable(example: str, width: int = 74) -> str:
    """A command on lines that fit the narrowest terminal, each but the last ended by a backslash."""
    lines = textwrap.wrap(example, width, break_long_words=False, break_on_hyphens=False)
    return " \\\n      ".join(["  " + lines[0], *lines[1:]])


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"bnncli {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    return None


def _function(command: Command) -> Callable[..., tuple[Command, dict[str, Any]]]:
    """A function whose signature is the command's arguments and options, as Typer reads them."""
    parameters = [_argument(argument) for argument in command.arguments]
    parameters += [_option(name, spec, hint) for name, (spec, hint) in option_fields(command).items()]
    everything = typer.Option(
        "--help-all", help="Describe the common options too.", is_eager=True, callback=_print_everything
    )
    keywords: dict[str, Any] = {"default": False, "annotation": Annotated[bool, everything]}
    parameters.append(inspect.Parameter(_EVERYTHING, inspect.Parameter.KEYWORD_ONLY, **keywords))

    def body(**values: Any) -> tuple[Command, dict[str, Any]]:
        return command, {name: value for name, value in values.items() if name != _EVERYTHING}

    body.__name__ = command.stage
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return body


def _argument(argument: Argument) -> inspect.Parameter:
    hint: Any = list[Path] if argument.is_many else Path
    default: Any = inspect.Parameter.empty
    if argument.is_optional:
        hint, default = str | None, None
    metavar = argument.name.upper() + ("..." if argument.is_many else "")
    info = typer.Argument(
        help=argument.help,
        metavar=f"[{metavar}]" if argument.is_optional else metavar,
        show_default=False,
        readable=False,  # whether it can be read is for the command to say, with its own exit code
    )
    return inspect.Parameter(
        argument.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
    )


def _option(name: str, spec: Any, hint: Any) -> inspect.Parameter:
    meta = spec.metadata
    flag = flag_of(name)
    names = [flag, *([meta["short"]] if meta["short"] else [])]
    default = default_of(spec)
    choices = choices_of(meta)
    text = help_of(spec)
    if meta["family"]:
        text = f"{text} One of: {', '.join(choices)}."
    is_count = name == "verbose"
    keywords: dict[str, Any] = {
        "help": text,
        "show_default": default is not None and default is not False and default not in ([], "") and not is_count,
    }
    if is_count:
        keywords["count"] = True
    elif meta["metavar"]:
        keywords["metavar"] = meta["metavar"]
    elif choices:  # which the text lists, where a family of parts has them
        keywords["metavar"] = "NAME" if meta["family"] else "|".join(choices)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, typer.Option(*names, **keywords)],
    )
