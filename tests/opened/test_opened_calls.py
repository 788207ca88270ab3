"""What one call on an opened run is allowed or has read holds for no other call."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from problems.arrays import make_arrays
from problems.command_line import Cli

import bnncli
from bnncli.api.session import open_session
from bnncli.errors import BnnError, BnnWarning, DataError, DeviceError, WriteError
from bnncli.session.inputs import open_posterior


def extract_another_train(run: Path, cli: Cli) -> None:
    """Features of train whose labels are other ones: what was made of them before is stale."""
    arrays = make_arrays()
    arrays["labels_train"] = arrays["labels_train"][::-1].copy()
    np.savez(run.with_name("features.npz"), **arrays)
    words = ("extract-features", run, "--from-npz", run.with_name("features.npz"), "--ood", "far")
    assert cli(*words).code == 0


def test_what_a_call_allows_holds_for_no_other_thread(finished_run: Path) -> None:
    session = open_session(finished_run, None, device="cpu", seed=0)
    has_begun, has_asked, seen = Event(), Event(), []

    def ask() -> None:
        has_begun.wait(5)
        with session.asking() as run:
            seen.append(run.inputs.allow_stale)
            has_asked.set()

    thread = Thread(target=ask)
    thread.start()
    with session.asking(allow_stale=True) as run:
        console = run.console
        has_begun.set()
        assert not has_asked.wait(0.2)
        assert run.inputs.allow_stale
        assert run.console is console
    thread.join(5)
    assert seen == [False]


@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
def test_draws_are_weighed_by_train_as_it_is_now(small_run: Path, cli: Cli) -> None:
    run = bnncli.open(small_run)
    features = np.array(run.split("test").features)
    before = run.predict(features, integrator="importance").probs
    extract_another_train(small_run, cli)
    with pytest.warns(BnnWarning, match="laplace.safetensors is stale"):
        after = run.predict(features, integrator="importance", allow_stale=True).probs
    expected = bnncli.open(small_run).predict(features, integrator="importance", allow_stale=True).probs
    assert np.array_equal(after, expected)
    assert not np.array_equal(after, before)


def test_a_posterior_stays_what_it_was_when_it_was_asked_for(small_run: Path) -> None:
    posteriors = small_run.with_name("small.bnn") / "posteriors"
    laplace, refine = (bnncli.open(small_run).posterior(name) for name in ("laplace", "refine"))
    shutil.copy(posteriors / "refine.safetensors", posteriors / "laplace.safetensors")
    (posteriors / "refine.safetensors").unlink()
    assert (laplace.type, laplace.method) == ("gaussian", "laplace")
    assert (refine.type, refine.method) == ("flow", "refine")
    assert refine.sample(2).shape == (2, 18)


def test_a_posterior_that_is_replaced_while_it_is_read_is_refused(
    small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bnncli.session import predictor

    other = small_run.with_name("small.bnn") / "posteriors" / "refine.safetensors"
    monkeypatch.setattr(predictor, "open_posterior", lambda path: open_posterior(other))
    with pytest.raises(DataError, match=r"laplace.safetensors was replaced while bnncli read it"):
        bnncli.open(small_run).posterior("laplace")


class OutOfMemoryError(RuntimeError):
    """Called as that of torch.cuda."""


@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (MemoryError(), DeviceError, "^out of memory$"),
        (OutOfMemoryError("CUDA out of memory"), DeviceError, "^the device failed: CUDA out of memory$"),
        (OSError(errno.EIO, "?", "there"), WriteError, "^there: Input/output error$"),
    ],
)
def test_what_the_machine_lacks_is_an_error_of_ours(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[BnnError], message: str
) -> None:
    from bnncli.session.predictor import Predictor

    def fail(*_: object) -> None:
        raise raised

    run = bnncli.open(finished_run)
    monkeypatch.setattr(Predictor, "predict", fail)
    with pytest.raises(kind, match=message) as caught:
        run.predict(np.zeros((2, 5), np.float32))
    assert caught.value.__cause__ is raised
