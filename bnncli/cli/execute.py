"""Run one command. Every error becomes a message, an exit code and, with --json, a document."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shlex
import sys
import time
from dataclasses import fields, replace
from typing import Any, TextIO

from bnncli import registry
from bnncli.artifacts.known_files import remember_checks
from bnncli.cli import spread
from bnncli.cli.build import parser
from bnncli.cli.commands import find_command, is_parent
from bnncli.cli.options import (
    OptionValue,
    config_path,
    describe_unknown_variables,
    option_fields,
    read_config,
    resolve,
    resolve_named,
)
from bnncli.console import Console
from bnncli.errors import ELSEWHERE, BnnError, Exit, UsageError, WriteError, bug, left_by, machine_error
from bnncli.names import count_noun, printable
from bnncli.options.command import (
    Command,
    CommandLine,
    CommonOptions,
    ComputeOptions,
    TrackOptions,
)
from bnncli.options.declaration import build_options, flag_of, spell_options
from bnncli.system import signals
from bnncli.system.workers import LOST

_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", re.DOTALL)
_INVALID = re.compile(r": '(.*)' is not a valid (int|float|bool)", re.DOTALL)
_EXPECTED = {"float": "a number", "int": "a whole number", "bool": "true or false"}


def usage_words(error: Any) -> str:
    """Return the message for a usage error of Typer, rewritten where Typer's own is unclear."""
    said = str(error.format_message())
    context = getattr(error, "ctx", None)
    if (extra := _EXTRA.fullmatch(said)) and context is not None:
        taken = [str(one.name).upper() for one in context.command.params if one.param_type_name == "argument"]
        return f"expected {count_noun(len(taken), 'argument')}{''.join(f', {one}' for one in taken)}; got {extra[1]!r} as well"
    param, faults = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if faults is not None:  # Typer 0.27 and newer
        kind, came = faults()[0]["type"].partition("_")[0], str(faults()[0]["input"])
    else:
        found = _INVALID.search(said)
        kind, came = (found[2], found[1]) if found else ("", "")
    if param is None or kind not in _EXPECTED:
        return said
    name = param.opts[-1] if param.param_type_name == "argument" else max(param.opts, key=len)
    return f"{name}: expected {_EXPECTED[kind]}; got {came!r}"


WIDE = 100_000
_EMPTY = ("", "-")  # a column with only these cells is hidden


def print_table(table: Any, stream: TextIO) -> None:
    """Print a Table (bnncli.session.run.Table): title, header, rows, notes."""
    from rich.console import Console

    console = Console(file=stream, width=None if stream.isatty() else WIDE, highlight=False, emoji=False, markup=False)
    console.begin_capture()  # otherwise rich exits on a broken pipe
    is_narrow = stream.isatty() and bool(table.narrow) and _width(table) > console.width
    for part in table.narrow if is_narrow else [table]:
        _draw(part, console, is_terminal=stream.isatty())
    for note in table.notes:
        console.print(printable(spell_options(note)), soft_wrap=True)
    stream.write(console.end_capture())


def _draw(table: Any, console: Any, *, is_terminal: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if table.title:
        console.print(printable(spell_options(table.title)), soft_wrap=True)
    drawn = Table(box=box.SIMPLE_HEAD if is_terminal else box.ASCII2, show_edge=is_terminal, pad_edge=False)
    shown = [
        i
        for i in range(len(table.columns))
        if i == 0 or not table.rows or any(row[i].strip() not in _EMPTY for row in table.rows)
    ]
    for i in shown:
        is_number = i > 0 and all(_is_number(row[i]) for row in table.rows)
        drawn.add_column(Text(printable(table.columns[i])), justify="right" if is_number else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(spell_options(row[i]))) for i in shown))
    console.print(drawn)


def _width(table: Any) -> int:
    """Return the width of the unwrapped table, in characters."""
    widths = [max(len(row[i]) for row in [table.columns, *table.rows]) for i in range(len(table.columns))]
    return sum(widths) + 2 * len(widths) + 2


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "-+.0123456789"


def run_command_line(argv: list[str], results: TextIO) -> int:
    """Run one command line and return its exit code. Results go to `results`, everything else to stderr.

    Expected failures never raise. A traceback is shown only for a bug, or with -v.
    """
    invocation = _Invocation(argv, results)
    signals.install_handlers()
    stdout = sys.stdout
    sys.stdout = results
    try:
        with remember_checks():
            return invocation.run()
    except BrokenPipeError:
        _forget(results)
        return 141
    except OSError as error:  # stdout is full
        _forget(results)
        if invocation.code != Exit.IO:
            invocation.console.error(WriteError(f"writing the result failed: {os.strerror(error.errno or 0)}"))
        return int(Exit.IO)
    finally:
        sys.stdout = stdout
        signals.forget_received()


