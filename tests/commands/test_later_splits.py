"""Splits that are added later, and splits that belong together."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from kills import run_killed_at, start
from PIL import Image
from problems.command_line import Cli

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import note_path, request_digest, write_note
from bnncli.artifacts.hdf5 import write_hdf5
from bnncli.artifacts.predictions import read_predictions
from bnncli.artifacts.provenance import Source, params_hash
from bnncli.commands.extract_features import splits as one_split
from bnncli.numerics.digests import canonical_json

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
def test_later_split_is_predicted_and_scored_with_the_others(cli: Cli, folder: Path, flag: str, kind: str) -> None:
    net = folder / "net.pt"
    cli("extract-features", *words(folder), flag, f"new={new_data(folder, kind)}").expect(0)
    for command in ("predict", "evaluate", *(("compare", "diagnose") if kind == "flat" else ())):
        assert not any("skipping" in text for text in cli(command, net, "--json").expect(0).json["warnings"])
    content = read_predictions(folder / "net.pt.bnn/predictions/laplace.mc/new.h5")
    assert tuple(content.classes) == NAMES
    cli("status", net, "--check").expect(0)
    assert cli("predict", net, "--json").json["action"] == "up_to_date"


def test_a_run_of_numbered_classes_takes_the_names_that_come_later(cli: Cli, folder: Path) -> None:
    shutil.rmtree(folder / "net.pt.bnn")
    net = folder / "net.pt"
    cli("extract-features", *words(folder), "--data", f"aaa={new_data(folder, 'npz with y')}").expect(0)
    cli("predict", net).expect(0)
    path = folder / "net.pt.bnn/predictions/map.plug-in/aaa.h5"
    assert read_predictions(path).classes == ["0", "1", "2"]
    cli("extract-features", *words(folder), "--data", f"test=images:{folder}/test").expect(0)
    cli("predict", net, "--json").expect(0, "classes has changed")
    assert tuple(read_predictions(path).classes) == NAMES
    assert cli("predict", net, "--json").json["action"] == "up_to_date"


def test_other_class_names_are_refused_where_the_split_is_added(cli: Cli, folder: Path) -> None:
    for place, name in enumerate(("cat", "dog", "emu")):
        draw_images(folder / "other" / name, 2, place)
    done = cli("extract-features", *words(folder), "--data", f"new=images:{folder}/other", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "class_mismatch")
    assert "first differences: ['emu', 'owl']" in done.json["error"]["message"]
    cli("predict", folder / "net.pt").expect(0)


def test_class_names_that_contradict_each_other_in_stored_splits_are_refused(cli: Cli, folder: Path) -> None:
    for place, name in enumerate(("cat", "dog", "emu")):
        draw_images(folder / "other" / name, 2, place)
    elsewhere = ("--run-dir", folder / "elsewhere")
    cli("extract-features", *words(folder), "--data", f"new=images:{folder}/other", *elsewhere).expect(0)
    shutil.copy(folder / "elsewhere/features/new.h5", folder / "net.pt.bnn/features/new.h5")
    done = cli("predict", folder / "net.pt", "--split", "new", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "class_mismatch")
    cli("predict", folder / "net.pt", "--split", "test").expect(0)


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("is_ood", [True, False])
def test_new_features_join_a_run(cli: Cli, arrays: Arrays, tmp_path: Path, has_head: bool, is_ood: bool) -> None:
    run = tmp_path / "run"
    np.savez(tmp_path / "a.npz", **{name: part for name, part in arrays.items() if has_head or "head" not in name})
    np.savez(tmp_path / "new.npz", features_new=arrays["features_far"][:40])
    cli("extract-features", run, "--from-npz", tmp_path / "a.npz").expect(0)
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    more = ("--ood", "new") if is_ood else ()
    cli("extract-features", run, "--from-npz", tmp_path / "new.npz", *more).expect(0)
    assert cli("predict", run).code == cli("evaluate", run).code == cli("diagnose", run).code == 0
    probs = read_predictions(run.with_name("run.bnn") / "predictions/laplace.mc/new.h5").probs
    far = read_predictions(run.with_name("run.bnn") / "predictions/laplace.mc/far.h5").probs
    np.testing.assert_allclose(probs, far[:40], atol=1e-6)
    cli("status", run, "--check").expect(0)


def test_features_that_do_not_fit_the_head_of_the_run_are_refused(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("new.npz")
    np.savez(path, features_new=np.ones((4, 6), np.float32))
    done = cli("extract-features", small_run, "--from-npz", path, "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "wrong_head")
    assert "features_new has 6 features" in done.json["error"]["message"]
    other = small_run.with_name("other.npz")
    np.savez(other, features_new=np.ones((4, 5), np.float32), head_weight=np.ones((3, 5), np.float32))
    cli("extract-features", small_run, "--from-npz", other).expect(65)


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
    done = cli("extract-features", *words(folder), *given, "--force").expect(0)
    content = read_features(folder / "net.pt.bnn/features/train.h5")
    assert content.head_weight is not None
    assert content.labels is not None
    logits = content.features @ content.head_weight.T + content.head_bias
    return float((logits.argmax(1) == content.labels).mean()), done.stderr


@pytest.mark.parametrize("form", ["a,b,c", "file"])
def test_class_names_are_numbered_alphabetically_unless_given(cli: Cli, folder: Path, form: str) -> None:
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
    cli("predict", folder / "net.pt", "--posterior", "map", *again).expect(0)
    assert tuple(read_features(folder / "net.pt.bnn/features/again.h5").classes) == OUTPUTS


@pytest.mark.parametrize(
    ("classes", "message"),
    [("a,b", "expected 3 names, one per output of the network; got 2"), ("a", "at least two"), ("a,b,a", "'a' twice")],
)
def test_classes_that_the_network_cannot_have_are_refused(cli: Cli, folder: Path, classes: str, message: str) -> None:
    cli(
        "extract-features", *words(folder), "--data", f"new={new_data(folder, 'npz with y')}", "--classes", classes
    ).expect(2, message)


def test_folders_that_are_numbers_agree_with_labels_that_are_numbers(cli: Cli, folder: Path) -> None:
    shutil.rmtree(folder / "net.pt.bnn")
    draw_images(folder / "numbered" / "2", 4, 0)
    splits = ("--data", f"train={new_data(folder, 'npz with y')}", "--data", f"test=images:{folder}/numbered")
    cli("extract-features", *words(folder), *splits).expect(0)
    labels = read_features(folder / "net.pt.bnn/features/test.h5").labels
    assert labels is not None
    assert labels.tolist() == [2, 2, 2, 2]


def test_labels_that_count_from_1_and_names_of_files_that_are_nearly_right_are_told(cli: Cli, folder: Path) -> None:
    rows = np.zeros((6, 3, 4, 4), np.float32)
    np.savez(folder / "one.npz", x=rows, y=1 + np.arange(6) % 3)
    cli("extract-features", *words(folder), "--data", f"new=npz:{folder}/one.npz").expect(
        65, "if the labels count from 1, subtract 1"
    )
    (folder / "points.csv").write_text("text,label\na,7.0\nb,2.0\n")
    cli("extract-features", *words(folder), "--data", f"new=csv:{folder}/points.csv").expect(
        65, "row 0 has '7.0'\nhint: write 7, without a decimal point"
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
    cli("extract-features", *words(folder), *specs, *(["--force"] if is_of_run else [])).expect(65, message)
    seen = folder / "seen"
    assert not seen.exists() or len(seen.read_text()) < 20  # the few that tell the last layer


def test_train_refuses_splits_of_other_classes(cli: Cli, folder: Path) -> None:
    for name in ("cat", "dog", "fox"):
        draw_images(folder / "new" / name, 2, 0)
    specs = ("--data", f"train=images:{folder}/train", "--data", f"val=images:{folder}/new")
    network = ("--model", "mlp", "--model-arg", "inputs=48", "--model-arg", "classes=3")
    cli("train", "new.safetensors", *network, *specs, "--epochs", 1).expect(
        65, "only 'train' has 'owl'; only 'val' has 'fox'"
    )
    assert not Path("new.safetensors").exists()


SET_NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
"""
SPLITS = ("train", "val", "test", "far")


