"""extract-features: resuming, texts, and shifted copies of splits."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli, Invocation
from problems.installed import installed_parts
from problems.transforms import Halved, WordLengths
from problems.words_model import CLASSES, MeanOfWords, write_weights
from torch import nn

from bnncli.artifacts.features import FeatureFile, read_features
from bnncli.artifacts.files import read_header
from bnncli.commands.extract_features.splits import list_input_notes
from bnncli.data.pixels import Preprocess
from bnncli.data.shift import Shift
from bnncli.data.splits import load_split
from bnncli.errors import Interrupted
from bnncli.numerics.random import stream_seed
from bnncli.session.network import FeatureStore

NETWORK = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))\n"
DATA = """
import numpy as np
class Data:
    def __len__(self):
        return 700
    def __getitem__(self, row):
        return np.sin(np.arange(4, dtype="f4") + row), row % 3
"""
SPLITS = ("train", "test")
Extract = Callable[..., Invocation]
Cut = Callable[[int], None]


@pytest.fixture
def extract(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extract:
    """Runs extract-features on two splits, of arrays and of a Dataset whose labels are known when they are read."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    Path("data.py").write_text(DATA)
    rng = np.random.default_rng(1)
    np.savez("train.npz", x=rng.normal(size=(900, 4)).astype("f4"), y=rng.integers(3, size=900))
    torch.manual_seed(1)
    torch.save(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).state_dict(), "net.pt")
    data = ("--data", "train=npz:train.npz", "--data", "test=py:data.py:Data")
    return lambda *words: cli(
        "extract-features", "net.pt", "--model", "net.py:make", *data, "--batch-size", 100, *words
    )


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Interrupts the next command after so many batches, as a signal does."""
    plain, left = FeatureStore.collect, [-1]

    def limited(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if left[0] == 0:
                left[0] = -1
                raise Interrupted(15, "interrupted")
            left[0] -= 1
            yield batch

    monkeypatch.setattr(FeatureStore, "collect", lambda self, batches: plain(self, limited(batches)))
    return lambda batches: left.__setitem__(0, batches)


def digests(folder: Path = Path("net.pt.bnn")) -> list[str]:
    return [read_features(folder / "features" / f"{name}.h5").header.content_digest for name in SPLITS]  # type: ignore[union-attr]


def statistics(folder: Path = Path("net.pt.bnn")) -> list[object]:
    headers = [read_header(folder / "features" / f"{name}.h5") for name in SPLITS]
    return [header.provenance["input_statistics"] for header in headers]


def left_behind(folder: Path = Path("net.pt.bnn")) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*") if path.is_file() and not path.name.endswith(".lock"))


@pytest.mark.parametrize("words", [(), ("--dtype", "float16")])
def test_a_run_continues_to_the_same_bytes_wherever_it_was_interrupted(
    extract: Extract, cut: Cut, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...]
) -> None:
    assert extract(*words, "--run-dir", "whole.bnn").code == 0
    assert left_behind(Path("whole.bnn")) == []
    saving = (*words, "--save-every", 0)
    for batches, told in ((5, "nothing to resume"), (2, "resuming after 500 rows of train"), (4, "after 700 rows")):
        cut(batches)
        found = extract(*saving, "--resume")
        assert (found.code, "--resume" in found.stderr.splitlines()[-1]) == (143, True), found.stderr
        assert told in found.stderr
        assert left_behind()
    done = extract(*saving, "--resume")
    assert (done.code, left_behind()) == (0, []), done.stderr
    assert "resuming after 900 rows of train" in done.stderr
    assert "resuming after 200 rows of test" in done.stderr
    assert digests() == digests(Path("whole.bnn"))
    assert statistics() == statistics(Path("whole.bnn"))


def test_a_short_run_keeps_nothing_when_it_is_interrupted_without_a_state(extract: Extract, cut: Cut) -> None:
    cut(0)
    assert extract().code == 143
    assert left_behind() == []


def test_only_the_same_request_is_continued(extract: Extract, cut: Cut) -> None:
    cut(3)
    extract("--save-every", 0)
    assert left_behind() == [".train.resume.rows", ".train.resume.safetensors"]
    for words, why in (
        (("--dtype", "float16"), "other options"),
        (("--batch-size", 50), "another batch size"),
        (("--seed", 5), "another seed"),
    ):
        refused = extract(*words, "--resume")
        assert refused.code == 65
        assert why in refused.stderr
    np.savez("train.npz", x=np.ones((900, 4), "f4"), y=np.zeros(900, int))
    refused = extract("--resume")
    assert (refused.code, "another data.train" in refused.stderr) == (65, True)
    afresh = extract()
    assert (afresh.code, left_behind()) == (0, []), afresh.stderr


@pytest.mark.parametrize("harm", ["gone", "short", "changed"])
def test_features_that_were_harmed_meanwhile_are_not_continued(extract: Extract, cut: Cut, harm: str) -> None:
    cut(3)
    extract("--save-every", 0)
    rows = Path("net.pt.bnn/features/.train.resume.rows")
    content = bytearray(rows.read_bytes())
    content[70] ^= 1
    if harm == "gone":
        rows.unlink()
    else:
        rows.write_bytes(content[:-1] if harm == "short" else content)
    refused = extract("--resume")
    assert refused.code == 65
    assert {"gone": "are missing", "short": "truncated", "changed": "damaged"}[harm] in refused.stderr
    assert "rm " in refused.stderr


TEXTS = ["a bb ccc", "dddd", "eeeee f", "a b c d e", "one two three four five six"] * 3
LABELS = ["short", "long", " odd"] * 5


@pytest.fixture(autouse=True)
def words_kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`--model words:FILE`, as a distribution adds it."""
    with installed_parts(tmp_path_factory.mktemp("theirs"), "models", {"words": "problems.words_model"}):
        yield


