"""Options: the same on every command, from flags, environment and configuration file; help good enough to work from."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from problems.command_line import Cli

from bnncli.cli.build import parser
from bnncli.cli.commands import own_commands
from bnncli.cli.options import option_fields, read_config
from bnncli.errors import ConfigError
from bnncli.options.command import (
    SECTIONS,
    Command,
    CommonOptions,
    ComputeOptions,
    InputOptions,
    LockOptions,
    NameOptions,
    RecordOptions,
    RunOptions,
    WriteOptions,
)
from bnncli.options.declaration import build_options, flag_of, help_of

VALUES = {int: "3", float: "0.5", bool: None, str: "x", list: "x"}
SPECIAL = {
    "fit-calibration map": "isotonic", "score fit-calibration": "isotonic", "score out": "map.safetensors",
    "curvature": "fisher", "precision-per": "layer", "simulations": "50", "budget": "5m",
    "metric": "nll", "score": "knn", "score score": "energy", "calibrate score": "energy", "monitor score": "max_prob", "class": "1", "costs": "c.csv", "shifted-to": "far", "assert": "ece<=0.02", "log-format": "json", "log-to": "tensorboard:logs", "progress": "none", "device": "cpu", "flow": "planar", "scale": "low-rank", "structure": "kron",
    "center": "checkpoint", "space": "weight", "integrator": "mc", "projection": "sum-zero", "rule": "trapezoid", "predict top-k": "best", "table": "t.csv", "merge": "a=0,1", "grid devices": "0,1", "grid jobs": "3", "reproduce scale": "paper", "reproduce jobs": "3", "definitions": "right", "sampler": "nuts", "dynamics": "leapfrog", "gradients": "tf32", "hmc spread": "chains", "dtype": "float16", "autocast": "bf16", "background": "black", "task": "multiclass", "criterion": "nll",
    "prior-precision": "2", "bias-precision": "2", "prior-mean": "checkpoint", "fit-on": "val", "max-rhat": "1.5", "draws": "9", "alpha": "0.1", "bootstrap": "200", "format": "csv", "plot": "curve.png", "until": "ess>=9", "max-draws": "900", "model": "mlp", "elbo-draws": "9", "level": "0.5", "each": "laplace",
    "sets": "raps", "figure-format": "svg", "export format": "pt2", "export score": "entropy", "recipe": "mlp-fmnist", "train optimizer": "sgd", "acquire by": "batchbald", "augment": "crop", "corrupt": "jpeg:3",
    "fit-sghmc sampler": "sghmc", "fit-sghmc draws": "9", "fit-sghmc epochs": "80", "fit-sghmc momentum-decay": "0.5", "preconditioner": "rmsprop", "start": "init",
    "fit-swag rank": "9", "fit-swag epochs": "30", "fit-swag scale": "0.3", "by": "cost", "optimizer": "ivon", "fit-vi estimator": "flipout",
    "fit-lbbnn hidden": "7,5", "fit-lbbnn estimator": "mnf", "schedule": "cosine", "variance": "published", "prior-inclusion": "0.5", "start-inclusion": "1,2", "flow-hidden": "7", "prune rule": "density", "density": "0.1", "slab-sd": "0.3", "true-inputs": "1,3",
}  # fmt: skip
# What an option needs beside it.
BESIDE = {
    "score fit-calibration": ["--out", "map.safetensors"],
    "score out": ["--fit-calibration", "platt"],
    "report figure-format": ["--figures", "f"],
    "predict data": ["--table", "t.csv"],
    "predict ood": ["--table", "t.csv"],
    "predict keep-features": ["--data", "new=npz:x", "--table", "t.csv"],
    "predict skip-unreadable": ["--data", "new=npz:x", "--table", "t.csv"],
    "predict max-skipped": ["--data", "new=npz:x", "--table", "t.csv", "--skip-unreadable"],
    "monitor labels": ["--table", "t.csv"],
    "extract-features max-skipped": ["--skip-unreadable"],
    "predict follow": ["--table", "t.csv"],
    "predict idle": ["--follow", "d", "--table", "t.csv"],
    "auto model": ["--data", "train=npz:f"],
    **{
        f"auto {name}": ["--model", "mlp", "--data", "train=npz:f"]
        for name in ("data", "ood", "hold-out", "model-arg", "mean", "std", "resize", "crop")
    },
    "extract-features autocast": ["--model", "mlp", "--data", "train=npz:f"],
    "extract-features classes": ["--model", "mlp", "--data", "train=npz:f"],
    "fit-laplace trust-code": ["--layers", "all"],
    "fit-laplace curvature": ["--layers", "all"],
    "fit-laplace rank": ["--layers", "all", "--structure", "low-rank"],
    "fit-laplace draws": ["--layers", "all"],
    "fit-laplace size": ["--layers", "all", "--structure", "subnetwork"],
    "fit-laplace precision-per": ["--layers", "all", "--prior-precision", "marglik"],
    "hmc trust-code": ["--layers", "all"],
    "fit-sghmc trust-code": ["--layers", "all"],
    "fit-swag trust-code": ["--layers", "all"],
    "fit-vi trust-code": ["--layers", "all"],
    "fit-vi num-draws": ["--estimator", "reparam"],
    "prune rule": ["--density", "0.1"],
    "prune density": ["--rule", "density"],
    "fit-lbbnn flow-length": ["--estimator", "mnf"],
    "fit-lbbnn flow-hidden": ["--estimator", "mnf"],
    "fit-lbbnn multiplier-draws": ["--estimator", "mnf"],
    "fit-lbbnn temperature": ["--estimator", "concrete"],
    "fit-lbbnn prior-weight": ["--estimator", "concrete"],
    "fit-lbbnn flow-rate": ["--estimator", "mnf"],
    "fit-lbbnn early-epochs": ["--inclusion-rate", "0.1"],
}


def words_of(command: Command) -> list[str]:
    words = command.name.split("-", 1) if command.parent else [command.name]
    return words + [argument.name for argument in command.arguments if not argument.is_optional]


def parse(words: list[str]) -> tuple[Command, dict[str, Any]]:
    """What a command line says, without running it; options are checked as they are when it runs."""
    command, values = parser()(args=words, prog_name="bnncli", standalone_mode=False)
    for group in command.groups:
        build_options(group, values)
    return command, values


every_command = pytest.mark.parametrize("command", own_commands(), ids=lambda command: command.name)


def settable(command: Command) -> dict[str, Any]:
    """A command's options by field, but for those that extract-features wants one of."""
    wanted = ("model", "from_npz", "name") if command.name == "extract-features" else ()
    return {name: option for name, option in option_fields(command).items() if name not in wanted}


