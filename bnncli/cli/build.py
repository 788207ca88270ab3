"""Build the Typer application from the list of commands and their option classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from bnncli import __version__
from bnncli.cli.commands import all_commands
from bnncli.cli.completion import completes, completes_argument
from bnncli.cli.help import EVERYTHING, MAX_WIDTH, HelpCommand, HelpGroup, print_everything
from bnncli.cli.options import default_of, option_fields
from bnncli.options.command import Argument, Command
from bnncli.options.declaration import choices_of, flag_of, help_of

WIDEST = 80  # characters of choices shown as the metavar; longer lists go into the help text
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH}
ABOUT = """Turn a saved classifier checkpoint into a Bayesian one, post hoc.

Try `bnncli demo` first. The usual steps are extract-features, auto, predict, report.

Exit codes: see `bnncli help exit-codes`. Other topics: see `bnncli help`.
"""


@cache
def parser(only: Command | None = None) -> Callable[..., Any]:
    """Return a parser, which returns the command and its values when called without standalone mode. Cached.

    Args:
        only: the command on the command line, if known. Building the options of all commands takes longer than running
            many a command.
    """
    app = typer.Typer(
        name="bnncli",
        cls=HelpGroup,
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
                    cls=HelpGroup,
                    help="Show how options are set.",
                    rich_markup_mode=None,
                    no_args_is_help=True,
                    context_settings=SETTINGS,
                )
                app.add_typer(groups[command.parent], name=command.parent, rich_help_panel=command.section)
            parent, name = groups[command.parent], command.name.removeprefix(command.parent + "-")
        parent.command(
            name,
            cls=type("Command", (HelpCommand,), {"command": command}),
            help=f"{command.summary}\n\n{command.details}",
            short_help=command.summary,
            rich_help_panel=command.section,
            context_settings=SETTINGS,
            no_args_is_help=any(not a.is_optional for a in command.arguments),
        )(_function(command))
    parse: Callable[..., Any] = get_command(app)
    return parse


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
    """Return a function whose signature is the command's arguments and options, for Typer."""
    parameters = [_argument(argument) for argument in command.arguments]
    parameters += [_option(name, spec, hint) for name, (spec, hint) in option_fields(command).items()]
    everything = typer.Option("--help-all", help="Describe all options.", is_eager=True, callback=print_everything)
    keywords: dict[str, Any] = {"default": False, "annotation": Annotated[bool, everything]}
    parameters.append(inspect.Parameter(EVERYTHING, inspect.Parameter.KEYWORD_ONLY, **keywords))

    def body(**values: Any) -> tuple[Command, dict[str, Any]]:
        return command, {name: value for name, value in values.items() if name != EVERYTHING}

    body.__name__ = command.module
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
        autocompletion=completes_argument(argument.name),
        readable=False,  # the command checks readability itself, with its own exit code
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
    is_listed = meta["family"] or len("|".join(choices)) > WIDEST
    if is_listed:
        text = f"{text} One of: {', '.join(choices)}."
    if isinstance(default, list):
        text = f"{text} [repeatable]"
    is_count = name == "verbose"
    keywords: dict[str, Any] = {
        "help": text,
        "autocompletion": completes(name, meta),
        "show_default": default is not None
        and default is not False
        and default not in ([], "")
        and not is_count
        and "Default:" not in text,
    }
    if is_count:
        keywords["count"] = True
    elif meta["metavar"]:
        keywords["metavar"] = meta["metavar"]
    elif choices:
        keywords["metavar"] = "NAME" if is_listed else "|".join(choices)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, typer.Option(*names, **keywords)],
    )
