"""predict --data and --follow: what the two commands would give, in one; arrivals done once each, whatever stops it."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kills import run_to_files, start
from problems.command_line import SCRIPT, Cli, Invocation
from problems.image_runs import draw, make_run, rows

from bnncli.commands.predict.new_data import Arrivals, continue_table
from bnncli.errors import OutputExists


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """A run of a network on images of 4 x 4, in the working folder."""
    monkeypatch.chdir(tmp_path)
    make_run(cli)
    return tmp_path


def predict(cli: Cli, *words: object, code: int = 0) -> Invocation:
    done = cli("predict", "net.pt", "--posterior", "laplace", *words)
    assert done.code == code, done.stderr
    return done


def test_one_command_gives_what_two_give_and_keeps_no_features(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.commands.predict.new_data.BLOCK", 256)  # and so another split of 300
    integrators = (
        "--integrator",
        "mc",
        "--integrator",
        "probit",
        "--samples",
        30,
        "--probabilities",
        "--merge",
        "ab=0,1",
    )
    predict(cli, *integrators, "--split", "test", "--table", "two.csv")
    before = sorted(Path("net.pt.bnn").rglob("*"))
    done = predict(cli, *integrators, "--data", "test=npz:test.npz", "--table", "one.csv", "--json").json
    key = lambda row: (row["variant"], int(row["sample_id"]))  # noqa: E731
    assert sorted(rows("one.csv"), key=key) == sorted(rows("two.csv"), key=key)
    assert (done["metrics"]["examples"], len(rows("one.csv"))) == (300, 600)
    assert sorted(Path("net.pt.bnn").rglob("*")) == before


def test_a_posterior_over_all_layers_predicts_new_data_as_a_split(folder: Path, cli: Cli) -> None:
    laplace = (
        "fit-laplace",
        "net.pt",
        "--layers",
        "all",
        "--structure",
        "diag",
        "--prior-precision",
        5,
        "--name",
        "whole",
    )
    assert cli(*laplace).code == 0
    asked = ("predict", "net.pt", "--posterior", "whole", "--samples", 20)
    assert cli(*asked, "--split", "test", "--table", "two.npz").code == 0
    assert cli(*asked, "--data", "test=npz:test.npz", "--table", "one.npz").code == 0
    with np.load("one.npz") as one, np.load("two.npz") as two:
        assert np.allclose(one["entropy"], two["entropy"], atol=1e-6)
        assert np.array_equal(one["label"], two["label"])


def test_files_are_named_on_stdin_and_their_names_stand_in_the_table(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ['b, "1".png', "a.png"]
    for seed, name in enumerate(names):
        draw(Path("seen") / name, seed)
    words = ("--data", "new=-", "--table", "t.csv")
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"seen/{name}\n" for name in names)))
    predict(cli, *words)
    assert [row["name"] for row in rows("t.csv")] == [f"seen/{name}" for name in names]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "stdin" in predict(cli, *words, "--force", code=2).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "new=npz:test.npz"), "--data writes a table: add --table FILE"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--split", "test"), "--split names a split of the run"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--follow", "d"), "mutually exclusive"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--keep-samples"), "--keep-samples is for splits"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--name", "n"), "--name and --out"),
        (("--follow", ".", "--table", "t.npz"), "appends to a .csv table"),
        (("--idle", "3", "--table", "t.csv"), "add --follow DIR"),
        (("--data", "new=py:code.py:make", "--table", "t.csv"), "add --trust-code"),
        (("--data", "a=npz:test.npz", "--data", "a=npz:test.npz", "--table", "t.csv"), "two splits have the same name"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: Path, cli: Cli, words: tuple[str, ...], message: str) -> None:
    done = predict(cli, *words, code=2)
    assert message in done.stderr
    assert not Path("t.csv").exists()


def test_a_label_that_is_no_class_and_a_missing_file_are_refused(folder: Path, cli: Cli) -> None:
    np.savez("odd.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 3]))
    assert "the head has classes 0 to 2" in predict(cli, "--data", "a=npz:odd.npz", "--table", "t.csv", code=65).stderr
    predict(cli, "--data", "a=npz:absent.npz", "--table", "t.csv", code=66)
    assert not Path("t.csv").exists()


@pytest.mark.parametrize("keep", [(), ("--keep-features",)], ids=["streamed", "kept"])
def test_what_is_wrong_with_data_names_no_option_of_extract_features(
    folder: Path, cli: Cli, keep: tuple[str, ...]
) -> None:
    np.savez("wide.npz", x=np.zeros((2, 9, 9), np.uint8))
    np.savez("nan.npz", x=np.full((2, 4, 4), np.nan, np.float32))
    for name in ("wide", "nan"):
        done = predict(cli, "--data", f"a=npz:{name}.npz", "--table", "t.csv", *keep, code=65)
        assert "hint: new data use the run's network, preprocessing and task" in done.stderr, name
    os.mkdir("seen")
    done = predict(cli, "--data", "a=seen", "--table", "t.csv", *keep, code=2)
    assert "hint: did you mean images:seen?" in done.stderr


def follow(cli: Cli, *words: object, code: int = 0) -> Invocation:
    return predict(cli, "--follow", "in", "--table", "t.csv", "--idle", 0, *words, code=code)


def test_each_arrival_has_one_row_and_a_later_start_goes_on(folder: Path, cli: Cli) -> None:
    for number in range(3):
        draw(Path("in") / f"{number}.png", number)
    (Path("in") / "broken.png").write_bytes(b"no image")
    (Path("in") / ".hidden.png").write_bytes(b"half")
    first = follow(cli, "--json").json
    assert (first["metrics"]["new"], first["metrics"]["unreadable"]) == (3, 1)
    assert "skipping 'broken.png': cannot decode 'broken.png' in in: unknown image format" in first["warnings"]
    kept = Path("t.csv").read_bytes()
    draw(Path("in") / "3.png", 3)
    draw(Path("in") / "broken.png", 4)
    assert follow(cli, "--json").json["metrics"] == {"examples": 5, "new": 2, "unreadable": 0}
    assert Path("t.csv").read_bytes().startswith(kept)
    assert sorted(row["name"] for row in rows("t.csv")) == ["0.png", "1.png", "2.png", "3.png", "broken.png"]
    assert predict(cli, "--data", "followed=images:in", "--table", "u.csv").code == 0
    by_name = {row["name"]: row for row in rows("u.csv")}
    for row in rows("t.csv"):
        assert float(row["probability"]) == pytest.approx(float(by_name[row["name"]]["probability"]), abs=1e-6)


def test_names_of_any_bytes_folders_and_loops_of_links_do_not_stop_it(folder: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    os.rename(b"in/0.png", b"in/caf\xe9.png")
    (Path("in") / "folder.png").mkdir()
    (Path("in") / "loop.png").symlink_to("loop.png")
    assert follow(cli, "--json").json["metrics"] == {"examples": 1, "new": 1, "unreadable": 0}
    assert follow(cli, "--json").json["metrics"]["new"] == 0
    assert [row["name"] for row in rows("t.csv")] == [r"caf\udce9.png"]


@pytest.mark.parametrize(("words", "name"), [((), "'=1.png"), (("--raw-text",), "=1.png")])
def test_a_file_whose_name_is_a_formula_is_predicted_once(
    folder: Path, cli: Cli, words: tuple[str, ...], name: str
) -> None:
    draw(Path("in") / "=1.png", 0)
    assert follow(cli, *words, "--json").json["metrics"]["new"] == 1
    assert follow(cli, *words, "--json").json["metrics"]["new"] == 0
    assert [row["name"] for row in rows("t.csv")] == [name]


@pytest.mark.parametrize("cut", [1, 2, 5, 40])
def test_half_a_row_is_cut_off_and_its_file_done_again(folder: Path, cli: Cli, cut: int) -> None:
    for number in range(4):
        draw(Path("in") / f"a, {number}.png", number)
    follow(cli)
    whole = Path("t.csv").read_bytes()
    before = rows("t.csv")
    Path("t.csv").write_bytes(whole[:-cut])
    follow(cli)
    kept = whole[: whole.rindex(b"\r\n", 0, -2)]
    assert Path("t.csv").read_bytes().startswith(kept)
    again = rows("t.csv")
    assert [(row["sample_id"], row["name"], row["predicted"]) for row in again] == [
        (row["sample_id"], row["name"], row["predicted"]) for row in before
    ]
    assert float(again[-1]["entropy"]) == pytest.approx(float(before[-1]["entropy"]), rel=1e-5)  # alone in a product


def test_of_a_file_with_rows_by_one_posterior_of_two_both_are_written(folder: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    draw(Path("in") / "1.png", 1)
    two = ("--posterior", "map")
    follow(cli, *two)
    whole = Path("t.csv").read_bytes()
    assert len(rows("t.csv")) == 4
    lines = whole.splitlines(keepends=True)
    Path("t.csv").write_bytes(b"".join(lines[:-1]))
    follow(cli, *two)
    assert len(rows("t.csv")) == 4
    assert len({(row["name"], row["posterior"]) for row in rows("t.csv")}) == 4


def test_a_table_of_others_is_not_continued(folder: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    Path("t.csv").write_text("a,b\r\n1,2\r\n")
    assert "not a table of bnncli" in follow(cli, code=73).stderr
    follow(cli, "--force")
    before = Path("t.csv").read_bytes()
    assert "differ from those this command writes" in follow(cli, "--probabilities", code=73).stderr
    assert "has rows of laplace (mc)" in follow(cli, "--integrator", "probit", code=73).stderr
    assert Path("t.csv").read_bytes() == before
    with pytest.raises(OutputExists):
        continue_table(Path("in"), b"", set(), force=False, is_raw=False)


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    arrivals, path = Arrivals(tmp_path), tmp_path / "a.png"
    path.write_bytes(b"h")
    assert (arrivals.ready(set()), arrivals.num_waiting) == ([], 1)
    path.write_bytes(b"half")
    assert (arrivals.ready(set()), arrivals.num_waiting) == ([], 1)
    assert (arrivals.ready(set()), arrivals.num_waiting) == (["a.png"], 0)
    path.write_bytes(b"other")
    os.utime(path, (1, 1))
    assert arrivals.ready(set()) == ["a.png"]  # left alone for long
    assert arrivals.ready({"a.png"}) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_kills_at_any_time_lose_no_file_and_do_none_twice(folder: Path, name: str) -> None:
    random = np.random.default_rng(0)
    command = [SCRIPT, "predict", "net.pt", "--posterior", "laplace", "--follow", "in", "--table", "t.csv"]
    draw(Path("in") / "first.png", 0)
    count = 0
    for _ in range(6):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        end = time.monotonic() + float(random.uniform(1.5, 4))
        while time.monotonic() < end:
            draw(Path("in") / f"{count}.png", count)
            count += 1
            time.sleep(0.02)
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=30)
        assert name == "SIGKILL" or (process.returncode == 143 and b"Traceback" not in said), said
    done = subprocess.run([*command, "--idle", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(row["name"] for row in rows("t.csv")) == sorted(["first.png", *(f"{n}.png" for n in range(count))])


def test_two_commands_do_not_follow_into_one_table(folder: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    argv = ["predict", "net.pt", "--posterior", "laplace", "--follow", "in", "--table", "t.csv"]
    first = start(run_to_files, argv, folder)
    try:
        end = time.monotonic() + 60
        while not (Path("t.csv").exists() and len(rows("t.csv")) == 1):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert "another bnncli process is following into this table" in follow(cli, code=75).stderr
    finally:
        first.terminate()
        first.join(timeout=30)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_put_in_the_place_of_the_table_is_not_written(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    from bnncli.commands.predict.new_data import NewData

    draw(Path("in") / "0.png", 0)
    Path("other").write_text("of somebody else")
    blocks = NewData.blocks

    def replaced(self: NewData, *words: Any, **options: Any) -> Any:
        Path("t.csv").unlink()
        (os.symlink if is_link else os.link)("other", "t.csv")
        return blocks(self, *words, **options)

    monkeypatch.setattr(NewData, "blocks", replaced)
    assert "t.csv was replaced while bnncli wrote to it" in follow(cli, code=74).stderr
    assert Path("other").read_text() == "of somebody else"


def test_a_full_disk_leaves_whole_rows_and_says_so(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(Path("in") / "0.png", 0)
    follow(cli)
    before, write = Path("t.csv").read_bytes(), os.write
    draw(Path("in") / "1.png", 1)
    calls = []

    def full(descriptor: int, text: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(folder / "t.csv"):
            return write(descriptor, text)
        calls.append(len(text))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, text[:10])

    monkeypatch.setattr("os.write", full)
    done = follow(cli, code=74)
    assert "No space left" in done.stderr
    assert Path("t.csv").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    follow(cli)
    assert [row["name"] for row in rows("t.csv")] == ["0.png", "1.png"]


@pytest.mark.parametrize("score", ["entropy", "combined"])
def test_rules_of_calibrate_decide_on_new_data_as_on_a_split(folder: Path, cli: Cli, score: str) -> None:
    asked = (
        "extract-features",
        "net.pt",
        "--model",
        "mlp",
        "--data",
        "calib=npz:test.npz@200",
        "--data",
        "new=npz:labelled.npz",
        "--data",
        "val=npz:labelled.npz",
    )
    assert cli(*asked).code == 0
    predict(cli, "--split", "calib")
    rules = ("--sets", "aps", "--risk", 0.9, "--false-alarm", 0.1, "--score", score, "--shift-level", 0.05)
    done = cli("calibrate", "net.pt", "--split", "calib", "--posterior", "laplace", *rules)
    assert done.code in (0, 3), done.stderr
    two = predict(cli, "--split", "new", "--table", "two.csv", "--json").json
    one = predict(cli, "--data", "new=npz:labelled.npz", "--table", "one.csv", "--json").json
    assert {"set", "set_size", "accept", "ood"} <= {*rows("one.csv")[0]}
    assert rows("one.csv") == rows("two.csv")
    alarm = next(row for row in two["decisions"] if row["kind"] == "shift")
    assert one["decisions"] == [{**alarm}]
    draw(Path("in") / "0.png", 0)
    follow(cli)
    draw(Path("in") / "1.png", 1)
    follow(cli)
    assert [row["ood"] in ("0", "1") for row in rows("t.csv")] == [True, True]
    predict(cli, "--data", "new=npz:labelled.npz", "--table", "none.csv", "--decide", "none")
    assert "ood" not in rows("none.csv")[0]
    done = predict(cli, "--data", "new=npz:labelled.npz", "--table", "x.csv", "--decide", "absent", code=66)
    assert "laplace.mc has no rule 'absent' (have: ood, risk, sets, shift)" in done.stderr
    assert "hint: bnncli calibrate net.pt --posterior laplace --integrator mc --sets lac" in done.stderr


def test_intervals_of_few_draws_are_announced_for_new_data_and_for_a_folder(folder: Path, cli: Cli) -> None:
    few = ("--integrator", "mc", "--samples", 8)
    said = "laplace.mc: too few draws for 95% intervals; using 78% intervals; use more --samples"
    assert said in predict(cli, *few, "--data", "new=npz:test.npz", "--table", "few.csv").stderr
    assert {row["level"] for row in rows("few.csv")} == {"0.777777778"}
    Path("in").mkdir()
    draw(Path("in") / "1.png", 1)
    assert said in predict(cli, *few, "--follow", "in", "--idle", 0, "--table", "followed.csv").stderr
    many = predict(cli, "--integrator", "mc", "--samples", 39, "--data", "new=npz:test.npz", "--table", "many.csv")
    assert "too few draws" not in many.stderr
