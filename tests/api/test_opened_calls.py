"""Calls of an open run: threads, code, texts and layers."""

from __future__ import annotations

import csv
import errno
import shutil
import signal
import sys
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli
from problems.hf_folders import TEXTS, image_folder, pictures, text_folder

import bnncli
from bnncli.api.session import open_session
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import BnnError, BnnWarning, DataError, DeviceError, Untrusted, UsageError, WriteError
from bnncli.session.inputs import open_posterior


def extract_another_train(run: Path, cli: Cli) -> None:
    """Features of train whose labels are other ones: what was made of them before is stale."""
    arrays = make_arrays()
    arrays["labels_train"] = arrays["labels_train"][::-1].copy()
    np.savez(run.with_name("features.npz"), **arrays)
    words = ("extract-features", run, "--from-npz", run.with_name("features.npz"), "--ood", "far")
    cli(*words).expect(0)


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


def test_posterior_replaced_while_read_is_refused(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


NETWORK = """
import os, signal, sys
from torch import nn
import blocks
from parts.sizes import WIDTH

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        import late
        if os.environ.get("PRESSED") == "forward":
            os.kill(os.getpid(), signal.SIGINT)
        if os.environ.get("EXITS") == "forward":
            sys.exit(3)
        return self.last(late.scaled(blocks.act(self.hidden(x))))

def make():
    if os.environ.get("EXITS") == "factory":
        sys.exit(3)
    return Network()
"""


def make_folder(folder: Path, activation: str, scale: float) -> None:
    (folder / "parts").mkdir(parents=True)
    (folder / "net.py").write_text(NETWORK)
    (folder / "blocks.py").write_text(f"import torch\nact = torch.{activation}\n")
    (folder / "late.py").write_text(f"def scaled(x):\n    return {scale} * x\n")
    (folder / "parts/sizes.py").write_text("WIDTH = 5\n")
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden.weight": (5, 6), "hidden.bias": (5,), "last.weight": (3, 5), "last.bias": (3,)}
    torch.save({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, folder / "ckpt.pt")
    rng = np.random.default_rng(0)
    np.savez(folder / "train.npz", x=rng.normal(size=(20, 6)).astype(np.float32), y=np.arange(20) % 3)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of the same modules that do other things."""
    found = tmp_path / "a", tmp_path / "b"
    for folder, activation, scale in zip(found, ("tanh", "relu"), (1.0, 2.0), strict=True):
        make_folder(folder, activation, scale)
    return found


def opened(folder: Path) -> bnncli.opened.OpenedRun:
    return bnncli.open(folder / "ckpt.pt", model=f"{folder}/net.py:make")


def inputs_of(folder: Path) -> np.ndarray:
    return np.load(folder / "train.npz")["x"]


def expected_features(folder: Path, activation: str, scale: float) -> np.ndarray:
    state = torch.load(folder / "ckpt.pt", weights_only=True)
    hidden = torch.from_numpy(inputs_of(folder)) @ state["hidden.weight"].T + state["hidden.bias"]
    return (scale * getattr(torch, activation)(hidden)).numpy()


@pytest.fixture
def runs(folders: tuple[Path, Path], cli: Cli) -> tuple[Path, Path]:
    """The folders with a run each, whose features a command made in a process with no other code."""
    kept = list(sys.path), dict(sys.modules)
    for folder in folders:
        given = ("--model", f"{folder}/net.py:make", "--data", f"train=npz:{folder}/train.npz")
        cli("extract-features", folder / "ckpt.pt", *given).expect(0)
        sys.path[:] = kept[0]
        for name in set(sys.modules) & {"net", "blocks", "late", "parts", "parts.sizes"}:
            del sys.modules[name]
    return folders


def test_folders_of_the_same_modules_are_kept_apart(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type(sys)("blocks")
    monkeypatch.setitem(sys.modules, "blocks", mine)
    path, names = list(sys.path), set(sys.modules)
    both = [opened(folder) for folder in runs]
    for _ in range(2):
        for run, folder, activation, scale in zip(both, runs, ("tanh", "relu"), (1.0, 2.0), strict=True):
            found = run.features(inputs_of(folder))
            np.testing.assert_allclose(found, expected_features(folder, activation, scale), atol=1e-5)
    assert sys.path == path
    assert sys.modules["blocks"] is mine
    assert not (set(sys.modules) - names) & {"net", "late", "parts", "parts.sizes"}


def test_ctrl_c_in_user_code_is_an_interruption(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = opened(runs[0]), inputs_of(runs[0])
    monkeypatch.setenv("PRESSED", "forward")
    before, handler = list(sys.path), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.features(x)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sys.path == before
    (runs[1] / "blocks.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):  # on import
        opened(runs[1]).features(x)


@pytest.mark.parametrize("where", ["factory", "forward"])
def test_user_code_cannot_exit_process(runs: tuple[Path, Path], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXITS", where)
    with pytest.raises(UsageError, match=r"^user code called exit\(3\)$"):
        opened(runs[0]).features(inputs_of(runs[0]))


LAYERED_NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
"""


@pytest.fixture
def images(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Bytes of a run with laplace-all and its predictions; the test works beside it."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(LAYERED_NETWORK)
    space: dict[str, object] = {}
    exec(LAYERED_NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")  # type: ignore[operator]
    inputs = np.random.default_rng(0).integers(256, size=(40, 2, 2), dtype=np.uint8)
    np.savez("data.npz", x=inputs, y=np.arange(40) % 2)
    data = ("--data", "train=npz:data.npz", "--data", "test=npz:data.npz@30", "--mean", "0.4")
    cli("extract-features", "ckpt.pt", "--model", "net.py:make", *data).expect(0)
    fit = ("fit-laplace", "ckpt.pt", "--layers", "all", "--prior-precision", 3, "--trust-code")
    cli(*fit).expect(0)
    predict = ("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code")
    cli(*predict, "--integrator", "logit-mc", "--integrator", "mc", "--samples", 50).expect(0)
    return inputs[:30]


@pytest.mark.parametrize("integrator", ["logit-mc", "mc"])
def test_inputs_and_split_names_predict_what_predict_stores(images: np.ndarray, integrator: str) -> None:
    stored = read_predictions(Path(f"ckpt.pt.bnn/predictions/laplace-all.{integrator}/test.h5"))
    run = bnncli.open("ckpt.pt", model="net.py:make")
    for x in (images, "test"):
        found = run.predict(x, posterior="laplace-all", integrator=integrator, samples=50)
        np.testing.assert_array_equal(found.probs, stored.probs)
        np.testing.assert_array_equal(found.interval, stored.interval)
    assert run.posterior("laplace-all").layout.num_params == 23


def test_features_in_the_place_of_inputs_are_one_clear_error(images: np.ndarray) -> None:
    run = bnncli.open("ckpt.pt", model="net.py:make")
    with pytest.raises(
        DataError, match=r"x: expected inputs of the network .* covers other layers .* got float32 of shape \(40, 3\)"
    ):
        run.predict(run.split("train").features, posterior="laplace-all")


def test_the_networks_code_runs_only_where_it_is_named(images: np.ndarray) -> None:
    with pytest.raises(Untrusted, match="will not run the code of"):
        bnncli.open("ckpt.pt").predict(images, posterior="laplace-all")


def test_texts_are_predicted_as_by_the_command(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = text_folder(tmp_path / "model")
    with open("train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, index % 3) for index, text in enumerate(TEXTS))])
    cli("extract-features", "reviews", "--model", "hf:model", "--data", "train=csv:train.csv").expect(0)
    cli("fit-laplace", "reviews", "--prior-precision", "1").expect(0)
    cli("predict", "reviews", "--split", "train", "--posterior", "laplace", "--integrator", "probit").expect(0)
    stored = read_predictions(Path("reviews.bnn/predictions/laplace.probit/train.h5")).probs
    run = bnncli.open("reviews", model="hf:model")
    for given in (TEXTS, tuple(TEXTS), np.array(TEXTS)):
        found = run.predict(given, integrator="probit")
        np.testing.assert_allclose(found.probs, stored, atol=1e-6)
    assert found.classes == ("worse", "same", "better")
    with pytest.raises(DataError, match=r"^x: expected features, or texts for the network 'hf:model'; got 3 images$"):
        run.predict(pictures())
    np.testing.assert_allclose(run.predict(TEXTS[0], integrator="probit").probs, found.probs[:1], atol=1e-6)
    unnamed = bnncli.open("reviews")  # nothing of the folder is code
    np.testing.assert_array_equal(unnamed.predict(TEXTS, integrator="probit").probs, found.probs)
    with pytest.raises(UsageError, match="the features of this run come from 'hf:model'; got 'mlp'"):
        bnncli.open("reviews", model="mlp").predict(TEXTS)
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(run.predict(TEXTS, integrator="probit").probs, found.probs)
    other = bnncli.open(tmp_path / "reviews", model=f"hf:{folder}")
    np.testing.assert_array_equal(other.predict(TEXTS, integrator="probit").probs, found.probs)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"model_max_length": 12', '"model_max_length": 11'))
    with pytest.raises(DataError, match="was created from a checkpoint other than"):
        run.predict(TEXTS, integrator="probit")


def test_pictures_are_predicted_as_the_command_predicts_them(tmp_path: Path, cli: Cli) -> None:
    folder, data = image_folder(tmp_path / "model"), tmp_path / "train"
    data.mkdir()
    for index, picture in enumerate(pictures()):
        picture.save(data / f"{index}.png")
    cli("extract-features", folder, "--model", f"hf:{folder}", "--data", f"train=images:{data}").expect(0)
    run = bnncli.open(folder, model=f"hf:{folder}")
    stored = run.split("train").features
    np.testing.assert_allclose(run.features(pictures()), stored, atol=1e-6)
    np.testing.assert_allclose(run.features(pictures()[0]), stored[:1], atol=1e-6)
    arrays = np.stack([np.asarray(picture) for picture in [pictures()[0]] * 2])
    np.testing.assert_allclose(run.features(arrays), stored[[0, 0]], atol=1e-6)
    with pytest.raises(DataError, match=r"or images for the network .*; got 2 texts$"):
        run.features(["a", "b"])
