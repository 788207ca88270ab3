"""Inputs from Python go through the network and the preprocessing that made the run's features; README's lines run."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

import bnncli
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import BnnWarning, DataError, Untrusted, UsageError
from bnncli.models.architectures.mlp import build

NETWORK = """
import pathlib
from torch import nn

pathlib.Path(__file__).with_name("was-run").touch()

def make(width: int = 3):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 3))
"""


def make_images() -> dict[str, dict[str, np.ndarray]]:
    """Grey images of three overlapping classes, bytes; more of them than one batch."""
    generator = np.random.default_rng(0)
    centers = generator.integers(60, 200, size=(3, 4, 4))
    splits = {}
    for name, count in (("train", 90), ("test", 300)):
        labels = generator.integers(3, size=count)
        noise = generator.normal(scale=40, size=(count, 4, 4))
        splits[name] = {"x": np.clip(centers[labels] + noise, 0, 255).astype(np.uint8), "y": labels.astype(np.int64)}
    return splits


def run_command(*words: object) -> None:
    from bnncli.cli.execute import run_command_line

    assert run_command_line([str(word) for word in words], io.StringIO()) == 0


@pytest.fixture(scope="module")
def finished_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of the built-in mlp, images, and a run with laplace and its metrics."""
    folder = tmp_path_factory.mktemp("images")
    splits = make_images()
    for name, arrays in splits.items():
        np.savez(folder / f"{name}.npz", **arrays)
    torch.manual_seed(0)
    torch.save(build(inputs=16, hidden=(6,), classes=3).state_dict(), folder / "ckpt.pt")
    data = [word for name in splits for word in ("--data", f"{name}=npz:{folder / name}.npz")]
    ckpt = folder / "ckpt.pt"
    run_command("extract-features", ckpt, "--model", "mlp", *data, "--mean", "0.4", "--std", "0.3")
    run_command("fit-laplace", ckpt, "--prior-precision", 1)
    run_command("predict", ckpt, "--posterior", "laplace", "--split", "test")
    run_command("evaluate", ckpt, "--bootstrap", 20)
    return folder