@pytest.fixture
def run(tmp_path: Path) -> list[object]:
    weights = write_weights(tmp_path / "weights.safetensors")
    with open(tmp_path / "train.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *zip(TEXTS, LABELS, strict=True)])
    records = [{"text": text, "label": row % 3} for row, text in enumerate(TEXTS[:3])]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = [f"--data=train=csv:{tmp_path / 'train.csv'}", f"--data=test=jsonl:{tmp_path / 'test.jsonl'}"]
    return ["extract-features", tmp_path / "reviews", f"--model=words:{weights}", *data]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_features_are_those_of_the_model(cli: Cli, run: list[object], tmp_path: Path, num_workers: int) -> None:
    done = cli(*run, "--num-workers", num_workers, "--batch-size", 4).expect(
        0, "train: 6 of 15 texts were longer than 4 tokens and were truncated"
    )
    assert "texts were" not in done.stderr.replace("train: 6 of 15 texts were", "")
    found = read_features(tmp_path / "reviews.bnn/features/train.h5")
    inputs = {name: torch.from_numpy(array) for name, array in dict(WordLengths()(TEXTS).inputs).items()}
    np.testing.assert_allclose(found.features[:], MeanOfWords().pooled(**inputs).detach(), rtol=1e-6)
    np.testing.assert_allclose(found.check_logits[:], MeanOfWords()(**inputs).detach(), atol=1e-5)
    assert found.labels is not None
    assert found.labels[:].tolist() == [0, 1, 2] * 5
    assert found.classes == list(CLASSES)
    assert (found.num_truncated, read_features(tmp_path / "reviews.bnn/features/test.h5").num_truncated) == (6, 0)


def test_the_same_data_are_up_to_date_and_other_data_are_not(cli: Cli, run: list[object], tmp_path: Path) -> None:
    cli(*run).expect(0)
    assert "up to date" in cli(*run, "--num-workers", 1).stderr
    with open(tmp_path / "train.csv", "a") as stream:
        stream.write("one more,long\r\n")
    cli(*run).expect(0, "train: 6 of 16 texts")
    assert len(read_features(tmp_path / "reviews.bnn/features/train.h5").features) == 16


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
def test_real_numbers_are_taken_as_they_are_and_that_is_said(tmp_path: Path, dtype: str) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 4, 4), dtype))
    split = load_split(f"npz:{tmp_path / 'a.npz'}", preprocess=Preprocess(transform=Halved()))
    zeros = np.zeros((2, 1))
    content = FeatureFile("far", zeros, None, zeros[:, 0], [], None, None, None, is_ood=True)
    said = ["far: the inputs are floats and are used unchanged: the model's preprocessing expects images"]
    assert list_input_notes(split, content) == (said if dtype == "float64" else [])


def test_classes_that_the_model_does_not_have_are_refused(cli: Cli, run: list[object], tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(path.read_text().replace("short", "brief"))
    cli(*run).expect(65, "split 'train' has the classes 'brief', 'long', 'odd'; the model has 'Short', 'Long', 'Odd'")


@pytest.mark.parametrize("kind", ["images", "npz"])
def test_images_are_no_data_for_a_model_of_texts(cli: Cli, run: list[object], tmp_path: Path, kind: str) -> None:
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "pictures/0.png")
    np.savez(tmp_path / "pictures.npz", x=np.zeros((2, 4, 4), np.uint8))
    place = tmp_path / ("pictures" if kind == "images" else "pictures.npz")
    cli(*run[:3], f"--data=test={kind}:{place}").expect(2 if kind == "images" else 65, "the model takes texts")


