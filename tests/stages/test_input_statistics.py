"""What extract-features records of inputs, and the warnings for those that are unlike the first split's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.data.pixels import Preprocess
from bnncli.data.shift import Shift
from bnncli.data.splits import InputSplit, load_split
from bnncli.models.architectures.mlp import build
from bnncli.models.features import InputSums
from bnncli.numerics.corruptions import CORRUPTIONS
from bnncli.session.network_fit import difference

DATA = Path(__file__).resolve().parents[3] / "shared/data"
KINDS = ("fmnist-train", "fmnist-test", "mnist-test", "kmnist-test", "notmnist-test", "emnist-letters-test")
COLOURS = ("cifar10-train10k", "cifar10-test", "cifar100-test5k")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 4 x 4 as bytes and as real numbers in several scales, a network, and image files."""
    folder = tmp_path_factory.mktemp("scales")
    generator = np.random.default_rng(0)
    labels = np.arange(300) % 3
    images = generator.integers(256, size=(300, 1, 4, 4), dtype=np.uint8)
    reals = images.astype(np.float32) / 255
    arrays = {
        "bytes": images,
        "unit": reals,
        "f255": reals * 255,
        "tiny": reals / 255,
        "signed": reals * 2 - 1,
        "faint": 0.05 * reals,
        "dark": 0.5 * reals,
    }
    for name, array in arrays.items():
        np.savez(folder / f"{name}.npz", x=array, y=labels)
    torch.manual_seed(0)
    torch.save(build(inputs=16, hidden=(6,), classes=3).state_dict(), folder / "net.pt")
    (folder / "in").mkdir()
    for number, image in enumerate(images[:20, 0]):
        Image.fromarray(image).save(folder / f"in/{number}.png")
    return folder


def extract(cli: Cli, folder: Path, *words: object) -> Any:
    done = cli("extract-features", folder / "net.pt", "--model", "mlp", "--json", *words)
    assert done.code == 0, done.stderr
    return [text for text in done.json["warnings"] if "misreads" not in text]


def test_the_numbers_are_those_of_numpy(cli: Cli, folder: Path, tmp_path: Path) -> None:
    assert extract(cli, folder, "--data", f"train=npz:{folder}/bytes.npz", "--run-dir", tmp_path / "run") == []
    with np.load(folder / "bytes.npz") as arrays:
        pixels = arrays["x"] / 255
    found = read_header(tmp_path / "run/features/train.h5").provenance["input_statistics"]
    assert (found["num_rows"], found["shape"], found["min"], found["max"]) == (300, [1, 4, 4], 0, 1)
    few = found["mean"] + found["std"] + [found["zeros"], found["negative"], found["mean_absolute"]]
    some = np.concatenate([pixels[:256:4], pixels[256:]])  # at most 64 rows of a batch
    own = [some.mean(), some.std(), (some == 0).mean(), 0, some.mean()]
    assert few == pytest.approx(own, rel=1e-5)


TOLD = {
    ("unit", "bytes"): None,
    ("unit", "dark"): None,
    ("unit", "f255"): r"test: values are about 255 times as large as in train (uint8 is divided by 255",
    ("unit", "tiny"): "test: values are about 255 times smaller than in train",
    ("f255", "bytes"): "test: values are about 255 times smaller than in train",
    ("unit", "signed"): "% of the values are negative, but 0% in train: only one of them is normalised",
    ("signed", "unit"): "test: 0% of the values are negative, but ",
}


@pytest.mark.parametrize(("train", "test"), TOLD)
def test_another_scale_is_told_with_numbers(cli: Cli, folder: Path, train: str, test: str, tmp_path: Path) -> None:
    line = (
        "--data",
        f"train=npz:{folder}/{train}.npz",
        "--data",
        f"test=npz:{folder}/{test}.npz",
        "--run-dir",
        tmp_path,
    )
    told = TOLD[train, test]
    for _ in range(2):  # up to date, and still told
        warnings = extract(cli, folder, *line)
        assert len(warnings) == (told is not None)
        assert told is None or (
            told in warnings[0] and "(train: " in warnings[0] and ", standard deviation " in warnings[0]
        )


def test_ood_data_may_differ_in_all_but_a_factor(cli: Cli, folder: Path, tmp_path: Path) -> None:
    line = ("--data", f"train=npz:{folder}/unit.npz", "--run-dir", tmp_path)
    names = ("tiny", "signed", "faint", "f255")
    warnings = extract(cli, folder, *line, *(f"--ood={name}=npz:{folder}/{name}.npz" for name in names))
    assert [text.partition(":")[0] for text in warnings] == ["tiny", "f255"]