@every_command
def test_every_option_works_after_its_command(command: Command) -> None:
    for name, (spec, hint) in settable(command).items():
        flag = flag_of(name)[2:]
        value = (
            SPECIAL.get(f"{command.name} {flag}")
            or SPECIAL.get(flag)
            or VALUES[getattr(hint, "__origin__", None) or getattr(hint, "__args__", [hint])[0]]
        )
        usual = ["--from-npz", "f"] if command.name == "extract-features" else []
        extra = BESIDE.get(f"{command.name} {flag}", usual)
        words = [*words_of(command), *extra, f"--{flag}", *([value] if value and name != "verbose" else [])]
        assert parse(words)[1][name] not in (None, [], False, getattr(spec, "default", None)), words


@every_command
def test_the_common_options_are_on_every_command(command: Command) -> None:
    assert {spec.name for spec in fields(CommonOptions)} <= set(option_fields(command))
    if command.arguments and command.arguments[0].name == "ckpt" and command.name != "train":  # which has no run yet
        assert "run_dir" in option_fields(command)


@every_command
def test_help_names_every_option_and_argument_and_has_examples(cli: Cli, command: Command) -> None:
    words = command.name.split("-", 1) if command.parent else [command.name]
    done = cli(*words, "--help")
    assert (done.code, done.stderr) == (0, "")
    for name in option_fields(command):
        assert flag_of(name) in done.stdout
    for argument in command.arguments:
        assert argument.name.upper() in done.stdout
    assert "Examples:" in done.stdout
    assert done.stdout == cli(*words, "-h").stdout
    everything = cli(*words, "--help-all")
    assert (everything.code, everything.stderr) == (0, "")
    for name, (spec, _) in option_fields(command).items():
        text = " ".join(everything.stdout.split())
        assert f"{flag_of(name)} " in text, name
        assert " ".join(help_of(spec).split()[:3]) in text, name


def num_sentences(text: str) -> int:
    return len(re.findall(r"[.?!](?= |$)", text))


@every_command
def test_an_option_is_described_in_two_sentences_and_a_command_in_four(command: Command) -> None:
    for name, (spec, _) in option_fields(command).items():
        text = help_of(spec)
        is_setting = spec.metadata["group"].startswith("Settings of")  # each part may add what it makes of it
        assert is_setting or (1 <= num_sentences(text) <= 2 and len(text) <= 640), (name, text)
    assert num_sentences(command.details) <= 4, command.details
    assert num_sentences(command.summary) <= 2


