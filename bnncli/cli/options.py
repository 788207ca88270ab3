"""Resolve option values from the command line, the environment and the configuration file.

Precedence: flag, BNNCLI_<COMMAND>_<OPTION>, BNNCLI_<OPTION> for options common to commands, configuration file,
default.
"""

from __future__ import annotations

import difflib
import os
import typing
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from typing import Any

from bnncli.cli.commands import all_commands
from bnncli.errors import ConfigError, UsageError
from bnncli.names import unknown_value_error
from bnncli.options.command import Command
from bnncli.options.declaration import check_value, flag_of, map_options
from bnncli.options.toml import base_type, closest, faults_of, line_of, option_value, read_toml, type_name


@dataclass(frozen=True)
class OptionValue:
    """A value and its source: default, config, or the environment variable's name."""

    value: Any
    source: str


def option_fields(command: Command) -> dict[str, tuple[Field[Any], Any]]:
    """Map each option of a command to its dataclass field and resolved type."""
    found: dict[str, tuple[Field[Any], Any]] = {}
    for group in command.groups:
        found |= map_options(group)
    return found


def default_of(spec: Field[Any]) -> Any:
    """Return the declared default of a field."""
    return spec.default_factory() if spec.default_factory is not MISSING else spec.default


def config_path(argument: str | None, environ: typing.Mapping[str, str]) -> Path | None:
    """Return the configuration file: --config, else BNNCLI_CONFIG, else ./bnncli.toml if it exists."""
    for given in (argument, environ.get("BNNCLI_CONFIG")):
        if given:
            return Path(given)
    local = Path("bnncli.toml")
    return local if local.is_file() else None


def read_config(path: Path | None) -> dict[str, dict[str, Any]]:
    """Read and check the tables of a configuration file; {} without one.

    Raises:
        MissingInput: the file does not exist.
        ConfigError: the file is not TOML or is too large, a table or key is unknown, or a value has the wrong type.
    """
    if path is None:
        return {}
    raw, tables = read_toml(path, what="the configuration file ")
    known = {command.name: option_fields(command) for command in all_commands()}
    known["common"] = {name: entry for options in known.values() for name, entry in options.items()}
    return {table: _check_table(path, raw, table, keys, known) for table, keys in tables.items()}


def _check_table(
    path: Path, raw: bytes, table: str, keys: Any, known: dict[str, dict[str, tuple[Field[Any], Any]]]
) -> dict[str, Any]:
    if table not in known or not isinstance(keys, dict):
        raise ConfigError(
            f"{path}{line_of(raw, table)}: unknown table [{table}]{closest(table, list(known))}", path=path
        )
    checked = {}
    for key, value in keys.items():
        name = key.replace("-", "_")
        name = f"{name}_" if f"{name}_" in known[table] else name  # such as assert_, renamed from a Python keyword
        if name not in known[table]:
            choices = [flag_of(entry)[2:] for entry in known[table]]
            message = f"{path}{line_of(raw, key)}: unknown key {key!r} in [{table}]{closest(key, choices)}"
            raise ConfigError(message, path=path)
        spec, hint = known[table][name]
        with faults_of(path):
            checked[name] = option_value(spec, hint, value, f"{path}{line_of(raw, key)}: [{table}] {key}")
    return checked


def resolve(
    command: Command, config: dict[str, dict[str, Any]], environ: typing.Mapping[str, str] | None = None
) -> dict[str, OptionValue]:
    """Return the value and source of each option of a command, before the command line is applied."""
    environ = os.environ if environ is None else environ
    settings = {}
    for name, (spec, hint) in option_fields(command).items():
        setting = OptionValue(default_of(spec), "default")
        for table in ("common", command.name):
            if name in config.get(table, {}):
                setting = OptionValue(config[table][name], f"config [{table}]")
        for variable in _variables(command, name, spec):
            if variable in environ and variable != "BNNCLI_CONFIG":
                setting = OptionValue(_parse_text(environ[variable], hint, variable), variable)
                check_value(spec, setting.value, variable)
                break
        settings[name] = setting
    return settings


def _variables(command: Command, name: str, spec: Field[Any]) -> list[str]:
    """Return the environment variables that set an option, by precedence."""
    names = [f"BNNCLI_{command.name}_{name}"] + ([f"BNNCLI_{name}"] if spec.metadata["env_common"] else [])
    return [entry.rstrip("_").upper().replace("-", "_") for entry in names]


def describe_unknown_variables(environ: typing.Mapping[str, str]) -> list[str]:
    """Return a warning for each BNNCLI_ variable that no command reads, with the nearest known one."""
    given = sorted(name for name in environ if name.startswith("BNNCLI_"))
    if not given:  # the usual case; listing all known variables takes as long as parsing
        return []
    known = {"BNNCLI_CONFIG", "BNNCLI_GPUS"}
    for command in all_commands():
        for name, (spec, _) in option_fields(command).items():
            known |= {*_variables(command, name, spec)}
    unknown = [name for name in given if name not in known]
    near = {name: difflib.get_close_matches(name, sorted(known), n=1) for name in unknown}
    return [f"no command reads {name}" + (f"; did you mean {near[name][0]}?" if near[name] else "") for name in unknown]


def resolve_named(name: str | None, config_file: str | None) -> dict[str, dict[str, OptionValue]]:
    """Return the settings of the command `name`, or of all commands for None. Raises UsageError for an unknown command."""
    config = read_config(config_path(config_file, os.environ))
    wanted = [command for command in all_commands() if name in (None, command.name)]
    if not wanted:
        raise unknown_value_error("config show", name, [command.name for command in all_commands()])
    return {command.name: resolve(command, config) for command in wanted}


def _parse_text(text: str, hint: Any, variable: str) -> Any:
    """Convert the text of an environment variable; lists are separated by semicolons."""
    base = base_type(hint)
    if base is bool:
        word = text.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off", ""):
            return False
        raise UsageError(f"{variable}: expected true or false; got {text!r}")
    if base is list:
        return [item.strip() for item in text.split(";") if item.strip()]
    try:
        return base(text)
    except ValueError:
        raise UsageError(f"{variable}: expected {type_name(hint)}; got {text!r}") from None
