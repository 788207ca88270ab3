"""Long work ends at a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kills import run_signalled_in, start
from problems.command_line import Cli

from bnncli.errors import Interrupted
from bnncli.system import signals
from bnncli.system.signals import interruptible

CPU = torch.device("cpu")


@pytest.fixture
def handlers() -> Iterator[None]:
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.getsignal(name) for name in names}
    signals.install_handlers()
    yield
    signals.forget_received()
    for name, handler in before.items():
        signal.signal(name, handler)


def thread_of(operations: float, device: torch.device = CPU) -> threading.Thread:
    return interruptible(threading.current_thread, operations=operations, device=device, name="a test")


def test_only_what_is_long_and_on_the_cpu_gets_a_thread() -> None:
    own = threading.current_thread()
    assert thread_of(1e6) is own
    assert thread_of(1e12, torch.device("meta")) is own
    other = thread_of(1e12)
    assert (other is own, other.daemon, other.is_alive()) == (False, True, False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_work_finds_the_modes_and_the_number_of_threads_of_its_caller(mode: Callable[[], torch.no_grad]) -> None:
    def state() -> tuple[bool, bool, int]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    with mode():
        assert interruptible(state, operations=1e12, device=CPU, name="a test") == state()


def test_an_error_of_the_work_is_the_callers() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        interruptible(lambda: torch.linalg.cholesky(-torch.eye(3)), operations=1e12, device=CPU, name="a test")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_heeded_while_the_work_goes_on(handlers: None, number: signal.Signals) -> None:
    done, sent = threading.Event(), []

    def work() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)
        done.wait(60)

    with pytest.raises(Interrupted, match=f"interrupted by {number.name} at a factorisation") as caught:
        interruptible(work, operations=1e12, device=CPU, name="a factorisation")
    assert time.monotonic() - sent[0] < 5
    assert caught.value.exit == 128 + number
    assert signals.has_abandoned_work()
    done.set()
    signals._abandoned[-1].join(60)
    assert not signals.has_abandoned_work()


@pytest.mark.long
def test_fit_laplace_ends_in_the_midst_of_a_factorisation_and_leaves_nothing(tmp_path: Path, cli: Cli) -> None:
    """3,000 parameters: the factor and its inverse take two seconds of a core."""
    generator = np.random.default_rng(0)
    arrays = {"features_train": generator.normal(size=(40, 1499)).astype(np.float32)}
    arrays |= {"labels_train": np.arange(40) % 2, "head_weight": np.zeros((2, 1499), np.float32)}
    np.savez(tmp_path / "wide.npz", **arrays, head_bias=np.zeros(2, np.float32))
    run = tmp_path / "wide"
    assert cli("extract-features", run, "--from-npz", tmp_path / "wide.npz").code == 0
    before = sorted(path.name for path in tmp_path.rglob("*"))
    words = ["fit-laplace", str(run), "--structure", "full", "--center", "checkpoint", "--prior-precision", "1"]
    process = start(run_signalled_in, [*words, "--threads", "1", "-q"], tmp_path, "cholesky_ex")
    process.join(timeout=60)
    ended = time.monotonic()
    process.kill()
    stderr = (tmp_path / "err").read_text()
    assert (process.exitcode, (tmp_path / "out").read_text()) == (143, ""), stderr
    assert stderr == "error: interrupted by SIGTERM at a Cholesky factorisation\n"
    assert ended - float((tmp_path / "signalled").read_text()) < 2
    left = {path.name for path in tmp_path.rglob("*") if path.parent.name != ".locks"} - set(before)
    assert left - {".locks"} == {"out", "err", "signalled"}


LIBRARY = """
import threading, time
from bnncli.system import signals
thread = threading.Thread(target=lambda: (time.sleep(0.3), print("done")), daemon=True)
thread.start()
signals.abandon(thread)
"""


def test_an_ordinary_exit_waits_for_what_was_left_behind() -> None:
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