class _Invocation:
    """One command line, from parsing to the exit code."""

    def __init__(self, argv: list[str], results: TextIO) -> None:
        self.argv, self.results = _rewrite_help_word(argv), results
        self.command = next((word for word in self.argv if not word.startswith("-")), "bnncli")
        self.console = Console(self.command, CommonOptions())
        self.is_json = "--json" in argv
        self.started = time.monotonic()
        self.code: int = Exit.OK
        self.settings: dict[str, OptionValue] = {}
        self.line: CommandLine | None = None

    def run(self) -> int:
        try:
            try:
                if (parsed := self._parse()) is not None:
                    self.execute(*parsed)
            except Exception as error:
                self._fail(error)
            except SystemExit as error:
                self._fail(left_by(error))
            self.results.flush()
        finally:
            self.console.close()
        return int(self.code)

    def _parse(self) -> tuple[Command, dict[str, Any]] | None:
        """Return the command and its values; None after --help or completion. Raises BrokenPipeError for exit 1."""
        self._check_order()
        parse, defaults = parser(self._named_command()), self._defaults()
        try:
            found = parse(args=list(self.argv), prog_name="bnncli", standalone_mode=False, default_map=defaults)
        except SystemExit as left:
            if left.code:
                raise BrokenPipeError from None
            return None
        return found if isinstance(found, tuple) else None

    def _check_order(self) -> None:
        """Raise UsageError, with the corrected command line, if options of a command precede its name."""
        leading = list(itertools.takewhile(lambda word: word.startswith("-") and word != "--", self.argv))
        command = self._named_command() if leading else None
        if command is None:
            return
        known = {flag_of(name): spec for name, (spec, _) in option_fields(command).items()}
        known |= {spec.metadata["short"]: spec for spec in known.values() if spec.metadata["short"]}
        if all(word.partition("=")[0] in known for word in leading):
            raise UsageError(
                f"expected a command first; got {leading[0]}, an option of {command.name}",
                hint=shlex.join(["bnncli", *self.argv[len(leading) :], *leading]),
            )

    def _defaults(self) -> dict[str, Any]:
        """Return the command's values from the environment and the configuration file."""
        command = self._named_command()
        if command is None or {"--help", "--help-all", "-h"} & set(self.argv):
            return {}
        config = read_config(config_path(_value_of(self.argv, "--config"), os.environ))
        self.settings = settings = resolve(command, config)
        for text in describe_unknown_variables(os.environ):
            self.console.warn(text)
        self.is_json = self.is_json or bool(settings["json"].value)
        values = {name: setting.value for name, setting in settings.items() if setting.source != "default"}
        if not command.parent:
            return {command.name: values}
        return {command.parent: {command.name.removeprefix(command.parent + "-"): values}}

    def _named_command(self) -> Command | None:
        return find_command([word for word in self.argv if not word.startswith("-")])

    def execute(self, command: Command, values: dict[str, Any]) -> None:
        """Build the options, run the command, print the result."""
        self.command = command.name
        module = registry.load_module("commands", command.name)
        command = replace(module.COMMAND, name=command.name)  # replaces the option classes read for help
        options: dict[type, Any] = {group: build_options(group, values) for group in command.groups}
        common = spread.silence_options(options[CommonOptions]) if spread.is_follower() else options[CommonOptions]
        self.is_json = common.json
        self.line = self._line(command)
        if any(os.path.isfile(value) for _, value in self.line.parts):
            from bnncli.cli.places import check_outputs  # imported late: loads run folders

            check_outputs(command, self.line, config_path(common.config, os.environ))
        self.console = Console(command.name, common)
        if common.verbose >= 2:
            logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, force=True)
        from bnncli.session.run import begin_run
        from bnncli.session.tracking import execute_and_log

        arguments = {argument.name: values[argument.name] for argument in command.arguments}
        if command.name == "config-show":
            arguments["resolved"] = resolve_named(arguments["of"], common.config)
        if command.name == "help":
            from bnncli.cli.topics import lines_of  # imported late: rarely needed

            arguments["lines"] = lines_of(arguments["topic"])
        compute = spread.own_device(options.get(ComputeOptions, ComputeOptions()))
        beside = {"compute": compute, "started": self.started}
        run, own = begin_run(self.line, arguments, self.console, options, **beside)
        with (
            spread.redirect_prints(),
            spread.join_workers(command.name, own, compute, self.console) as has_work,
        ):
            result = execute_and_log(module, run, own) if has_work else None
        self.console.stop_bar()
        if result is not None and not spread.is_follower():
            self._print(run, result)

    def _line(self, command: Command) -> CommandLine:
        """Return the command line, including options from the environment and configuration, for the record."""
        num_words = (self.argv[0] == "--") + (2 if command.parent else 1)  # the words that name the command
        line = CommandLine.parse(command.name, self.argv[num_words:], command.groups)
        for name, setting in self.settings.items():
            if not line.gives(name) and setting.source != "default" and name not in _NOT_RECORDED:
                line = line.having(name, setting.value)
        return line

    def _print(self, run: Any, result: Any) -> None:
        for line in result.summary:
            self.console.info(line)
        failure = result.failure
        if failure is not None:
            self._advise(failure)
        if self.is_json:
            from bnncli.session.run import result_document  # imported late, as above

            document = result_document(run, result)
            if failure is not None:
                document |= {"ok": False, "exit": int(failure.exit), "error": _error_json(failure)}
            self._print_json(document)
        else:
            for table in result.tables:
                print_table(table, self.results)
            paths = [output["path"] for output in result.outputs] if not result.tables else []
            for line in result.lines or paths:
                print(printable(line, keep_bytes=not self.results.isatty()), file=self.results)
        if failure is not None:
            self.results.flush()  # keeps the error last when both streams are the same
            self.console.error(failure)
            self.code = failure.exit

    def _print_json(self, document: dict[str, Any]) -> None:
        print(json.dumps(spell_options(document), allow_nan=False), file=self.results)

    def _advise(self, error: BnnError) -> None:
        """Add the options of this command that help, such as --device cpu when a GPU is out of memory."""
        if error.code == "out_of_memory":
            command, is_gpu = self._named_command(), "cuda" in error.message.lower()
            if error.hint is None:
                error.hint = memory_advice(command, is_gpu=is_gpu)
            elif is_gpu and command is not None and "device" in option_fields(command):
                error.hint = f"{error.hint}, or --device cpu"
        if error.hint == ELSEWHERE:
            from bnncli.cli.places import place_advice  # imported late: loads run folders

            error.hint = place_advice(self._named_command(), self.line, error.path)

    def _fail(self, error: Exception) -> None:
        """Set the exit code for an exception and print its message and, with --json, its document."""
        if isinstance(error, BrokenPipeError):
            raise error
        known = _convert_error(error)
        if known is None:
            if type(error).__name__ == "Exit":
                self.code = getattr(error, "exit_code", 0)
                return
            if type(error).__name__ == "NoArgsIsHelpError":
                self.code = Exit.USAGE
                print(getattr(error, "message", ""), file=sys.stderr)
                return
            known = bug(error)
            self.console.stop_bar()
            self.console.traceback(error)
        elif self.console.options.verbose:
            self.console.traceback(error)
        self._advise(known)
        self.console.stop_bar()
        self.code = known.exit
        if spread.is_follower():
            if known.code == LOST or known.exit not in (Exit.BUG, Exit.DEVICE, Exit.IO):
                return  # worker 0 or the failed worker reports the error
            known.message = f"worker {os.environ['RANK']}: {known.message}"
        elif self.is_json:
            self._print_json(
                {
                    "schema": "bnncli.result/1",
                    "ok": False,
                    "command": self.command,
                    "exit": int(known.exit),
                    "error": _error_json(known),
                    "warnings": self.console.warnings,
                }
            )
        self.console.error(known)