@pytest.fixture
def images(finished_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change, and works in."""
    shutil.copytree(finished_images, tmp_path / "images")
    monkeypatch.chdir(tmp_path / "images")
    return tmp_path / "images"


@pytest.fixture
def coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run whose network is code of the user's, in which the test works."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    np.savez("train.npz", **make_images()["train"])
    space: dict = {"__file__": str(tmp_path / "net.py")}
    exec(NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"](5).state_dict(), "ckpt.pt")
    given = ("--model", "net.py:make", "--model-arg", "width=5", "--data", "train=npz:train.npz", "--dtype", "float16")
    run_command("extract-features", "ckpt.pt", *given)
    run_command("fit-laplace", "ckpt.pt", "--prior-precision", 1)
    Path("was-run").unlink()
    return tmp_path


def test_inputs_have_the_features_and_predictions_that_were_stored(images: Path) -> None:
    run, x = bnncli.open("ckpt.pt"), make_images()["test"]["x"]
    features = run.split("test").features
    assert np.array_equal(run.features(x), features)
    expected = run.predict(features)
    for inputs in (x, torch.from_numpy(x), (x[:, None] / np.float32(255)), x[..., None]):
        assert np.array_equal(run.predict(inputs).probs, expected.probs)


def test_rows_of_bytes_are_inputs_and_rows_of_real_numbers_features(images: Path) -> None:
    run, x = bnncli.open("ckpt.pt"), make_images()["test"]["x"].reshape(300, 16)
    expected = run.split("test").features
    assert np.array_equal(run.features(x), expected)
    assert np.array_equal(run.predict(x).probs, run.predict(expected).probs)
    assert np.array_equal(run.predict(np.float32(x) / np.float32(255)).probs, run.predict(expected).probs)


def test_what_is_neither_features_nor_inputs_is_refused(images: Path) -> None:
    run = bnncli.open("ckpt.pt")
    expected = (
        r"^x: expected features, or inputs of the network 'mlp'; got float32 of shape \(2, 7\): the network failed on"
    )
    with pytest.raises(DataError, match=expected):
        run.predict(np.zeros((2, 7), np.float32))
    with pytest.raises(DataError, match=r"^x: expected inputs of type uint8 or floating point, got int8"):
        run.predict(np.zeros((2, 4, 4), np.int8))
    with pytest.raises(DataError, match=r"^x: 1 rows are not finite; the first is row 1"):
        run.predict(np.float32([np.zeros((4, 4)), np.full((4, 4), np.nan)]))


SETS = """
import numpy as np

class Images(list):
    classes = ["cat", "dog", "owl"]

def make():
    return Images((np.full((4, 4), 9 * row, np.uint8), row % 3) for row in range(6))
"""


def test_classes_have_the_names_that_a_later_split_brings(images: Path, cli: Cli) -> None:
    Path("sets.py").write_text(SETS)
    run, x = bnncli.open("ckpt.pt"), make_images()["test"]["x"]
    assert run.predict(x).classes == ("0", "1", "2")
    later = ("--data", "named=py:sets.py:make", "--mean", "0.4", "--std", "0.3")
    cli("extract-features", "ckpt.pt", "--model", "mlp", *later).expect(0)
    cli("predict", "ckpt.pt", "--posterior", "laplace", "--split", "test").expect(0)
    stored = read_predictions(Path("ckpt.pt.bnn/predictions/laplace.mc/test.h5"))
    assert run.predict(x).classes == ("cat", "dog", "owl") == tuple(stored.classes)


def test_another_checkpoint_is_refused_by_a_run_that_is_open(images: Path) -> None:
    run, x = bnncli.open("ckpt.pt"), make_images()["test"]["x"]
    assert run.predict(x).probs.shape == (300, 3)
    torch.save(build(inputs=16, hidden=(6,), classes=3).state_dict(), "ckpt.pt")
    for ask in (lambda: run.predict(x), lambda: run.features(x), lambda: run.metrics(posterior="laplace")):
        with pytest.raises(DataError, match=r"was created from a checkpoint other than ckpt.pt") as caught:
            ask()
        assert caught.value.code == "wrong_checkpoint"
    Path("ckpt.pt").unlink()
    with pytest.raises(bnncli.errors.MissingInput, match=r"no checkpoint ckpt.pt"):
        run.predict(x)


def test_code_that_a_file_names_is_run_only_if_the_caller_names_it(coded: Path) -> None:
    x = make_images()["train"]["x"]
    run = bnncli.open("ckpt.pt")
    for ask in (run.features, run.predict):
        with pytest.raises(Untrusted, match=r"will not run the code of 'net.py:make' just because") as caught:
            ask(x)
        assert "bnncli.open('ckpt.pt', model='net.py:make')" in caught.value.__notes__[0]
    assert not Path("was-run").exists()
    named = bnncli.open("ckpt.pt", model=f"{coded}/net.py:make")
    assert np.array_equal(named.features(x), run.split("train").features)
    assert Path("was-run").exists()
    with pytest.raises(UsageError, match=r"^model: the features of this run come from 'net.py:make'; got 'mlp'$"):
        bnncli.open("ckpt.pt", model="mlp").predict(x)


def test_an_installed_network_is_run_only_if_the_caller_names_it(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli import registry

    own, x = registry.own_names, make_images()["test"]["x"]
    expected = bnncli.open("ckpt.pt").features(x)
    monkeypatch.setattr(registry, "own_names", lambda family: [name for name in own(family) if name != "mlp"])
    with pytest.raises(Untrusted, match=r"will not run the code of 'mlp' just because"):
        bnncli.open("ckpt.pt").features(x)
    assert np.array_equal(bnncli.open("ckpt.pt", model="mlp").features(x), expected)


def test_inputs_leave_the_callers_random_numbers_alone(images: Path) -> None:
    run, x = bnncli.open("ckpt.pt"), make_images()["test"]["x"]
    before = torch.get_rng_state()
    run.predict(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_code_of_a_network_raises_is_the_cause(coded: Path) -> None:
    Path("net.py").write_text(NETWORK + "def make(width):\n    raise ValueError('no')\n")
    run = bnncli.open("ckpt.pt", model="net.py:make")
    with (
        pytest.warns(BnnWarning),
        pytest.raises(DataError, match=r"^model: 'net.py:make' raised ValueError: no$") as caught,
    ):
        run.features(make_images()["train"]["x"], allow_stale=True)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not hasattr(caught.value, "__notes__")  # a command says how its cause is shown


AGAIN = (
    "run: bnncli extract-features ckpt.pt --model net.py:make --model-arg width=5 --data train=npz:train.npz "
    "--dtype float16 --force"
)


def test_code_that_has_changed_since_is_refused(coded: Path) -> None:
    x = make_images()["train"]["x"]
    features = bnncli.open("ckpt.pt").split("train").features
    Path("net.py").write_text(NETWORK + "\n# another\n")
    run = bnncli.open("ckpt.pt", model="net.py:make")
    changed = r"net.py has changed since ckpt.pt.bnn/features/train.h5 was created from it"
    with pytest.raises(DataError, match=changed) as refused:
        run.features(x)
    assert refused.value.__notes__ == [AGAIN]
    with pytest.warns(BnnWarning, match=r"net.py has changed since .*using it anyway \(allow_stale\)") as caught:
        assert np.array_equal(run.features(x, allow_stale=True), features)
    assert caught[0].filename == __file__


def test_code_is_looked_at_in_every_call(coded: Path) -> None:
    x, run = make_images()["train"]["x"], bnncli.open("ckpt.pt", model="net.py:make")
    features = run.features(x)
    Path("net.py").write_text(NETWORK + "\n# another\n")
    for _ in range(2):
        with pytest.raises(DataError, match=r"net.py has changed"):
            run.features(x)
        with pytest.warns(BnnWarning, match=r"net.py has changed since .*using it anyway"):
            assert np.array_equal(run.features(x, allow_stale=True), features)
    Path("net.py").write_text(NETWORK.replace("nn.ReLU()", "nn.Tanh()"))
    with pytest.warns(BnnWarning, match=r"net.py has changed"):
        assert not np.array_equal(run.features(x, allow_stale=True), features)
    Path("net.py").write_text(NETWORK)
    assert np.array_equal(run.features(x), features)


def test_relative_paths_keep_their_folder(coded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, run = make_images()["train"]["x"], bnncli.open("ckpt.pt", model="net.py:make")
    expected, features = run.predict(x).probs, run.features(x)
    (tmp_path / "other").mkdir()
    for folder in (tmp_path / "other", tmp_path):
        monkeypatch.chdir(folder)
        assert (run.splits, run.posteriors) == (("train",), ("map", "laplace"))
        assert np.array_equal(run.predict(x).probs, expected)
        assert np.array_equal(run.features(x), features)


DOUBLED = """
class Doubled(nn.Sequential):
    def load_state_dict(self, state, strict=True):
        return super().load_state_dict({name: 2 * tensor for name, tensor in state.items()}, strict)

def make(width):
    return Doubled(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 3))