def test_new_data_and_arriving_images_are_compared_with_the_run(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = ("--run-dir", tmp_path / "run")
    for train, told in (("unit", 0), ("f255", 1)):
        extract(cli, folder, "--data", f"train=npz:{folder}/{train}.npz", *run, "--force")
        assert cli("fit-laplace", folder / "net.pt", *run, "--prior-precision", 1, "--force").code == 0
        predicted = ("predict", folder / "net.pt", *run, "--posterior", "laplace", "--table")
        for number, words in enumerate(
            (("--data", f"new=npz:{folder}/bytes.npz"), ("--follow", folder / "in", "--idle", 0))
        ):
            done = cli(*predicted, tmp_path / f"{train}{number}.csv", *words)
            assert done.code == 0, done.stderr
            assert done.stderr.count("times smaller than in train") == told
    kept = (tmp_path / "kept.csv", "--data", f"kept=npz:{folder}/bytes.npz", "--keep-features")
    assert cli(*predicted, *kept).stderr.count("kept: values are about 255 times smaller than in train") == 1


def statistics(split: InputSplit) -> dict[str, Any]:
    sums: InputSums | None = None
    for batch in split.batches(256):
        sums = InputSums.of(batch.inputs).plus(sums)
    assert sums is not None
    return sums.statistics()


def of_tokens(ids: np.ndarray) -> dict[str, Any]:
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones(ids.shape, dtype=torch.int64)}
    return InputSums.of(inputs).statistics()


def test_texts_of_another_vocabulary_are_told() -> None:
    generator = np.random.default_rng(0)
    usual = 10 + (generator.zipf(1.3, size=(500, 20)) % 5000)
    train, same = of_tokens(usual[:300]), of_tokens(usual[300:])
    unknown = of_tokens(np.where(generator.random(usual.shape) < 0.6, 1, usual))
    others = of_tokens(usual + 5000)
    few = of_tokens(others["tokens"]["commonest"][0] * np.ones((2, 20), np.int64))
    found = [difference("test", one, "train", train, is_scale_alone=False) for one in (same, unknown, others, few)]
    assert found[0] is None
    assert found[1] is not None
    assert "60% of its tokens have the id 1, but 0% in train; if this is the unknown token," in found[1]
    assert found[2] is not None
    assert "of its tokens" in found[2]
    assert found[3] is None
    assert difference("test", others, "train", train, is_scale_alone=True) is None


def test_padding_is_no_token() -> None:
    ids, mask = torch.tensor([[5, 0, 0], [5, 6, 7]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    found = InputSums.of({"input_ids": ids, "attention_mask": mask}).statistics()["tokens"]
    assert found == {"num": 4, "commonest": [5, 6, 7], "counts": [2, 1, 1]}


def test_inverted_images_are_told() -> None:
    images = (torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.8).clamp(min=0) * 5
    train, inverted = (InputSums.of(one).statistics() for one in (images, 1 - images))
    told = difference("test", inverted, "train", train, is_scale_alone=False)
    assert told is not None
    assert told.startswith("test: images look inverted compared with train: 0")
    assert difference("test", inverted, "train", train, is_scale_alone=True) is None


def test_images_of_another_size_are_told() -> None:
    generator = torch.Generator().manual_seed(0)
    small, large = (InputSums.of(torch.rand(20, 3, size, size, generator=generator)).statistics() for size in (8, 16))
    told = difference("test", large, "train", small, is_scale_alone=False)
    assert told is not None
    assert told.startswith("test: images have 16 x 16 pixels, but 8 x 8 in train (see ")
    assert difference("test", large, "train", small, is_scale_alone=True) is None


def test_a_few_black_or_white_images_are_nothing_odd() -> None:
    train = InputSums.of(torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))).statistics()
    for image in (torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)):
        assert difference("new", InputSums.of(image).statistics(), "train", train, is_scale_alone=False) is None


@pytest.mark.shared
@pytest.mark.skipif(not DATA.exists(), reason="needs the full-size data")
@pytest.mark.parametrize("kinds", [KINDS, COLOURS], ids=["grey", "colour"])
def test_ordinary_shift_is_not_told(kinds: tuple[str, ...]) -> None:
    opened = [load_split(f"npz:{DATA / kind}.npz@300", preprocess=Preprocess()) for kind in kinds]
    train = statistics(opened[0])
    normalised = Preprocess.parse(mean="0.5", std="0.25")
    for split, kind in zip(opened[1:], kinds[1:], strict=True):
        assert difference(kind, statistics(split), "train", train, is_scale_alone=False) is None
    again = statistics(load_split(f"npz:{DATA / kinds[0]}.npz@300", preprocess=normalised))
    assert "negative" in str(difference("normalised", again, "train", train, is_scale_alone=False))
    few = opened[1].take(np.arange(60))
    shifts = [Shift(corrupt=f"{kind}:5") for kind in CORRUPTIONS] + [
        Shift(rotate=angle) for angle in (45.0, 90.0, 180.0)
    ]
    for shift in shifts:  # as copies that somebody has saved are
        changed = statistics(InputSplit(few.spec, few.dataset, few.rows, few.preprocess, True, shift=shift))
        assert difference(str(shift), changed, "train", train, is_scale_alone=False) is None
