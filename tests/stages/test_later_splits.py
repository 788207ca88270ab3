"""Splits that are added to a run later: predicted under the run's classes, and refused only where they contradict it."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions

Arrays = dict[str, np.ndarray]
NAMES = ("cat", "dog", "owl")
NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 4), torch.nn.Linear(4, 3))
"""


def draw_images(folder: Path, count: int, seed: int) -> None:
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(seed).integers(256, size=(count, 4, 4, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network, and a run of it on class folders, fitted."""
    from bnncli.cli.execute import run_command_line

    folder = tmp_path_factory.mktemp("later")
    torch.manual_seed(0)
    shapes = {"1.weight": (4, 48), "1.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "net.pt")
    (folder / "net.py").write_text(NETWORK)
    for number, split in enumerate(("train", "test")):
        for place, name in enumerate(NAMES):
            draw_images(folder / split / name, 9, 3 * number + place)
    specs = [word for split in ("train", "test") for word in ("--data", f"{split}=images:{folder}/{split}")]
    with open(folder / "out", "w") as out, contextlib.chdir(folder):
        assert run_command_line(["extract-features", *words(folder), *specs], out) == 0
        assert run_command_line(["fit-laplace", str(folder / "net.pt"), "--prior-precision", "10"], out) == 0
        assert run_command_line(["predict", str(folder / "net.pt")], out) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def words(folder: Path) -> list[str]:
    return [str(folder / "net.pt"), "--model", "net.py:make"]


def new_data(folder: Path, kind: str) -> str:
    """Data without the run's class names, of the kind; its spec."""
    if kind == "flat":
        draw_images(folder / "new", 5, 9)
        return f"images:{folder}/new"
    if kind == "other folders":
        draw_images(folder / "new" / "fish", 5, 9)
        return f"images:{folder}/new"
    rows = np.random.default_rng(1).random((7, 3, 4, 4), dtype=np.float32)
    labels = {"y": np.arange(7) % 3} if kind == "npz with y" else {}
    np.savez(folder / "new.npz", x=rows, **labels)
    return f"npz:{folder}/new.npz"


LATER = [
    ("--ood", "flat"), ("--ood", "other folders"), pytest.param("--ood", "npz", marks=pytest.mark.long), ("--ood", "npz with y"),
    pytest.param("--data", "flat", marks=pytest.mark.long), ("--data", "npz"), pytest.param("--data", "npz with y", marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "kind"), LATER)
def test_a_split_added_later_is_predicted_and_scored_with_the_others(
    cli: Cli, folder: Path, flag: str, kind: str
) -> None:
    net = folder / "net.pt"
    assert cli("extract-features", *words(folder), flag, f"new={new_data(folder, kind)}").code == 0
    for command in ("predict", "evaluate", *(("compare", "diagnose") if kind == "flat" else ())):
        done = cli(command, net, "--json")
        assert done.code == 0, done.stdout
        assert not any("skipping" in text for text in done.json["warnings"])
    content = read_predictions(folder / "net.pt.bnn/predictions/laplace.mc/new.h5")
    assert tuple(content.classes) == NAMES
    assert cli("status", net, "--check").code == 0
    assert cli("predict", net, "--json").json["action"] == "up_to_date"


def test_a_run_of_numbered_classes_takes_the_names_that_come_later(cli: Cli, folder: Path) -> None:
    shutil.rmtree(folder / "net.pt.bnn")
    net = folder / "net.pt"
    assert cli("extract-features", *words(folder), "--data", f"aaa={new_data(folder, 'npz with y')}").code == 0
    assert cli("predict", net).code == 0
    path = folder / "net.pt.bnn/predictions/map.plug-in/aaa.h5"
    assert read_predictions(path).classes == ["0", "1", "2"]
    assert cli("extract-features", *words(folder), "--data", f"test=images:{folder}/test").code == 0
    again = cli("predict", net, "--json")
    assert again.code == 0
    assert "classes has changed" in again.stderr
    assert tuple(read_predictions(path).classes) == NAMES
    assert cli("predict", net, "--json").json["action"] == "up_to_date"


def test_other_class_names_are_refused_where_the_split_is_added(cli: Cli, folder: Path) -> None:
    for place, name in enumerate(("cat", "dog", "emu")):
        draw_images(folder / "other" / name, 2, place)
    done = cli("extract-features", *words(folder), "--data", f"new=images:{folder}/other", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "class_mismatch")
    assert "first differences: ['emu', 'owl']" in done.json["error"]["message"]
    assert cli("predict", folder / "net.pt").code == 0


def test_class_names_that_contradict_each_other_in_stored_splits_are_refused(cli: Cli, folder: Path) -> None:
    for place, name in enumerate(("cat", "dog", "emu")):
        draw_images(folder / "other" / name, 2, place)
    elsewhere = ("--run-dir", folder / "elsewhere")
    assert cli("extract-features", *words(folder), "--data", f"new=images:{folder}/other", *elsewhere).code == 0
    shutil.copy(folder / "elsewhere/features/new.h5", folder / "net.pt.bnn/features/new.h5")
    done = cli("predict", folder / "net.pt", "--split", "new", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "class_mismatch")
    assert cli("predict", folder / "net.pt", "--split", "test").code == 0


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("is_ood", [True, False])
def test_features_of_new_data_alone_join_a_run_of_from_npz(
    cli: Cli, arrays: Arrays, tmp_path: Path, has_head: bool, is_ood: bool
) -> None:
    run = tmp_path / "run"
    np.savez(tmp_path / "a.npz", **{name: part for name, part in arrays.items() if has_head or "head" not in name})
    np.savez(tmp_path / "new.npz", features_new=arrays["features_far"][:40])
    assert cli("extract-features", run, "--from-npz", tmp_path / "a.npz").code == 0
    assert cli("fit-laplace", run, "--prior-precision", 1).code == 0
    more = ("--ood", "new") if is_ood else ()
    done = cli("extract-features", run, "--from-npz", tmp_path / "new.npz", *more)
    assert done.code == 0, done.stderr
    assert cli("predict", run).code == cli("evaluate", run).code == cli("diagnose", run).code == 0
    probs = read_predictions(run.with_name("run.bnn") / "predictions/laplace.mc/new.h5").probs
    far = read_predictions(run.with_name("run.bnn") / "predictions/laplace.mc/far.h5").probs
    np.testing.assert_allclose(probs, far[:40], atol=1e-6)
    assert cli("status", run, "--check").code == 0


def test_features_that_do_not_fit_the_head_of_the_run_are_refused(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("new.npz")
    np.savez(path, features_new=np.ones((4, 6), np.float32))
    done = cli("extract-features", small_run, "--from-npz", path, "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "wrong_head")
    assert "features_new has 6 features" in done.json["error"]["message"]
    other = small_run.with_name("other.npz")
    np.savez(other, features_new=np.ones((4, 5), np.float32), head_weight=np.ones((3, 5), np.float32))
    assert cli("extract-features", small_run, "--from-npz", other).code == 65


def test_a_later_split_of_flatten_has_the_classes_of_train(cli: Cli, tmp_path: Path) -> None:
    run, rows = tmp_path / "run", np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=rows, y=np.arange(40) % 4)
    np.savez(tmp_path / "new.npz", x=rows[:6])
    for split in ("train", "new"):
        spec = f"{split}=npz:{tmp_path}/{split}.npz"
        assert cli("extract-features", run, "--model", "flatten", "--data", spec).code == 0
    assert cli("fit-laplace", run, "--prior-precision", 1).code == 0
    assert cli("predict", run).code == 0
    assert read_predictions(tmp_path / "run.bnn/predictions/laplace.mc/new.h5").probs.shape == (6, 4)


def write_table(folder: Path, named: tuple[str, ...]) -> str:
    """A table of inputs whose labels are what the network predicts, by these names of its outputs; its spec."""
    rows = np.random.default_rng(2).normal(size=(30, 48)).astype(np.float32)
    layers = torch.load(folder / "net.pt")
    hidden = torch.from_numpy(rows) @ layers["1.weight"].T + layers["1.bias"]
    predicted = (hidden @ layers["2.weight"].T + layers["2.bias"]).argmax(1).tolist()
    lines = [",".join([*(f"{value:.9g}" for value in row), named[k]]) for row, k in zip(rows, predicted, strict=True)]
    (folder / "table.csv").write_text("\n".join([",".join([*(f"x{k}" for k in range(48)), "label"]), *lines, ""]))
    return f"csv:{folder}/table.csv:x={'+'.join(f'x{k}' for k in range(48))}"


OUTPUTS = ("neutral", "contradiction", "entailment")  # in the order of the network's


def accuracy(cli: Cli, folder: Path, *given: str) -> tuple[float, str]:
    """That of the network on the table, and what was said."""
    done = cli("extract-features", *words(folder), *given, "--force")
    assert done.code == 0, done.stderr
    content = read_features(folder / "net.pt.bnn/features/train.h5")
    assert content.head_weight is not None
    assert content.labels is not None
    logits = content.features @ content.head_weight.T + content.head_bias
    return float((logits.argmax(1) == content.labels).mean()), done.stderr


@pytest.mark.parametrize("form", ["a,b,c", "file"])
def test_names_are_numbered_in_alphabetical_order_which_is_told_and_can_be_changed(
    cli: Cli, folder: Path, form: str
) -> None:
    shutil.rmtree(folder / "net.pt.bnn")
    data = ("--data", f"train={write_table(folder, OUTPUTS)}")
    found, said = accuracy(cli, folder, *data)
    assert found < 1
    assert "labels numbered in alphabetical order: contradiction=0, entailment=1, neutral=2" in said
    (folder / "names.txt").write_text("\n".join(OUTPUTS))
    classes = ",".join(OUTPUTS) if form == "a,b,c" else str(folder / "names.txt")
    found, said = accuracy(cli, folder, *data, "--classes", classes)
    assert found == 1
    assert "in alphabetical order" not in said
    again = ("--data", f"again={data[1][6:]}", "--keep-features", "--table", folder / "t.csv", "--trust-code")
    done = cli("predict", folder / "net.pt", "--posterior", "map", *again)
    assert done.code == 0, done.stderr
    assert tuple(read_features(folder / "net.pt.bnn/features/again.h5").classes) == OUTPUTS


@pytest.mark.parametrize(
    ("classes", "message"),
    [("a,b", "expected 3 names, one per output of the network; got 2"), ("a", "at least two"), ("a,b,a", "'a' twice")],
)
def test_classes_that_the_network_cannot_have_are_refused(cli: Cli, folder: Path, classes: str, message: str) -> None:
    done = cli(
        "extract-features", *words(folder), "--data", f"new={new_data(folder, 'npz with y')}", "--classes", classes
    )
    assert (done.code, message in done.stderr) == (2, True), done.stderr


def test_folders_that_are_numbers_agree_with_labels_that_are_numbers(cli: Cli, folder: Path) -> None:
    shutil.rmtree(folder / "net.pt.bnn")
    draw_images(folder / "numbered" / "2", 4, 0)
    splits = ("--data", f"train={new_data(folder, 'npz with y')}", "--data", f"test=images:{folder}/numbered")
    assert cli("extract-features", *words(folder), *splits).code == 0
    labels = read_features(folder / "net.pt.bnn/features/test.h5").labels
    assert labels is not None
    assert labels.tolist() == [2, 2, 2, 2]


def test_labels_that_count_from_1_and_names_of_files_that_are_nearly_right_are_told(cli: Cli, folder: Path) -> None:
    rows = np.zeros((6, 3, 4, 4), np.float32)
    np.savez(folder / "one.npz", x=rows, y=1 + np.arange(6) % 3)
    done = cli("extract-features", *words(folder), "--data", f"new=npz:{folder}/one.npz")
    assert (done.code, "if the labels count from 1, subtract 1" in done.stderr) == (65, True), done.stderr
    (folder / "points.csv").write_text("text,label\na,7.0\nb,2.0\n")
    done = cli("extract-features", *words(folder), "--data", f"new=csv:{folder}/points.csv")
    assert (done.code, "row 0 has '7.0'\nhint: write 7, without a decimal point" in done.stderr) == (65, True), (
        done.stderr
    )
    for line in (["nett.pt", "--model", "net.py:make", "--data", f"new=npz:{folder}/one.npz"], [*words(folder), "--data", "new=npz:onne.npz"]):  # fmt: skip
        done = cli("extract-features", *line)
        assert (done.code, "hint: did you mean 'net.pt'?" in done.stderr or "'one.npz'?" in done.stderr) == (66, True)


SEEING = """
import torch
class Seeing(torch.nn.Flatten):
    def forward(self, inputs):
        with open("seen", "a") as seen:
            seen.write("1" * len(inputs))
        return super().forward(inputs)
def make():
    return torch.nn.Sequential(Seeing(), torch.nn.Linear(48, 4), torch.nn.Linear(4, 3))
"""


@pytest.mark.parametrize(
    ("classes", "is_of_run", "message"),
    [
        ((NAMES, ("cat", "dog", "fox")), False, "only 'train' has 'owl'; only 'test' has 'fox'"),
        ((NAMES, ("cat", "dog")), False, "only 'train' has 'owl'"),
        ((("ape", *NAMES), ("ape", *NAMES)), False, "split 'train' has 4 classes, but the network has 3"),
        (((), ("cat", "dog", "fox")), True, "have different classes (first differences: ['fox', 'owl'])"),
    ],
)
def test_class_folders_that_do_not_fit_are_refused_before_their_images_are_read(
    cli: Cli, folder: Path, classes: tuple[tuple[str, ...], ...], is_of_run: bool, message: str
) -> None:
    (folder / "net.py").write_text(SEEING)
    if not is_of_run:
        shutil.rmtree(folder / "net.pt.bnn")
    specs = []
    for split, names in zip(("train", "test"), classes, strict=True):
        for place, name in enumerate(names):
            draw_images(folder / "new" / split / name, 20, place)
        specs += ["--data", f"{split}=images:{folder}/new/{split}"] if names else []
    done = cli("extract-features", *words(folder), *specs, *(["--force"] if is_of_run else []))
    assert (done.code, message in done.stderr) == (65, True), done.stderr
    seen = folder / "seen"
    assert not seen.exists() or len(seen.read_text()) < 20  # the few that tell the last layer


def test_train_refuses_splits_of_other_classes(cli: Cli, folder: Path) -> None:
    for name in ("cat", "dog", "fox"):
        draw_images(folder / "new" / name, 2, 0)
    specs = ("--data", f"train=images:{folder}/train", "--data", f"val=images:{folder}/new")
    network = ("--model", "mlp", "--model-arg", "inputs=48", "--model-arg", "classes=3")
    done = cli("train", "new.safetensors", *network, *specs, "--epochs", 1)
    assert (done.code, "only 'train' has 'owl'; only 'val' has 'fox'" in done.stderr) == (65, True), done.stderr
    assert not Path("new.safetensors").exists()