_NOT_RECORDED = {spec.name for group in (CommonOptions, TrackOptions) for spec in fields(group)} | {
    "force",
    "dry_run",
    "wait",
    "run_dir",
}


def _rewrite_help_word(argv: list[str]) -> list[str]:
    """Rewrite `help COMMAND` as `COMMAND --help`; return other words unchanged."""
    if argv[:1] != ["help"]:
        return argv
    words = sorted(argv[1:], key=lambda word: word.startswith("-"))
    is_command = find_command(words) is not None or is_parent(words[:1])
    return [*words, "--help"] if is_command else argv


def _error_json(error: BnnError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "path": error.path, "hint": error.hint}


def _convert_error(error: Exception) -> BnnError | None:
    """Return the exception as a BnnError; None for a bug or for Typer's own exits."""
    if isinstance(error, BnnError):
        return error
    if hasattr(error, "format_message") and getattr(error, "exit_code", None) == Exit.USAGE:
        if type(error).__name__ == "NoArgsIsHelpError":
            return None
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "bnncli"
        return UsageError(usage_words(error), hint=f"{path} --help")
    return machine_error(error)


def _value_of(argv: list[str], flag: str) -> str | None:
    """Return the value of an option in raw words, as `--flag VALUE` or `--flag=VALUE`."""
    for position, word in enumerate(argv):
        if word == flag and position + 1 < len(argv):
            return argv[position + 1]
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
    return None


def _forget(stream: TextIO) -> None:
    """Discard what is buffered for a closed pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


# Options that reduce memory use, most effective first.
_WAYS = {
    "structure": "a smaller {}",
    "chains": "fewer {}",
    "repeats": "fewer {}",
    "batch_size": "a smaller {}",
    "samples": "fewer {}",
    "grid_size": "a smaller {}",
    "posterior": "fewer {} at a time",
}


_MOST_NAMED = 2


def memory_advice(command: Command | None, *, is_gpu: bool) -> str:
    """Return what to do when a command runs out of memory.

    Args:
        command: None before it is known.
        is_gpu: whether GPU memory ran out.
    """
    options = option_fields(command) if command is not None else {}
    ways = [text.format(flag_of(name)) for name, text in _WAYS.items() if name in options][:_MOST_NAMED]
    if is_gpu and "device" in options:
        ways.append("--device cpu")
    return "use " + " or ".join(ways) if ways else "free memory, or use a machine with more"