@pytest.mark.parametrize("name", ["predict", "fit-laplace", "hmc", "refine", "extract-features", "auto"])
def test_the_help_of_a_frequent_command_fits_a_page(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert len(cli(name, "--help").stdout.splitlines()) <= (60 if name == "predict" else 75)


def test_rare_options_are_named_in_the_help_and_described_in_groups_by_help_all(cli: Cli) -> None:
    shown, everything = (cli("predict", one).stdout for one in ("--help", "--help-all"))
    rare = shown.partition("More options (see bnncli predict --help-all):")[2].partition("Common options")[0]
    assert "--points" in rare
    assert "Points of the quadrature rule" not in shown
    assert re.search(
        r"^Settings of quadrature:\n  --rule .*\n(  .*\n)*?  --points (<int>|INTEGER) ", everything, re.MULTILINE
    )
    titles = [line[:-1] for line in shown.splitlines() if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert titles == ["Arguments", "What to predict", "How", "Output", "Decisions", "Examples"]


EXAMPLES = [example for command in own_commands() for example in command.examples]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_help_parses(example: str) -> None:
    words = shlex.split(re.split(r" [|>]", example)[0])
    while "=" in words[0]:
        words = words[1:]
    assert words[0] == "bnncli"
    command, _ = parse(words[1:])
    assert example in command.examples


def test_the_list_of_commands_is_in_the_help(cli: Cli) -> None:
    done = cli("--help")
    assert all(command.name in done.stdout for command in own_commands() if not command.parent)
    titles = [line.removesuffix(":") for line in done.stdout.splitlines() if line.removesuffix(":") in SECTIONS]
    assert titles == list(SECTIONS[:-1])  # every command of ours is in one
    assert "Exit codes:" in done.stdout


def test_a_command_without_its_argument_shows_its_help_on_stderr(cli: Cli) -> None:
    done = cli("refine")
    assert (done.code, done.stdout) == (2, "")
    assert "--flow" in done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def setting(cli: Cli, name: str, *words: str) -> tuple[Any, str]:
    entry = cli("config", "show", "refine", "--json", *words).json["settings"]["refine"][name]
    return entry["value"], entry["source"]


def test_environment_over_config_over_default(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting(cli, "epochs") == (None, "default")
    (folder / "bnncli.toml").write_text("[refine]\nepochs = 7\n")
    assert setting(cli, "epochs") == (7, "config [refine]")
    monkeypatch.setenv("BNNCLI_REFINE_EPOCHS", "9")
    assert setting(cli, "epochs") == (9, "BNNCLI_REFINE_EPOCHS")


def test_a_flag_wins_over_everything(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNNCLI_REFINE_EPOCHS", "9")
    monkeypatch.setenv("BNNCLI_SEED", "4")
    cli("refine", small_run, "--name", "a", "--epochs", 2, "--length", 1)
    path = small_run.with_name("small.bnn") / "posteriors" / "a.safetensors"
    provenance = cli("inspect", path, "--json").json["provenance"]
    assert provenance["params"]["epochs"] == 2
    assert provenance["seed"] == 4


def test_named_config_over_variable_over_folder(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("bnncli.toml", "variable.toml", "flag.toml"), start=1):
        (folder / name).write_text(f"[refine]\nepochs = {number}\n")
    assert setting(cli, "epochs")[0] == 1
    monkeypatch.setenv("BNNCLI_CONFIG", "variable.toml")
    assert setting(cli, "epochs")[0] == 2
    assert setting(cli, "epochs", "--config", "flag.toml")[0] == 3


def test_the_common_table_holds_for_all_commands_and_the_own_one_wins(cli: Cli, folder: Path) -> None:
    (folder / "bnncli.toml").write_text("\ufeff[common]\nseed = 5\nwait = 2\n[refine]\nseed = 6\n", encoding="utf-8")
    assert setting(cli, "seed") == (6, "config [refine]")
    assert setting(cli, "wait") == (2, "config [common]")


def test_lists_in_variables_have_semicolons(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNNCLI_PREDICT_SPLIT", "val;far")
    names = [output["role"] for output in cli("predict", small_run, "--json").json["outputs"]]
    assert {name.rsplit(".", 1)[1] for name in names} == {"val", "far"}


TOML = ("5", "0.25", "2.0", "true", '"x"', "[5, 0.25]")
TAKEN = {
    int: {"5": 5},
    float: {"5": 5.0, "0.25": 0.25, "2.0": 2.0},
    bool: {"true": True},
    str: {"5": "5", "0.25": "0.25", "2.0": "2", '"x"': "x"},
    list: {"[5, 0.25]": ["5", "0.25"]},
}


@every_command
def test_every_option_takes_the_toml_values_that_its_type_has(folder: Path, command: Command) -> None:
    """Options that several commands have are tried with the first of them."""
    earlier = {
        (name, str(option_fields(one)[name][1]))
        for one in own_commands()[: own_commands().index(command)]
        for name in settable(one)
    }
    own = [name for name in settable(command) if (name, str(option_fields(command)[name][1])) not in earlier]
    for name, text in product(own, TOML):
        _, hint = option_fields(command)[name]
        taken = TAKEN[getattr(hint, "__origin__", None) or getattr(hint, "__args__", [hint])[0]]
        (folder / "bnncli.toml").write_text(f"[{command.name}]\n{flag_of(name)[2:]} = {text}\n")
        try:
            came: Any = read_config(folder / "bnncli.toml")[command.name][name]
        except ConfigError as error:
            came = error.message
        if text not in taken:
            assert "expected" in came, (name, text)
        elif not re.search(
            "expected (one of|a number of)", str(came)
        ):  # of the right type, and no choice of the option
            assert (came, type(came)) == (taken[text], type(taken[text])), (name, text)


def test_a_number_of_the_configuration_asks_for_what_the_flag_asks_for(cli: Cli, small_run: Path, folder: Path) -> None:
    (folder / "bnncli.toml").write_text("[fit-laplace]\nprior-precision = 10\n")
    assert cli("fit-laplace", small_run, "--json").json["action"] == "up_to_date"
    (folder / "bnncli.toml").write_text("[fit-laplace]\nprior-precision = 10.0\n")
    assert cli("fit-laplace", small_run, "--json").json["action"] == "up_to_date"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[refine]\nepochs = 'many'", "2: .refine. epochs: expected a whole number; got 'many'"),
        ("[refine]\nepochs = true", "expected a whole number; got True"),
        ("[refine]\nepochs = 0", "2: .refine. epochs: expected a number of at least 1; got 0"),
        ("[refine]\nflow = 'spiral'", "expected one of affine, .*radial.*; got 'spiral'"),
        ("[predict]\nsplit = 'test'", "expected a list of strings"),
        ("[refin]\nepochs = 3", "1: unknown table .refin.; did you mean 'refine'"),
        ("[refine]\nepochs = 3\nepoch = 4", "3: unknown key 'epoch' in .refine.; did you mean 'epochs'"),
        ("refine = 3", "unknown table"),
        ("[refine]\nepochs = 3\nepochs = 4", "not valid TOML"),
        ("[refine", "not valid TOML"),
        ("a = " + "[" * 100_000, "not valid TOML"),
        ("#" * (1 << 21), "at most 1048576 bytes"),
        ("\x00", "not valid TOML"),
    ],
    ids=lambda text: text[:24],
)
def test_a_wrong_configuration_says_where_and_what(cli: Cli, folder: Path, text: str, why: str) -> None:
    (folder / "bnncli.toml").write_text(text)
    assert re.search(why, cli("config", "show").expect(78).stderr)


def test_a_configuration_file_that_is_not_there_is_a_missing_input(cli: Cli, folder: Path) -> None:
    cli("config", "show", "--config", "none.toml").expect(66)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BNNCLI_REFINE_EPOCHS", "x"), ("BNNCLI_REFINE_EPOCHS", "0"), ("BNNCLI_REFINE_FLOW", "spiral"),
        ("BNNCLI_REFINE_FORCE", "perhaps"), ("BNNCLI_WAIT", "-1"), ("BNNCLI_WAIT", "nan"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli("refine", "x").expect(2).stderr.startswith(f"error: {variable}: expected")


def test_failures_are_documents_with_bnncli_json(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNNCLI_JSON", "1")
    assert cli("refine", "x", "--no-such").json["exit"] == 2
    assert cli("status", "x").json["exit"] == 66


def test_only_options_that_an_artifact_records_say_that_they_change_no_number() -> None:
    shared = {CommonOptions, RunOptions, ComputeOptions, WriteOptions, LockOptions, InputOptions}
    shared |= {RecordOptions, NameOptions}
    own = {command.name: set(command.groups) - shared for command in own_commands()}
    recorded = {one for command in own_commands() if RecordOptions in command.groups for one in own[command.name]}
    parts = {base for group in recorded for base in group.__mro__ if is_dataclass(base)}
    for command in own_commands():
        for group in set(command.groups) - recorded:
            inherited = {spec.name for base in group.__mro__[1:] if base in parts for spec in fields(base)}
            said = [spec for spec in fields(group) if spec.name not in inherited]
            silent = [spec.name for spec in said if spec.metadata["numeric"] or "collected" in spec.metadata]
            assert silent == [spec.name for spec in said], f"{group.__name__} of {command.name}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("extract-features", "x.pt", "--rotate", "abc"), "--rotate: expected a number; got 'abc'"),
        (("fit-lbbnn", "x.pt", "--epochs", "1.5"), "--epochs: expected a whole number; got '1.5'"),
        (("fit-laplace", "x.pt", "more"), "expected 1 argument, CKPT; got 'more' as well"),
    ],
)
def test_a_wrong_word_is_told_with_what_was_expected_and_what_came(cli: Cli, words: tuple[str, ...], said: str) -> None:
    assert cli(*words).expect(2).stderr == f"error: {said}\nhint: bnncli {words[0]} --help\n"
