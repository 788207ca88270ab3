"""Write the reference pages of the documentation from the code: python docs/generate.py [FOLDER].

Commands and options, parts, scores, configuration, exit codes and the Python API are declared once, in the package. These pages
are not committed: the site is built after this script has run.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import bnncli
from bnncli import api, errors, registry
from bnncli.api.commands import CommandMethod
from bnncli.api.create import GivenPredictions
from bnncli.api.predictions import LoadedPredictor
from bnncli.callbacks.fitting import PosteriorFit
from bnncli.cli.commands import all_commands
from bnncli.cli.options import default_of, option_fields
from bnncli.cli.topics import ADVICE, ENVIRONMENT
from bnncli.options.command import COMPUTE, SECTIONS, Command
from bnncli.options.declaration import Setting, choices_of, declarations, flag_of, help_of

FAMILIES = (
    ("data", "Data", "`--data SPLIT=SPEC`"),
    ("models", "Saved models", "`--model KIND:PLACE`"),
    ("networks", "Built-in networks", "`--model NAME`"),
    ("covariances", "Structures", "`fit-laplace --structure NAME`"),
    ("flows", "Flows", "`refine --flow NAME`"),
    ("integrators", "Integrators", "`predict --integrator NAME`"),
)

NAMES = {PosteriorFit: "bnncli.callbacks.lightning.FitPosterior, bnncli.callbacks.transformers.FitPosterior"}


def main() -> None:
    """Write every page."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The pages by name."""
    commands = all_commands()
    found = {}
    for section in SECTIONS:
        own = [command for command in commands if command.section == section]
        if own:
            texts = [command_text(command) for command in sorted(own, key=lambda one: (one.place, one.name))]
            found[f"commands-{section.lower()}"] = "\n".join([f"# {section} commands\n", *texts])
    return found | {
        "common": common_page(),
        "parts": parts_page(),
        "scores": scores_page(),
        "configuration": configuration_page(),
        "exit-codes": exit_codes_page(),
        "python": python_page(),
    }


def cell(text: str) -> str:
    """Text that is safe in a table and in Markdown."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").strip()


def code(text: str) -> str:
    """Code in a cell of a table: bars and angle brackets do not end or hide it."""
    return f"<code>{text.replace('<', '&lt;').replace('|', '&#124;').replace('*', '&#42;')}</code>"


def option_rows(options: dict[str, tuple[Any, Any]]) -> list[str]:
    """A table of options, with their defaults if any has one."""
    rows = []
    for name, (spec, hint) in options.items():
        meta, default = spec.metadata, default_of(spec)
        choices = [str(one) for one in choices_of(meta)]
        metavar = meta["metavar"] or ("" if hint is bool or name == "verbose" else "VALUE")
        names = [code(meta["short"])] if meta["short"] else []
        names.append(code(f"{flag_of(name)} {metavar}".rstrip()))
        text = cell(help_of(spec)) + (f" One of: {', '.join(choices)}." if choices else "")
        is_none = default is None or default is False or default in ([], "") or name == "verbose"
        rows.append((", ".join(names), "" if is_none else code(str(default)), text))
    if not any(default for _, default, _ in rows):
        return ["| Option | Meaning |", "|---|---|", *(f"| {option} | {text} |" for option, _, text in rows)]
    return ["| Option | Default | Meaning |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def command_text(command: Command) -> str:
    """A command's section: what it does, its arguments, examples and options."""
    common = {field.name for group in COMPUTE for field in fields(group)}
    options = option_fields(command)
    own = {name: one for name, one in options.items() if name not in common}
    name = command.name.replace("-", " ", 1) if command.parent else command.name
    lines = [
        f"## {name}\n",
        command.summary,
        "",
        command.details.replace("<", "&lt;"),
        "",
        "```sh",
        *command.examples,
        "```",
        "",
    ]
    lines += [f"- `{one.name.upper()}{'...' if one.is_many else ''}`: {one.help}" for one in command.arguments]
    lines.append("")
    for title in dict.fromkeys(spec.metadata["group"] or "Options" for spec, _ in own.values()):
        members = {one: own[one] for one in own if (own[one][0].metadata["group"] or "Options") == title}
        lines += [f"**{title}**\n", *option_rows(members), ""]
    shared = [f"`{flag_of(one)}`" for one in options if one in common]
    if shared:
        lines += [f"[Common options](common.md): {', '.join(shared)}.", ""]
    return "\n".join(lines)


def common_page() -> str:
    """Options that most commands have."""
    seen: dict[str, tuple[Any, Any]] = {}
    for command in all_commands():
        for name, one in option_fields(command).items():
            if any(name in {field.name for field in fields(group)} for group in COMPUTE):
                seen.setdefault(name, one)
    return "\n".join(["# Common options\n", "Most commands take these.\n", *option_rows(seen), ""])


