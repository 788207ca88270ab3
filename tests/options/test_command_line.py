"""Options on the command line and from Python."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from forged import forge
from problems.command_line import Cli
from recorded_lines import LINES

from bnncli.artifacts.freshness import UNKNOWN_MAKER
from bnncli.artifacts.resume import write_state
from bnncli.cli.build import parser
from bnncli.cli.commands import own_commands
from bnncli.cli.options import _parse_text, option_fields
from bnncli.commands.extract_features import ExtractFeaturesOptions
from bnncli.commands.fit_laplace import FitLaplaceOptions
from bnncli.errors import Interrupted, UsageError
from bnncli.options.command import (
    CommandLine,
    CommonOptions,
    RecordOptions,
    RunOptions,
    TrackOptions,
    WriteOptions,
    own_command,
)
from bnncli.options.declaration import build_options, choices_of, flag_of, spell_options
from bnncli.options.shared import find_unmet_conditions, parse_until
from bnncli.session import produce as resumable

MAKERS = {one.name: one.groups for one in own_commands() if RecordOptions in one.groups}
LEFT_OUT = {spec.name for group in (CommonOptions, TrackOptions, RunOptions) for spec in fields(group)} | {
    "force",
    "dry_run",
}
SAMPLES = (
    "3", "0.5", "x", "-1", "a=b", "x.png", "x.csv", "nll", "ece<=0.1", "rhat<=1.01", "test", "x.safetensors",
    "val=test:20", "max_prob", "cpu", "2,3", "mc", "16", "5000", "5m", "jpeg:3", "wandb",
)  # fmt: skip


def recorded(*words: object) -> list[str] | None:
    line = own_command(["bnncli", *words], "HERE")
    return None if line is None else line.words()


COMPANIONS = {
    "fit-laplace": (
        {"layers": "all"},
        {"layers": "all", "structure": "low-rank"},
        {"layers": "all", "structure": "subnetwork"},
    ),
    "auto": ({"model": "lenet5", "data": "a=npz:x"},),
    "extract-features": (
        {"model": "lenet5", "data": "a=npz:x"},
        {"from_npz": "x"},
        {"model": "lenet5", "data": "a=npz:x", "skip_unreadable": None},
    ),
    "hmc": ({"layers": "all"},),
    **dict.fromkeys(("fit-sghmc", "fit-swag"), ({"layers": "all"},)),
    "fit-vi": ({"layers": "all"}, {"estimator": "reparam"}),
    "monitor": ({"table": "t.csv"},),
    "prune": ({"rule": "density"},),
    "fit-lbbnn": ({"estimator": "mnf"}, {"estimator": "concrete"}),
}


def sample(command: Any, name: str) -> tuple[list[str], list[str]]:
    """The words of an option with a value that its command takes, and the words of options that it needs beside it."""
    options = option_fields(command)
    spec, hint = options[name]
    alone = hint is bool or name == "verbose"
    for value in ["1"] if alone else (*choices_of(spec.metadata), *SAMPLES):
        for beside in ({}, *COMPANIONS.get(command.name, ())):
            texts = {**beside, name: value}
            with contextlib.suppress(UsageError, ValueError):
                values = {
                    key: True if text is None else _parse_text(text, options[key][1], "") for key, text in texts.items()
                }
                for group in command.groups:
                    build_options(group, values)
                return words_of(name, None if alone else value), [
                    word for key, text in beside.items() if key != name for word in words_of(key, text)
                ]
    raise AssertionError(f"no sample value for {flag_of(name)} of {command.name}")


def words_of(name: str, value: str | None) -> list[str]:
    flag = flag_of(name)
    return [flag] if value is None else [f"{flag}={value}"] if value.startswith("-") else [flag, value]


@pytest.mark.parametrize("command", [one for one in own_commands() if one.name in MAKERS], ids=lambda one: one.name)
def test_every_option_of_every_command_that_makes_artifacts_is_shown_again(command: Any) -> None:
    for name in option_fields(command):
        words, beside = sample(command, name)
        shown = [*([] if name in LEFT_OUT else words), *beside]
        words += beside
        assert recorded(command.name, *words, "CKPT") == ["bnncli", command.name, *shown, "HERE"]
        assert recorded(command.name, "CKPT", *words) == ["bnncli", command.name, "HERE", *shown]
        assert recorded(command.name, *words, "--", "-CKPT") == ["bnncli", command.name, *shown, "HERE"]
        assert recorded(command.name, *words) is None


def test_forms_that_the_command_line_takes_are_shown_in_one(tmp_path: Path) -> None:
    shown = ["bnncli", "fit-laplace", "HERE", "--name", "x", "--out", "y"]
    assert recorded("fit-laplace", "c", "--name=x") == shown[:5]
    assert recorded("fit-laplace", "-qf", "-vvn", "c", "--name", "x", "--run-dir", "r", "--log-file=f") == shown[:5]
    assert (
        recorded("fit-laplace", "c", "-fo", "y")
        == recorded("fit-laplace", "c", "-oy")
        == ["bnncli", "fit-laplace", "HERE", "--out", "y"]
    )


FORGED = {
    "another program": ["rm", "-rf", "x"],
    "nothing": [],
    "no argument": ["bnncli", "fit-laplace"],
    "two arguments": ["bnncli", "fit-laplace", "a", "b"],
    "no command of ours": ["bnncli", "explode", "a"],
    "a command that makes no artifact": ["bnncli", "clean", "a"],
    "one that runs what a file says": ["bnncli", "convert", "a", "b", "--trust-pickle"],
    "an option of another command": ["bnncli", "fit-laplace", "a", "--epochs", "3"],
    "an unknown option": ["bnncli", "refine", "a", "--exec", "rm"],
    "an unknown short option": ["bnncli", "refine", "a", "-x"],
    "a value that is no number": ["bnncli", "refine", "a", "--epochs", "$(rm -rf /)"],
    "a value out of bounds": ["bnncli", "refine", "a", "--epochs", "-3"],
    "a value that is no choice": ["bnncli", "refine", "a", "--flow", "; rm -rf /"],
    "options that exclude each other": ["bnncli", "refine", "a", "--name", "a", "--out", "b"],
    "no value": ["bnncli", "refine", "a", "--epochs"],
    "a value for what takes none": ["bnncli", "refine", "a", "--force=yes"],
    "a control character": ["bnncli", "refine", "a", "--out", "b\x1b[2J"],
    "a line break": ["bnncli", "refine", "a", "--out", "b\nrm -rf /"],
    "text that runs backwards": ["bnncli", "refine", "a", "--out", "b\u202ecod.exe"],
    "a number for a word": ["bnncli", "refine", 3],
    "a list for a word": ["bnncli", "refine", ["rm"]],
    "very many words": ["bnncli", "refine", "a", *["--out", "x" * 100] * 200],
}


@pytest.mark.parametrize("case", FORGED)
def test_nothing_of_a_record_that_is_not_ours_is_shown(case: str) -> None:
    assert own_command(FORGED[case], "HERE") is None


def test_values_that_a_shell_would_run_are_quoted(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "posteriors" / "refine.safetensors"
    words = ["bnncli", "refine", "$(rm -rf ~)", "--out", "; rm -rf ~"]
    forge(path, lambda document: document["provenance"].update(command=words))
    listed = {one["name"]: one["remake"] for one in cli("status", small_run, "--json").json["artifacts"]}
    assert listed["posteriors/refine.safetensors"] == f"bnncli refine {shlex.quote(str(small_run))} --out '; rm -rf ~'"


def test_a_forged_command_is_never_a_hint(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "posteriors" / "refine.safetensors"

    def change(document: dict[str, Any]) -> None:
        document["provenance"] |= {
            "command": ["rm", "-rf", "/"],
            "inputs": [{"role": "laplace", "path": "gone", "content_digest": "d"}],
        }

    forge(path, change)
    done = cli("predict", small_run, "--posterior", "refine", "--json")
    assert (done.code, done.json["error"]["hint"]) == (65, UNKNOWN_MAKER)
    listed = cli("status", small_run)
    assert "rm -rf" not in listed.stdout + listed.stderr + done.stdout + done.stderr
    remake = {one["name"]: one["remake"] for one in cli("status", small_run, "--json").json["artifacts"]}
    assert remake["posteriors/refine.safetensors"] is None
    assert remake["posteriors/laplace.safetensors"].startswith("bnncli fit-laplace ")


def remakes(cli: Cli, run: Path, *words: object) -> dict[str, str]:
    return {one["name"]: one["remake"] for one in cli("status", run, *words, "--json").json["artifacts"]}


def command_of(cli: Cli, path: Path) -> list[str]:
    return cli("inspect", path, "--json").json["provenance"]["command"]


def test_run_named_as_a_split_is_moved(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run.parent)
    shutil.copytree("small.bnn", "test.bnn")
    words = ("--posterior", "map", "--split", "test", "--force")
    cli("predict", "test", *words, "--run-dir=test.bnn").expect(0)
    Path("runs").mkdir()
    Path("test.bnn").rename("runs/test.bnn")
    name = "predictions/map.plug-in/test.h5"
    assert remakes(cli, Path("runs/test"))[name] == "bnncli predict runs/test --posterior map --split test"
    Path("runs/test.bnn").rename("elsewhere")
    shown = remakes(cli, Path("test"), "--run-dir", "elsewhere")[name]
    assert shown == "bnncli predict test --posterior map --split test --run-dir elsewhere"


def test_used_values_are_recorded(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNNCLI_FIT_LAPLACE_OUT", str(tmp_path / "other.safetensors"))
    monkeypatch.setenv("BNNCLI_SEED", "3")
    given = tmp_path / "given.safetensors"
    cli("fit-laplace", "--prior-precision=3", "-qo", given, "--", small_run).expect(0)
    rest = ["--prior-precision", "3", "--quiet", "--out", str(given), str(small_run), "--seed", "3"]
    assert command_of(cli, given) == ["bnncli", "fit-laplace", *rest]


def test_command_that_continues_a_fit_runs(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []

    def save_once(*words: Any) -> None:
        saved.append(write_state(*words))
        if len(saved) == 2:
            raise Interrupted(15, "interrupted")

    monkeypatch.setattr(resumable, "write_state", save_once)
    words = ("--epochs", 80, "--patience", 0, "--save-every", 0, "--elbo-draws", 8, "--name", "cut")
    done = cli("refine", *words, "--", small_run).expect(143)
    cli(*shlex.split(done.stderr.rpartition("continue with: ")[2])[1:]).expect(0, "resuming")


@pytest.mark.parametrize("command", [one for one in own_commands() if one.name in MAKERS], ids=lambda one: one.name)
def test_lines_are_read_as_the_command_line_reads_them(command: Any) -> None:
    parse = parser(command)
    forms = (["-vfo", "a=b", "--", "-x"], ["-ob", "--seed=3", "c"], ["c", "-n", "--record-host", "--device", "-1"])
    lines = [line.argv for line in LINES if line.argv[0] == command.name]
    lines += [[command.name, *form] for form in forms if command.name in ("refine", "prune")]
    assert lines
    for argv in lines:
        values = parse(args=argv, standalone_mode=False)[1]
        line = CommandLine.parse(command.name, argv[1:], command.groups)
        assert line.values() == {name: values[name] for name in line.values()}
        arguments = [str(values["ckpt"]), *map(str, values.get("member", ()))]
        assert [text for name, text in line.parts if name is None] == arguments
        assert line.words() == ["bnncli", *argv] or argv[1:] in forms


def test_a_command_is_made_of_its_options() -> None:
    line = CommandLine.of("fit-laplace", "-c", FitLaplaceOptions(structure="kron"), WriteOptions(force=True))
    assert line.words() == ["bnncli", "fit-laplace", "./-c", "--structure", "kron", "--force"]
    assert line.having("structure", "-x").having("force", False).words()[3:] == ["--structure=-x"]


MEANT = {"hint": "use a larger \0prior_precision\0", "texts": ["add \0assert_\0", 3], "n": None}


def test_a_field_is_spelled_as_an_option() -> None:
    assert spell_options(MEANT) == {"hint": "use a larger --prior-precision", "texts": ["add --assert", 3], "n": None}


def test_a_field_is_spelled_as_whoever_reads_it_writes_it() -> None:
    assert spell_options(MEANT, "{}=".format) == {
        "hint": "use a larger prior_precision=",
        "texts": ["add assert_=", 3],
        "n": None,
    }


def test_a_wrong_model_lists_networks_saved_models_and_factories() -> None:
    with pytest.raises(UsageError, match=r"expected one of flatten, lenet5.*hf:DIR.*file\.py:factory; got 'lenet'$"):
        ExtractFeaturesOptions(model="lenet", data=["train=npz:t.npz"])


def test_conditions_are_parsed_and_written_back() -> None:
    found = parse_until(" rhat <= 1.01,ess>=4e2 , ess-tail>=150.5", "--until")
    assert [str(condition) for condition in found] == ["rhat<=1.01", "ess>=400", "ess-tail>=150.5"]


@pytest.mark.parametrize(
    "text",
    ["", "rhat", "rhat<1.01", "rhat>=1.01", "ess<=400", "ess>=", "ess>=400,", "ess>=1,ess>=2", "acc>=1", "ess>=-1"],
)
def test_anything_else_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(UsageError, match="expected rhat<=NUMBER, ess>=NUMBER, ess-tail>=NUMBER"):
        parse_until(text, "--until")


@pytest.mark.parametrize("text", ["rhat<=1", "rhat<=0.5", "ess>=0", "ess>=1e999"])
def test_bounds_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be above"):
        parse_until(text, "--until")


def test_bounds_are_inclusive_and_undefined_values_meet_none() -> None:
    conditions = parse_until("rhat<=1.01,ess>=400", "--until")
    assert find_unmet_conditions(conditions, {"rhat": 1.01, "ess": 400.0}) == []
    assert find_unmet_conditions(conditions, {"rhat": 1.011, "ess": 401.0}) == [conditions[0]]
    assert find_unmet_conditions(conditions, {"rhat": 1.0, "ess": 399.9}) == [conditions[1]]
    assert find_unmet_conditions(conditions, {"rhat": None, "ess": None}) == list(conditions)
