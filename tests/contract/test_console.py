"""What is shown while a command runs: few lines in a log, a bar on a terminal, and a loop that a signal can stop."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from problems.command_line import Cli

from bnncli import console as console_module
from bnncli.console import Console
from bnncli.errors import DataError, Interrupted
from bnncli.names import printable
from bnncli.options.command import CommonOptions
from bnncli.system import signals

pytestmark = pytest.mark.core


class Clock:
    """A clock that stands still unless told."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console_module.time, "monotonic", clock.monotonic)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signals.install_handlers()
    yield
    signals.forget_received()
    for name, handler in before.items():
        signal.signal(name, handler)


def run_loop(clock: Clock, total: int, seconds: float, capsys: pytest.CaptureFixture[str]) -> list[str]:
    task = Console("refine", CommonOptions()).task("epoch", total)
    for _ in range(total):
        clock.now += seconds
        task.advance(note="elbo=-1.0")
    return capsys.readouterr().err.splitlines()


def test_a_short_loop_is_not_worth_a_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_loop(clock, 100, 0.005, capsys) == []


def test_a_long_loop_reports_soon_then_rarely_and_at_its_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_loop(clock, 1000, 10.0, capsys)
    assert len(lines) == 21  # the first, one for each further 5 %, the last
    assert lines[0].endswith("INFO refine epoch 1/1000 elbo=-1.0 eta=9990s")
    assert lines[-1].endswith("epoch 1000/1000 elbo=-1.0 took=10000s")


def test_slow_steps_report_every_thirty_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(run_loop(clock, 10, 10.0, capsys)) == 4


def test_a_loop_whose_first_step_is_long_says_what_it_is_at(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    task = Console("sbc", CommonOptions()).task("simulations", 60)
    for number in range(10):
        clock.now += 10.0
        task.advance(0, f"modes {number}/60")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("simulations ")[2] for line in lines] == [
        f"0/60 modes {number}/60 after={10 * (number + 1)}s" for number in (0, 3, 6, 9)
    ]


def test_lines_have_a_time_a_level_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    import re

    Console("hmc", CommonOptions()).warn("careful")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING hmc careful\n", capsys.readouterr().err)


def test_a_warning_is_shown_once_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("hmc", CommonOptions(quiet=True))
    console.warn("careful")
    console.warn("careful")
    assert console.warnings == ["careful"]
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    console = Console("hmc", CommonOptions())
    task = console.task("draws", 2)
    task.advance()
    console.info("half of it")
    console.close()
    assert "draws" in terminal.getvalue()
    assert "half of it" in terminal.getvalue()
    assert "INFO" not in terminal.getvalue()


@pytest.mark.parametrize(("variable", "value"), [("TERM", "dumb"), ("CI", "1")])
def test_a_terminal_that_cannot_redraw_gets_no_bar(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert Console("hmc", CommonOptions()).is_terminal
    monkeypatch.setenv(variable, value)
    assert not Console("hmc", CommonOptions()).is_terminal


@pytest.mark.parametrize("progress", ["none", "log", "bar"])
def test_every_style_of_progress_can_be_interrupted(handlers: None, progress: str) -> None:
    console = Console("hmc", CommonOptions(progress=progress))
    task = console.task("draws", 10)
    task.advance()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match="interrupted by SIGTERM") as caught:
        task.advance()
    console.close()
    assert caught.value.exit == 143


def test_an_error_is_two_lines_whatever_its_text_holds(capsys: pytest.CaptureFixture[str]) -> None:
    Console("x", CommonOptions(quiet=True)).error(DataError("bad\n\x1b[31mfile", hint="do\rthis"))
    assert capsys.readouterr().err == "error: bad\\n\\x1b[31mfile\nhint: do\\rthis\n"


def test_a_stream_that_cannot_show_a_character_shows_its_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii"))
    Console("x", CommonOptions()).error(DataError("Größe \udcff"))
    assert raw.getvalue() == b"error: Gr\\xf6\\xdfe \\udcff\n"


def test_a_broken_stderr_never_stops_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = io.StringIO()
    stream.close()
    console = Console("x", CommonOptions(log_file=str(tmp_path / "log")))
    for broken in (stream, None):
        monkeypatch.setattr(sys, "stderr", broken)
        console.warn(f"with {broken}")
    console.close()
    assert len(console.warnings) == 2
    assert [line.split(" WARNING x ")[1] for line in (tmp_path / "log").read_text().splitlines()] == console.warnings


def test_printable_keeps_ordinary_text_of_any_language() -> None:
    assert printable("Größe 大きさ it's 5 %") == "Größe 大きさ it's 5 %"


def test_a_field_that_is_meant_below_the_stages_is_said_as_its_option(cli: Cli, small_run: Path) -> None:
    words = ("refine", small_run, "--flow", "radial", "--rank", 3)
    text = "--rank: not supported by radial layers; supported by: affine, sylvester"
    assert cli(*words).stderr.startswith(f"error: {text}")
    error = cli(*words, "--json").json["error"]
    assert error["message"] == text
    log = json.loads(cli(*words, "--log-format", "json").stderr.splitlines()[0])
    assert log["message"] == text