def test_padding_that_is_read(cli: Cli, run: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "padding" not in cli(*run, "--run-dir", tmp_path / "other.bnn").stderr
    pooled = lambda self, input_ids, attention_mask: self.embedding(input_ids)[:, -1]  # noqa: E731
    monkeypatch.setattr(MeanOfWords, "pooled", pooled)
    assert any("train: padding changes" in text for text in cli(*run, "--json").json["warnings"])


@pytest.mark.usefixtures("pictures_are_names")
def test_a_report_shows_the_least_certain_texts_as_texts(cli: Cli, run: list[object], tmp_path: Path) -> None:
    from problems.pages import read_page

    reviews = tmp_path / "reviews"
    for words in (run, ["fit-laplace", reviews, "--prior-precision", 1], ["predict", reviews], ["report", reviews]):
        cli(*words).expect(0)
    section = read_page(tmp_path / "reviews.bnn" / "report.html").one("inputs")
    assert {quote.text for quote in section.all("q")} == set(TEXTS[:3])
    assert not section.all("img")


SIZE = 6
SHIFTED_NETWORK = """
import torch
def make():
    hidden = torch.nn.Linear(36, 5)
    return torch.nn.Sequential(torch.nn.Flatten(), hidden, torch.nn.Tanh(), torch.nn.Linear(5, 3))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network and images, in the working folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 12)):
        pixels = random.integers(256, size=(count, SIZE, SIZE), dtype=np.uint8)
        np.savez(f"{name}.npz", x=pixels, y=np.arange(count) % 3)
    torch.manual_seed(0)
    shapes = {"1.weight": (5, 36), "1.bias": (5,), "3.weight": (3, 5), "3.bias": (3,)}
    torch.save({name: torch.randn(shape) / 3 for name, shape in shapes.items()}, "net.pt")
    Path("net.py").write_text(SHIFTED_NETWORK)
    return tmp_path


def extract_copies(cli: Cli, *words: str, code: int = 0) -> Invocation:
    return cli("extract-features", "net.pt", "--model", "net.py:make", *words).expect(code)


def features(name: str) -> np.ndarray:
    return read_features(Path("net.pt.bnn/features") / f"{name}.h5").features


def expected(images: np.ndarray) -> np.ndarray:
    """Features of images, by hand."""
    state = {name: tensor.numpy() for name, tensor in torch.load("net.pt").items()}
    return np.tanh(images.reshape(len(images), -1) / np.float32(255) @ state["1.weight"].T + state["1.bias"])


def test_a_rotated_copy_stands_beside_its_split(folder: Path, cli: Cli) -> None:
    extract_copies(cli, "--data", "train=npz:train.npz", "--data", "test=npz:test.npz")
    run = extract_copies(cli, "--data", "rot90=npz:test.npz", "--rotate", "90")
    images = np.load("test.npz")["x"]
    assert np.allclose(features("rot90"), expected(np.rot90(images, axes=(1, 2))), atol=1e-5)
    assert np.allclose(features("test"), expected(images), atol=1e-5)
    assert "share" not in run.stderr
    header = read_features(Path("net.pt.bnn/features/rot90.h5")).header
    assert header is not None
    assert header.provenance["params"]["rotate"] == 90.0
    for command in (("fit-laplace", "net.pt", "--prior-precision", "5"), ("predict", "net.pt"), ("status", "net.pt")):
        cli(*command).expect(0)


def test_noise_is_that_of_the_seed_and_the_row(folder: Path, cli: Cli) -> None:
    words = ("--data", "noisy=npz:test.npz", "--corrupt", "gaussian-noise:3", "--seed", "5", "--batch-size", "5")
    extract_copies(cli, *words)
    shift = Shift(corrupt="gaussian-noise:3", seed=stream_seed(5, "extract-features/corrupt"))
    images = np.stack([shift.apply(image, row) for row, image in enumerate(np.load("test.npz")["x"])])
    assert np.allclose(features("noisy"), expected(images), atol=1e-5)


def test_rotated_training_images_share_rows_with_those_of_training(folder: Path, cli: Cli) -> None:
    extract_copies(cli, "--data", "train=npz:train.npz")
    run = extract_copies(cli, "--data", "turned=npz:train.npz", "--rotate", "30")
    assert "share 40 rows" in run.stderr


def test_posteriors_over_all_layers_see_the_shifted_images(folder: Path, cli: Cli) -> None:
    extract_copies(cli, "--data", "train=npz:train.npz")
    extract_copies(cli, "--data", "noisy=npz:test.npz", "--rotate", "20", "--corrupt", "impulse-noise:4", "--seed", "3")
    cli(
        "fit-laplace", "net.pt", "--layers", "all", "--trust-code", "--prior-precision", "5", "--structure", "diag"
    ).expect(0)
    # The logits of what is read again must be those that were stored.
    cli(
        "predict", "net.pt", "--posterior", "laplace-all", "--split", "noisy", "--integrator", "mc", "--trust-code"
    ).expect(0)


def test_what_is_ready_cannot_be_rotated(folder: Path, cli: Cli) -> None:
    cli("extract-features", "other", "--from-npz", "f.npz", "--rotate", "0").expect(2, "--rotate needs a network")


def test_data_without_texts_store_no_number_of_them(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2), np.float32), y=[0, 1, 0, 1])
    cli("extract-features", tmp_path / "flat", "--model=flatten", f"--data=train=npz:{tmp_path / 'a.npz'}").expect(0)
    assert "num_truncated" not in read_header(tmp_path / "flat.bnn/features/train.h5").meta
