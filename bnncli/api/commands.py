"""Methods of an opened run that run commands: the same code and defaults, with keywords in place of options."""

from __future__ import annotations

import html
import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.api.session import (
    Listener,
    Session,
    check_typed,
    convert_errors_to_python,
    keywords,
    refuse_exits,
)
from bnncli.console import Console
from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.names import near_miss
from bnncli.options.command import CommandLine, CommonOptions, ComputeOptions, RunOptions
from bnncli.options.declaration import Declared, build_options, declaration, help_of, map_options, spell_options
from bnncli.progress import Task
from bnncli.session.run import Table, begin_run, result_document
from bnncli.session.tracking import execute_and_log
from bnncli.system.devices import keep_random_state

if TYPE_CHECKING:
    from pandas import DataFrame

    from bnncli.api.run import OpenedRun


@dataclass(frozen=True, eq=False, repr=False)
class CommandResult:
    """The result of a command.

    Attributes:
        command: name of the command, such as fit-laplace.
        document: as its --json.
        tables: as it prints them, cells as text.
        lines: further result lines.
    """

    command: str
    document: Mapping[str, Any]
    tables: tuple[Table, ...]
    lines: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command prints with --json."""
        return dict(self.document)

    def to_pandas(self, table: int = 0) -> DataFrame:
        """Return a table as a DataFrame, with columns of numbers where all cells are numbers, as printed.

        Raises:
            UsageError: the result has no such table; use to_dict.
            ImportError: pandas is not installed.
        """
        import pandas as pd  # optional

        if not 0 <= table < len(self.tables):
            raise UsageError(f"table: {self.command} has {len(self.tables)} tables; got {table}; see to_dict()")
        chosen = self.tables[table]
        frame = pd.DataFrame(chosen.rows, columns=chosen.columns)
        for column, cells in frame.items():
            numbers = pd.to_numeric(cells.where(~cells.isin(["", "-"])), errors="coerce")
            if numbers.notna().any() and numbers.isna().eq(cells.isin(["", "-"])).all():
                frame[column] = numbers
        return frame

    def __repr__(self) -> str:
        outputs = [Path(one["path"]).name for one in self.document.get("outputs", [])]
        words = [str(self.document.get("action", "")), ", ".join(outputs)]
        return f"<{self.command}: {' '.join(filter(None, words)) or 'done'}>"

    def __str__(self) -> str:
        texts = []
        for table in self.tables:
            widths = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
            rows = (zip(row, widths, strict=True) for row in (table.columns, *table.rows))
            texts += ["  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in rows]
            texts += [*table.notes, ""]
        return "\n".join([*texts, *self.lines]).strip() or repr(self)

    def _repr_html_(self) -> str:
        """Return the tables and lines for a notebook."""
        found = []
        for table in self.tables:
            rows = [("th", table.columns), *(("td", row) for row in table.rows)]
            cells = ("".join(f"<{tag}>{html.escape(one)}</{tag}>" for one in row) for tag, row in rows)
            title = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
            found.append(f"<table>{title}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
            found += [f"<p>{html.escape(note)}</p>" for note in table.notes]
        found += [f"<p>{html.escape(line)}</p>" for line in self.lines]
        return "".join(found) or f"<code>{html.escape(repr(self))}</code>"


class _CommandListener(Listener):
    """Warnings as Python warnings; progress on stderr if asked for."""

    def __init__(self, command: str, *, progress: bool) -> None:
        super().__init__()
        self.console = Console(command, CommonOptions(quiet=not progress))

    def info(self, text: str) -> None:
        """Show a line with the progress."""
        self.console.info(keywords(text))

    def poll(self, where: str = "") -> None:
        """Raise BudgetSpent past a deadline, as that of auto."""
        self.console.poll(where)

    def task(self, name: str, total: int) -> Task:
        """Return a task of the console."""
        return self.console.task(name, total)


# Set elsewhere in Python: output, the run folder, and torch's own settings.
_NOT_KEYWORDS = {*map_options(CommonOptions), *map_options(RunOptions), "shards", "threads", "deterministic"}


def list_keywords(groups: tuple[type, ...]) -> Declared:
    """Map the keywords of a command to their declarations."""
    found: Declared = {}
    for group in groups:
        found |= map_options(group)
    return {name: one for name, one in found.items() if name not in _NOT_KEYWORDS}


def _convert(name: str, value: object, hint: Any) -> Any:
    """Return a keyword's value in the option's type: one value for a list, a path or number for a text.

    Raises:
        UsageError: the value has another type.
    """
    kinds = [one for one in typing.get_args(hint) or (hint,) if one is not type(None)]
    if typing.get_origin(hint) is list:
        return [_convert(name, one, str) for one in (value if isinstance(value, list | tuple) else [value])]
    if kinds[0] is str and isinstance(value, PathLike):
        return str(fspath(value))
    if kinds[0] is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return check_typed(name, value, kinds[0])


# Commands that make a posterior of features and a last layer, in order, by the posterior's name.
METHODS = {
    "temperature": ("fit-temperature",),
    "stack": ("stack",),
    "laplace": ("fit-laplace",),
    "refine": ("fit-laplace", "refine"),
    "hmc": ("fit-laplace", "hmc"),
    "auto": ("auto",),
}


def convert_keywords(command: str, given: Mapping[str, object], *, method: str) -> dict[str, Any]:
    """Return a command's keywords in the types of its options; None leaves a default.

    Raises:
        UsageError: there is no such option, or a value has another type.
    """
    known = list_keywords(declaration("commands", command, "COMMAND").groups)
    for name in given:
        if name not in known:
            hint = near_miss(name, [*known]) or f"see the options of bnncli {command}"
            raise UsageError(f"{method}: unexpected keyword {name!r}", hint=hint)
    return {name: _convert(name, value, known[name][1]) for name, value in given.items() if value is not None}


def check_keywords(command: str, given: Mapping[str, object], *, method: str) -> None:
    """Raise UsageError unless the command takes the keywords and their values."""
    with convert_errors_to_python():
        chosen = convert_keywords(command, given, method=method)
        for group in declaration("commands", command, "COMMAND").groups:
            build_options(group, chosen)


def run_command(
    session: Session, command: str, given: Mapping[str, object], *, method: str, progress: bool = False
) -> CommandResult:
    """Run a command on the session's run.

    Args:
        given: options by name; None leaves a default.
        method: name of the caller, for messages.

    Raises:
        UsageError: there is no such option, or a value does not fit.
        CheckFailed: the command's verdict is negative, after everything is written.
    """
    from threadpoolctl import ThreadpoolController

    with (
        session.computing() as opened,
        keep_random_state(),
        refuse_exits(),
        ThreadpoolController().select(internal_api="openblas").limit(limits=1),  # as the commands, to round alike
    ):
        module = registry.load_module("commands", command)
        groups = module.COMMAND.groups
        chosen = convert_keywords(command, given, method=method)
        compute = {"seed": opened.compute.seed, "device": opened.compute.device}
        options = {group: build_options(group, chosen) for group in groups}
        options[RunOptions] = opened.run_options
        if ComputeOptions in options:
            options[ComputeOptions] = build_options(ComputeOptions, compute | chosen)
        place = Path(opened.arguments["ckpt"])
        line = CommandLine.of(command, str(place), *(options[group] for group in groups if group is not CommonOptions))
        listener = _CommandListener(command, progress=progress)
        first = module.COMMAND.arguments[0]
        run, own = begin_run(line, {first.name: [place] if first.is_many else place}, listener, options)
        with closing(listener.console), torch.inference_mode(False), torch.enable_grad():
            result = execute_and_log(module, run, own)
        if result.failure is not None:
            raise result.failure
        lines = [*result.lines, *(result.summary if not result.tables else [])]
        document, tables, texts = spell_options(
            [result_document(run, result), [vars(table) for table in result.tables], lines], str
        )
        return CommandResult(command, document, tuple(Table(**table) for table in tables), tuple(texts))


class CommandMethod:
    """A method that runs a command. Its signature and docstring come from the command's declaration, when looked at."""

    def __init__(self, command: str) -> None:
        self.command, self.name = command, command.replace("-", "_")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, run: OpenedRun | None, owner: type | None = None) -> Callable[..., CommandResult]:
        def call(*, progress: bool = False, **options: Any) -> CommandResult:
            assert run is not None
            return run_command(run.session, self.command, options, method=self.name, progress=progress)

        declared = declaration("commands", self.command, "COMMAND")
        known = list_keywords(declared.groups)
        call.__name__, call.__qualname__ = self.name, f"OpenedRun.{self.name}"
        of_run = {"seed", "device"}  # of `open`, unless given
        texts = [
            f"    {name}: {spell_options(help_of(spec), str)}{' Default: that of the run.' if name in of_run else ''}"
            for name, (spec, _) in known.items()
        ]
        about = f"{declared.summary} Runs `bnncli {self.command}`.\n\n{declared.details}"
        call.__doc__ = "\n".join([about, "", "Args:", "    progress: show progress on stderr.", *texts])
        parameters = [inspect.Parameter("progress", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)]
        for name, (spec, hint) in known.items():
            default = [] if typing.get_origin(hint) is list else None if name in of_run else spec.default
            keyword: dict[str, Any] = {"default": default, "annotation": hint | None if name in of_run else hint}
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **keyword))
        call.__signature__ = inspect.Signature(parameters, return_annotation=CommandResult)  # type: ignore[attr-defined]
        return call