def first_sentence(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def parts_page() -> str:
    """The parts of the families, with their settings."""
    lines = ["# Models, data, flows, integrators\n"]
    for family, title, how in FAMILIES:
        lines += [f"## {title}\n", f"{how}\n", "| Name | What it is |", "|---|---|"]
        found = declarations(family, "FORM")
        for part in registry.names(family):
            name, text = part, first_sentence(registry.source_of(family, part))
            if part in found:
                name, text = found[part].text, found[part].about
            lines.append(f"| {code(name)} | {cell(text).rstrip('.')} |")
        lines.append("")
        rows = []
        for part, settings in declarations(family, "SETTINGS").items():
            for name, setting in settings.items():
                if isinstance(setting, Setting):
                    default = "" if setting.default is None else f"`{setting.default}`"
                    text = setting.text.replace("{default}", str(setting.default))
                    rows.append(f"| `{part}` | `{flag_of(name)}` | {default} | {cell(text)} |")
        if rows:
            lines += ["| Part | Setting | Default | Meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def scores_page() -> str:
    """Scores and detectors by name."""
    from bnncli.evaluation.detectors import DETECTORS
    from bnncli.evaluation.scores import SCORES

    lines = ["# Scores\n", "`evaluate --metric NAME`, assertions, `compare` and JSON use these names.\n"]
    lines += ["| Name | Column | What it is |", "|---|---|---|"]
    lines += [f"| `{name}` | {cell(score.title)} | {cell(score.definition)} |" for name, score in SCORES.items()]
    lines += [
        "",
        "## Out-of-distribution scores\n",
        "`--score NAME`; see [Outlier scores](../explanation/outliers.md).\n",
    ]
    lines += ["| Name | What it is |", "|---|---|"]
    lines += [f"| `{name}` | {cell(detector.definition)} |" for name, detector in sorted(DETECTORS.items())]
    return "\n".join([*lines, ""])


def configuration_page() -> str:
    """Where options come from."""
    shared = [
        flag_of(name)[2:].replace("-", "_").upper()
        for group in COMPUTE
        for name, spec in ((one.name, one) for one in fields(group))
        if spec.metadata.get("env_common")
    ]
    return textwrap.dedent(f"""\
        # Configuration and environment

        An option's value comes from the first of these that has it:

        1. the command line;
        2. the environment variable `BNNCLI_<COMMAND>_<OPTION>`, such as `BNNCLI_REFINE_EPOCHS=20`;
        3. the environment variable `BNNCLI_<OPTION>` for common options: {", ".join(f"`BNNCLI_{one}`" for one in shared)};
        4. the configuration file: `--config FILE`, else `BNNCLI_CONFIG`, else `./bnncli.toml`;
        5. the default.

        ```toml
        [common]
        device = "cpu"

        [refine]
        flow = "radial"
        epochs = 20
        ```

        `bnncli config show refine` prints every value and where it comes from. An unknown key is an error (exit 78).

        ## Other variables

        | Variable | Effect |
        |---|---|
        """) + "".join(f"| `{name}` | {cell(text)} |\n" for name, text in ENVIRONMENT.items())


def exit_codes_page() -> str:
    """Exit codes with what they mean and what to do."""
    lines = ["# Exit codes\n", "| Code | Name | Meaning, and what to do |", "|---|---|---|"]
    lines += [f"| {int(code)} | {code.name} | {cell(text)} |" for code, text in ADVICE.items()]
    lines += ["| 128+n | signal n | Stopped by a signal: 130 INT, 143 TERM, 129 HUP, 141 PIPE. |", ""]
    closing = "65 to 78 are the values of BSD's `sysexits.h`. See [Troubleshooting](../how-to/troubleshooting.md)."
    return "\n".join([*lines, closing, ""])


def docstring(value: Any) -> list[str]:
    """A docstring as Markdown: sections become lists."""
    lines: list[str] = []
    for line in (inspect.getdoc(value) or "").split("\n"):
        if re.fullmatch(r"(Args|Raises|Returns|Yields|Attributes):", line):
            lines += ["", f"**{line}**", ""]
        elif re.match(r" {4}\S", line):
            lines.append("- " + re.sub(r"^([\w, .*]+): ", r"`\1`: ", line.strip()))
        elif line.startswith("     "):
            lines.append("  " + line.strip())
        else:
            lines.append(line)
    return [line.replace("<", "&lt;") for line in lines]


def signature(function: Any) -> str:
    """A function's arguments, without the quotes of annotations that are not evaluated."""
    return str(inspect.signature(function)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")


def python_page() -> str:
    """What `import bnncli` gives, from docstrings."""
    lines = ["# Python API\n", "See [Python](../how-to/python.md) for an example.\n"]
    for function in (bnncli.open, bnncli.from_torch, bnncli.from_features, bnncli.from_predictions):
        lines += [f"## `bnncli.{function.__name__}{signature(function)}`\n", *docstring(function), ""]
    for kind in (
        api.OpenedRun,
        api.CommandResult,
        api.OpenedPosterior,
        api.ClassProbabilities,
        LoadedPredictor,
        api.SplitArrays,
        GivenPredictions,
        bnncli.BayesianClassifier,
        PosteriorFit,
    ):
        lines += [f"## `{NAMES.get(kind, kind.__name__)}`\n", *docstring(kind), ""]
        for name, member in vars(kind).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                lines += [f"### `{name}`\n", *docstring(member.fget), ""]
            elif isinstance(member, CommandMethod):
                lines += [f"### `{name}(**options)`\n", f"Runs [`{member.command}`](options.md).", ""]
            elif inspect.isfunction(member):
                lines += [f"### `{name}{signature(member)}`\n", *docstring(member), ""]
    lines += ["## `bnncli.errors`\n", "Every error has `exit`, `code`, `message`, `hint` and `path`.\n"]
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.BnnError):
            lines.append(f"- `{value.__name__}`: {(inspect.getdoc(value) or '').split(chr(10))[0]}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