def extraction(*names: str) -> list[str]:
    flags = {"far": "--ood"}
    specs = [word for name in names for word in (flags.get(name, "--data"), f"{name}=npz:{name}.npz")]
    return ["extract-features", "net.pt", "--model", "net.py:make", *specs]


@pytest.fixture(scope="module")
def made_together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network and a run of it, fitted and predicted; the split `far` was added by a later command."""
    from bnncli.cli.execute import run_command_line

    set_folder, generator = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    torch.manual_seed(0)
    shapes = {"1.weight": (4, 5), "1.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, set_folder / "net.pt")
    (set_folder / "net.py").write_text(SET_NETWORK)
    for name in SPLITS:
        labels = generator.integers(3, size=40)
        rows = (generator.normal(size=(40, 5)) + np.eye(3, 5)[labels]).astype(np.float32)
        np.savez(set_folder / f"{name}.npz", x=rows, y=labels)
    fit = ["fit-laplace", "net.pt", "--prior-precision", "val"]
    with contextlib.chdir(set_folder):
        for words in (extraction("train", "val", "test"), extraction("far"), fit, ["predict", "net.pt"]):
            assert run_command_line([*words, "-q"], io.StringIO()) == 0
    return set_folder


@pytest.fixture
def set_folder(made_together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made_together, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def means(set_folder: Path) -> dict[str, Any]:
    """The --mean that each split was made with."""
    paths = (set_folder / "net.pt.bnn" / "features").glob("[!.]*.h5")
    return {path.stem: read_header(path).provenance["params"]["mean"] for path in paths}


def kill_after(set_folder: Path, count: int) -> None:
    """A command that makes all splits anew with another mean, killed after so many files have taken their names."""
    words = [*extraction(*SPLITS), "--mean", "0.5", "--force", "-q", "--threads", "1"]
    process = start(run_killed_at, words, "bnncli.artifacts.atomic", "_take_name", count)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


def follow_hints(cli: Cli) -> None:
    """Run what predict says, until it works."""
    for _ in range(6):
        done = cli("predict", "net.pt", "--json")
        if done.code == 0:
            return
        assert done.code == 65
        cli(*shlex.split(done.json["error"]["hint"])[1:]).expect(0)
    pytest.fail("the hints do not mend the run")


# Before the first name the notes are written, one a split; the map is the first of the files.
@pytest.mark.parametrize("count", [4 + 1, 4 + 3])
def test_interrupted_splits_are_refused_until_the_hint_is_run(cli: Cli, set_folder: Path, count: int) -> None:
    kill_after(set_folder, count)
    assert list(means(set_folder).values()).count("0.5") == count - 5
    for words in (("fit-laplace", "--name", "x"), ("predict",), ("evaluate",), ("diagnose",)):
        done = cli(words[0], "net.pt", *words[1:], "--json")
        assert (done.code, done.json["error"]["code"]) == (65, "stale_input"), words
    entries = cli("status", "net.pt", "--json").json["artifacts"]
    stale = {one["name"] for one in entries if one["state"] == "stale" and one["name"].startswith("features/")}
    assert stale
    if count > 5:
        hint = cli("predict", "net.pt", "--json").json["error"]["hint"]
        assert ("--mean 0.5" in hint, hint.endswith(" --force")) == (True, True)
        assert {one["remake"] for one in entries if one["name"] in stale} == {hint}
    follow_hints(cli)
    assert len(set(means(set_folder).values())) == 1
    assert (
        cli("fit-laplace", "net.pt", "--prior-precision", "val").code
        == cli("predict", "net.pt").code
        == cli("evaluate", "net.pt").code
        == 0
    )
    cli("status", "net.pt", "--check").expect(0)


def test_a_command_killed_before_the_splits_are_complete_changes_nothing(cli: Cli, set_folder: Path) -> None:
    words = [*extraction(*SPLITS), "--mean", "0.5", "--force", "-q", "--threads", "1"]
    process = start(run_killed_at, words, "bnncli.commands.extract_features.splits", "write_features", 3)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert set(means(set_folder).values()) == {None}
    assert cli("predict", "net.pt", "--json").json["action"] == "up_to_date"
    cli("status", "net.pt", "--check").expect(0)


def test_failed_split_leaves_all_as_they_were(cli: Cli, set_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = one_split.write_features, [2]

    def fail(*words: Any, **names: Any) -> str:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(*words, **names)

    monkeypatch.setattr(one_split, "write_features", fail)
    cli(*extraction(*SPLITS), "--mean", "0.5", "--force").expect(74)
    assert set(means(set_folder).values()) == {None}
    assert not list(set_folder.rglob(".*.tmp"))
    cli("status", "net.pt", "--check").expect(0)


def test_splits_that_were_mixed_by_hand_are_refused(cli: Cli, set_folder: Path) -> None:
    elsewhere = ("--run-dir", set_folder / "elsewhere")
    cli(*extraction("test"), "--mean", "0.5", *elsewhere).expect(0)
    shutil.copy(set_folder / "elsewhere/features/test.h5", set_folder / "net.pt.bnn/features/test.h5")
    for words in (("fit-laplace", "--name", "x"), ("predict", "--split", "test"), ("predict", "--split", "val")):
        done = cli(words[0], "net.pt", *words[1:], "--json")
        assert (done.code, done.json["error"]["code"]) == (65, "stale_input"), words
        assert "used --mean" in done.json["error"]["message"]
    allowed = cli("predict", "net.pt", "--split", "val", "--allow-stale", "--json").expect(0)
    assert any("are inconsistent" in text for text in allowed.json["warnings"])


def features(run: Path, split: str = "new") -> Path:
    return run.with_name(run.name + ".bnn") / "features" / f"{split}.h5"


def batch(folder: Path, *, rows: int = 20, seed: int = 1) -> None:
    """The day's data: another seed is another day."""
    generator = np.random.default_rng(seed)
    np.savez(folder / "batch.npz", x=generator.normal(size=(rows, 3)).astype(np.float32))


