"""Long factorisations: the bits of a plain call, and a process that ends at a signal without waiting for them."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kills import run_signalled_in, start
from problems.command_line import Cli
from torch import Tensor

from bnncli.covariances._roots import inverse_root
from bnncli.covariances.kron import Kron
from bnncli.errors import Interrupted, NumericError
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.system import signals
from bnncli.system import signals as module
from bnncli.system.signals import interruptible
from bnncli.targets.row_space import RowSpace

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


def factors() -> list[Tensor]:
    """Of every place that factors large matrices."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 80, generator=generator, dtype=torch.float64)
    gram = features.T @ features
    hessian = {"hessian.kron.A": gram, "hessian.kron.B": gram[:3, :3].clone()}
    kron = Kron.from_hessian(hessian, Prior(1.0), HeadLayout(3, 80, has_bias=False))
    rows = RowSpace.of(torch.cat([features, features[:3]]), HeadLayout(3, 80))  # three rows are not new: takes an SVD
    return [inverse_root(gram + torch.eye(80))[0], kron.scales, kron.feature_basis, rows.basis]


def test_factors_made_in_a_thread_have_the_bits_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = factors()
    monkeypatch.setattr(module, "_FEWEST_OPERATIONS", 0.0)
    started: list[str] = []
    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread.name), begin(thread)))
    assert all(torch.equal(one, other) for one, other in zip(factors(), plain, strict=True))
    kinds = ["eigenvectors"] * 2 + ["the span of the features"] * 2 + ["a Cholesky factorisation"] * 2
    assert started == [f"bnncli: {kind}" for kind in kinds]
    with pytest.raises(NumericError, match="not positive definite"):
        inverse_root(-torch.eye(3, dtype=torch.float64))


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


def test_an_error_of_the_work_keeps_nothing_alive() -> None:
    """After an error of memory, what the work had made must go at once, not with some later collection."""
    held: list[weakref.ref[torch.nn.Module]] = []

    def work() -> None:
        large = torch.nn.Identity()
        held.append(weakref.ref(large))
        raise NumericError("no")

    gc.disable()
    try:
        with contextlib.suppress(NumericError):
            interruptible(work, operations=1e12, device=CPU, name="a test")
        assert held[0]() is None
    finally:
        gc.enable()