"""


def test_a_network_that_gives_another_head_is_refused_whatever_is_allowed(coded: Path) -> None:
    Path("net.py").write_text(NETWORK + DOUBLED)
    run = bnncli.open("ckpt.pt", model="net.py:make")
    expected = r"the last linear layer of 'net.py:make' is not the head stored in ckpt.pt.bnn/features/train.h5"
    with pytest.warns(BnnWarning), pytest.raises(DataError, match=expected) as caught:
        run.features(make_images()["train"]["x"], allow_stale=True)
    assert (caught.value.code, caught.value.__notes__) == ("wrong_head", [AGAIN])


def test_a_run_of_raw_inputs_has_its_inputs_for_features(tmp_path: Path, cli: Cli) -> None:
    np.savez(tmp_path / "train.npz", **make_images()["train"])
    name, x = tmp_path / "raw", make_images()["train"]["x"]
    cli("extract-features", name, "--model", "flatten", "--data", f"train=npz:{tmp_path}/train.npz").expect(0)
    cli("fit-laplace", name, "--prior-precision", 1).expect(0)
    run = bnncli.open(name)
    assert np.array_equal(run.features(x), x.reshape(90, 16) / np.float32(255))
    expected = run.predict(run.split("train").features).probs
    assert np.array_equal(run.predict(x).probs, expected)
    assert np.array_equal(run.predict(x.reshape(90, 16)).probs, expected)  # as wide as features, and bytes


def test_the_lines_of_the_page_on_python_run(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 1
    exec(blocks[0], {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("[('0', ")
    assert said[-1] == "samples: expected a whole number of at least 1; got 0"


def test_a_network_that_has_not_changed_is_loaded_once(coded: Path) -> None:
    x, run = make_images()["train"]["x"], bnncli.open("ckpt.pt", model="net.py:make")
    run.features(x)
    Path("was-run").unlink()
    run.features(x)
    assert not Path("was-run").exists()


def test_a_loaded_predictor_gives_the_same_and_looks_at_no_file(images: Path) -> None:
    run, x = bnncli.open("ckpt.pt"), make_images()["test"]["x"]
    features = run.split("test").features
    loaded = [run.predictor(integrator=name) for name in ("probit", "mc", "mean-field")]
    expected = [run.predict(features, integrator=one.integrator) for one in loaded]
    opened = run.predictor("map")
    assert np.array_equal(opened(x[:1]).probs, run.predict(x[:1], posterior="map").probs)
    for path in (*Path("ckpt.pt.bnn").rglob("*.safetensors"), *Path("ckpt.pt.bnn").rglob("*.h5"), Path("ckpt.pt")):
        path.unlink()
    for one, other in zip(loaded, expected, strict=True):
        found = one(features)
        assert np.array_equal(found.probs, other.probs)
        assert (found.draws, found.interval_level, found.classes) == (other.draws, other.interval_level, other.classes)
    assert opened(x).probs.shape == (300, 3)
    with pytest.raises(DataError):
        opened(np.full((2, 6), np.nan, np.float32))


def test_batches_of_a_loader_are_predicted_one_after_another(images: Path) -> None:
    run, x = bnncli.open("ckpt.pt"), torch.from_numpy(make_images()["test"]["x"])
    loaded = run.predictor(integrator="probit")
    whole = loaded(x)
    pairs = torch.utils.data.TensorDataset(x, torch.zeros(len(x)))
    for dataset in (pairs, x):
        found = loaded(torch.utils.data.DataLoader(dataset, batch_size=64))
        assert np.allclose(found.probs, whole.probs, atol=1e-6)
        assert found.entropy.shape == (300,)
    with pytest.raises(UsageError, match="yields none"):
        loaded(torch.utils.data.DataLoader(torch.zeros(0, 4, 4)))
