"""The topics of `bnncli help`, generated from the registries."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from shutil import get_terminal_size

from bnncli.cli.commands import own_commands
from bnncli.cli.help import MAX_WIDTH
from bnncli.cli.options import option_fields
from bnncli.errors import Exit
from bnncli.names import unknown_value_error
from bnncli.options.command import COMPUTE, Command
from bnncli.options.declaration import Form, choices_of, declarations, flag_of, help_of
from bnncli.options.toml import base_type
from bnncli.registry import names

# Meaning of each exit code, and what to do.
ADVICE = {
    Exit.OK: "Done, or already up to date.",
    Exit.BUG: "A bug in bnncli. Report it with the traceback.",
    Exit.USAGE: "Wrong option, argument or name. See COMMAND --help.",
    Exit.CHECK: "The command worked, but a check failed (--assert, --strict, --max-rhat, --check).",
    Exit.DATA: "An input is corrupt, of the wrong kind or not finite. Fix the input, or run the command that made it again.",
    Exit.NOINPUT: "An input is missing or unreadable. The message names the file and the command that makes it.",
    Exit.DEVICE: "The device is missing, or memory or open files ran out. Try --device cpu, or use less data.",
    Exit.NUMERIC: "A fit failed numerically. The message names the options that help.",
    Exit.EXISTS: "The output exists and differs, or cannot be written there. Use --force, --name or --out.",
    Exit.IO: "Reading or writing failed. Check the disk: space, quota, errors.",
    Exit.LOCKED: "Another bnncli is writing the same artifact. Use --wait SECONDS.",
    Exit.UNTRUSTED: "The input would run its own code. If you trust it, add the option that the message names.",
    Exit.CONFIG: "The configuration file or grid file is wrong. The message names the line.",
}

# Environment variables that do not set options.
ENVIRONMENT = {
    "BNNCLI_CONFIG": "Configuration file, used if --config is not given. The default is ./bnncli.toml.",
    "NO_COLOR": "Set it to print without colours.",
    "TERM": "`dumb` turns off progress bars and colours.",
    "CI": "If set, progress is reported as log lines instead of a bar.",
    "BNNCLI_GPUS": "GPUs to share out, such as 0,1,2,3: each process takes the first free one. grid --devices sets it.",
    "CUDA_VISIBLE_DEVICES": "GPUs that bnncli may use.",
    "MLFLOW_RUN_ID": "Run that --log-to mlflow logs into, instead of a new one.",
    "SOURCE_DATE_EPOCH": "Time in seconds to record in artifacts instead of the current time.",
    "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR": "Set by torchrun to split one command among workers.",
    "OMP_NUM_THREADS": "CPU threads per process, as for PyTorch. grid sets it for its jobs unless it is set.",
    "OMP_WAIT_POLICY": "If set, bnncli leaves GOMP_SPINCOUNT alone.",
}


def lines_of(topic: str | None) -> list[str]:
    """Return the lines of a topic, or the list of topics for None.

    Raises:
        UsageError: unknown topic.
    """
    if topic is None:
        about = {name: text for name, (text, _) in TOPICS.items()}
        return [
            "Topics:",
            *_align_columns(about),
            "",
            "For a command, see `bnncli help COMMAND`. For the list, see `bnncli --help`.",
        ]
    if topic not in TOPICS:
        raise unknown_value_error("help", topic, [*TOPICS, *(one.parent or one.name for one in own_commands())])
    return TOPICS[topic][1]()


def _exit_codes() -> list[str]:
    return _align_columns({str(int(code)): text for code, text in ADVICE.items()} | {"128+n": "Stopped by signal n."})


def _common() -> list[str]:
    rows = {}
    for name, (spec, hint) in option_fields(Command("", "", COMPUTE, ())).items():
        kind = "" if hint is bool or name == "verbose" else f"<{base_type(hint).__name__}>"
        value = spec.metadata["metavar"] or "|".join(choices_of(spec.metadata)) or kind
        short = f"{spec.metadata['short']}, " if spec.metadata["short"] else ""
        rows[f"{short}{flag_of(name)} {value}".rstrip()] = help_of(spec)
    return ["Most commands take these options:", *_align_columns(rows)]


def _environment() -> list[str]:
    every = {name: spec for command in own_commands() for name, (spec, _) in option_fields(command).items()}
    shared = [flag_of(name) for name, spec in every.items() if spec.metadata["env_common"]]
    options = {
        "BNNCLI_<COMMAND>_<OPTION>": "Default of an option, such as BNNCLI_REFINE_EPOCHS=5. Separate the values of repeatable options by semicolons.",
        "BNNCLI_<OPTION>": f"The same for all commands. For {', '.join(sorted(shared))}.",
    }
    return _align_columns(options | ENVIRONMENT)


def _specs() -> list[str]:
    own = ", ".join(name for name in names("networks"))
    factory = {"package.module:factory, file.py:factory": "Your own code, which is run."}
    models = {own: "Built-in networks (flatten: the inputs are the features)."} | factory | _list_forms("models")
    return [
        "Models (--model):",
        *_align_columns(models),
        "",
        "Data (--data SPLIT=SPEC, --ood SPLIT=SPEC):",
        *_align_columns(_list_forms("data")),
        "",
        "SPEC@N takes the first N examples. Tables and tar files may be patterns, such as DIR/train-*.parquet.",
    ]


def _list_forms(family: str) -> dict[str, str]:
    forms: Iterable[Form] = sorted(declarations(family, "FORM").values(), key=lambda form: form.place)
    return {form.text: form.about for form in forms}


def _align_columns(rows: dict[str, str], most: int = 28) -> list[str]:
    """Format names and texts in two columns; a long name has its text below."""
    column = 4 + min(most, max(map(len, rows)))
    width = min(get_terminal_size().columns, MAX_WIDTH)
    found = []
    for name, text in rows.items():
        lines = textwrap.wrap(text, width - column, break_on_hyphens=False) or [""]
        head = f"  {name}".ljust(column)
        found += (
            [head.rstrip(), *(" " * column + line for line in lines)]
            if len(head) > column
            else [
                (head + lines[0]).rstrip(),
                *(" " * column + line for line in lines[1:]),
            ]
        )
    return found


TOPICS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "exit-codes": ("What each exit code means, and what to do.", _exit_codes),
    "common": ("Options that most commands share.", _common),
    "environment": ("Environment variables that bnncli reads.", _environment),
    "specs": ("How to name models and data.", _specs),
}