def extract(cli: Cli, run: Path, *words: object, spec: str = "batch.npz") -> Any:
    new = f"new=npz:{run.with_name(spec)}"
    return cli("extract-features", run, "--model", "flatten", "--data", new, *words, "--json")


@pytest.fixture(scope="module")
def made_anew(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a network, fitted and predicted, with a split `new` that is unlabelled."""
    from bnncli.cli.execute import run_command_line

    folder = tmp_path_factory.mktemp("daily")
    run, generator = folder / "daily", np.random.default_rng(0)
    labels = generator.integers(3, size=60)
    rows = (generator.normal(size=(60, 3)) + 2 * np.eye(3)[labels]).astype(np.float32)
    np.savez(folder / "train.npz", x=rows, y=labels)
    batch(folder)
    data = [word for split in ("new=npz:batch", "train=npz:train") for word in ("--data", f"{split}.npz")]
    with contextlib.chdir(folder):
        for words in (
            ["extract-features", run, "--model", "flatten", *data],
            ["fit-laplace", run, "--prior-precision", 1],
            ["predict", run, "--table", folder / "t.csv"],
        ):
            assert run_command_line([str(word) for word in words], io.StringIO()) == 0
    return folder


@pytest.fixture
def run(made_anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run that a test may change."""
    shutil.copytree(made_anew, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)  # the recorded command names its data from there
    return tmp_path / "daily"


@pytest.mark.parametrize("rows", [20, 31, 7])
def test_the_next_batch_replaces_the_last_whatever_its_size(cli: Cli, run: Path, rows: int) -> None:
    batch(run.parent, rows=rows, seed=2)
    done = extract(cli, run)
    assert (done.code, done.json["action"]) == (0, "replaced")
    assert "data.new has changed" in done.stderr
    cli("predict", run).expect(0)
    cli("status", run, "--check").expect(0)
    assert not note_path(features(run)).exists()


def test_the_rows_asked_for_are_a_parameter(cli: Cli, run: Path) -> None:
    done = extract(cli, run, spec="batch.npz@5")
    assert (done.code, done.json["error"]["code"]) == (73, "exists")
    assert "first_rows: existing=none, requested=5" in done.json["error"]["message"]


@pytest.mark.parametrize("spec", ["batch.npz", "batch.npz@5"])
def test_features_of_a_version_that_counted_rows_as_a_parameter_are_up_to_date(cli: Cli, run: Path, spec: str) -> None:
    assert extract(cli, run, "--force", spec=spec).code == 0
    path = features(run)
    header = read_header(path)
    with h5py.File(path) as file:
        arrays = {name: file[name][()] for name in ("features", "sample_id")}
        texts = {"classes": file["classes"].asstr()[()].tolist(), "preprocess": file["preprocess"].asstr()[()]}
    params = {name: value for name, value in header.provenance["params"].items() if name != "first_rows"}
    params["num_examples"] = len(arrays["features"])
    provenance = {**header.provenance, "params": params, "params_hash": params_hash(params)}
    write_hdf5(path, arrays, texts, kind="features", meta=header.meta, provenance=provenance, may_replace=True)
    assert extract(cli, run, spec=spec).json["action"] == "up_to_date"


def refuse(cli: Cli, run: Path) -> Any:
    """A request for new data with other options, which is refused."""
    batch(run.parent, rows=25, seed=2)
    done = extract(cli, run, "--dtype", "float16")
    assert done.code == 73
    return done


def test_after_a_refusal_of_newer_data_nothing_is_made_of_the_older(cli: Cli, run: Path) -> None:
    table = run.with_name("t.csv")
    before = table.read_bytes()
    refuse(cli, run)
    done = cli("predict", run, "--table", table, "--json")
    assert (done.code, done.json["error"]["code"], table.read_bytes()) == (65, "stale_input", before)
    assert "the last extract-features, for other data, failed (" in done.json["error"]["message"]
    assert "dtype: existing='float32', requested='float16'" in done.json["error"]["message"]
    cli("evaluate", run).expect(65)
    stale = {one["name"] for one in cli("status", run, "--json").json["artifacts"] if one["state"] == "stale"}
    assert stale == {"features/new.h5", "predictions/laplace.mc/new.h5"}
    cli("status", run, "--check").expect(3)
    allowed = cli("predict", run, "--table", table, "--allow-stale", "--json").expect(0)
    assert any("using it anyway" in text for text in allowed.json["warnings"])
    cli("predict", run, "--split", "train").expect(0)


@pytest.mark.parametrize("way", ["force", "old request", "hint"])
def test_a_refusal_is_settled_by_force_or_by_asking_as_before(cli: Cli, run: Path, way: str) -> None:
    old = run.with_name("batch.npz").read_bytes()
    refuse(cli, run)
    if way == "force":
        assert extract(cli, run, "--dtype", "float16", "--force").code == 0
    elif way == "old request":
        run.with_name("batch.npz").write_bytes(old)
        assert extract(cli, run).json["action"] == "up_to_date"
    else:
        hint = cli("predict", run, "--json").json["error"]["hint"]
        cli(*shlex.split(hint)[1:]).expect(0)
    assert not note_path(features(run)).exists()
    cli("predict", run).expect(0)


def test_a_refusal_of_the_same_data_does_not_make_the_features_stale(cli: Cli, run: Path) -> None:
    assert extract(cli, run, "--dtype", "float16").code == 73
    cli("predict", run).expect(0)
    cli("status", run, "--check").expect(0)


BAD = {"labels": {"x": np.ones((4, 3), np.float32), "y": np.full(4, 0.5)}, "no such array": {"z": np.ones(3)}}


@pytest.mark.parametrize("kind", [*BAD, "missing", "garbage"])
def test_data_that_cannot_be_read_change_nothing(cli: Cli, run: Path, kind: str) -> None:
    path = run.with_name("batch.npz")
    if kind in BAD:
        np.savez(path, **BAD[kind])
    elif kind == "garbage":
        path.write_bytes(b"<html>")
    else:
        path.unlink()
    assert extract(cli, run).code in (65, 66)
    assert not note_path(features(run)).exists()
    cli("predict", run).expect(0)
    cli("status", run, "--check").expect(0)


def test_newer_data_that_are_refused_while_they_are_worked_on_make_the_features_stale(cli: Cli, run: Path) -> None:
    np.savez(run.with_name("batch.npz"), x=np.full((4, 3), np.nan, np.float32))
    assert extract(cli, run).code == 65
    done = cli("predict", run, "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "stale_input")
    batch(run.parent, rows=9, seed=3)
    assert extract(cli, run).json["action"] == "replaced"
    cli("predict", run).expect(0)


def test_a_dry_run_or_a_wrong_option_leaves_no_note(cli: Cli, run: Path) -> None:
    batch(run.parent, rows=25, seed=2)
    assert extract(cli, run, "--dtype", "float16", "--dry-run").code == 73
    assert extract(cli, run, "--hold-out", "val=none:3").code == 2
    assert not note_path(features(run)).exists()


def test_a_split_behind_one_that_fails_is_noted_too(cli: Cli, run: Path) -> None:
    batch(run.parent, rows=25, seed=2)
    train = f"train=npz:{run.with_name('train.npz')}@30"
    assert extract(cli, run, "--data", train).code == 73
    assert note_path(features(run)).exists()
    cli("predict", run).expect(65)


def test_a_killed_extraction_leaves_the_note(cli: Cli, run: Path) -> None:
    batch(run.parent, rows=25, seed=2)
    words = ["extract-features", run, "--model", "flatten", "--data", f"new=npz:{run.with_name('batch.npz')}"]
    process = start(
        run_killed_at, [str(word) for word in words], "bnncli.commands.extract_features.splits", "write_features"
    )
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    killed = cli("predict", run, "--json")
    assert (killed.code, killed.json["error"]["code"]) == (65, "stale_input")
    assert extract(cli, run).json["action"] == "replaced"
    cli("predict", run).expect(0)


def test_a_note_about_the_request_that_was_published_says_nothing(cli: Cli, run: Path) -> None:
    header = read_header(features(run))
    digests = {one["role"]: one["content_digest"] for one in header.inputs}
    sources = [Source(role, Path("x"), digest) for role, digest in digests.items()]
    own = request_digest(header.provenance["params"], sources)
    write_note(features(run), reason="killed", request=own)
    cli("predict", run).expect(0)
    write_note(features(run), reason="killed", request=None)
    cli("predict", run).expect(65)
    note_path(features(run)).write_text("{")
    cli("predict", run).expect(65)
    note_path(features(run)).write_text(canonical_json([1]))
    cli("predict", run).expect(65)
    assert extract(cli, run).json["action"] == "up_to_date"
    cli("predict", run).expect(0)
