"""The inputs that report shows: as they were stored, where the data are still what was predicted; else in words."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from problems.command_line import Cli
from problems.pages import Node, check_is_self_contained, read_page

from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.report.subject import encode_png

pytestmark = pytest.mark.usefixtures("pictures_are_names")
SIDE = 6


@pytest.fixture
def run(cli: Cli, tmp_path: Path) -> Path:
    """A run of pictures, without a network; two of three classes are told apart by one pixel."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("test", 40)):
        images, labels = rng.integers(0, 256, size=(count, SIDE, SIDE), dtype=np.uint8), rng.integers(0, 3, size=count)
        images[:, 0, 0] = 120 * labels
        np.savez(tmp_path / f"{split}.npz", x=images, y=labels)
    data = [word for name in ("train", "test") for word in ("--data", f"{name}=npz:{tmp_path / name}.npz")]
    for words in (
        ("extract-features", "--model", "flatten", *data),
        ("fit-laplace", "--prior-precision", 1),
        ("predict",),
    ):
        cli(words[0], tmp_path / "pictures", *words[1:]).expect(0)
    return tmp_path / "pictures"


def page_of(cli: Cli, run: Path, *words: object) -> Node:
    cli("report", run, *words).expect(0)
    path = run.with_name(f"{run.name}.bnn") / "report.html"
    page = read_page(path)
    check_is_self_contained(page, path.read_text())
    return page


def shown(section: Node) -> list[np.ndarray]:
    sources = [str(image.attributes["src"]).partition("base64,")[2] for image in section.all("img")]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(source)))) for source in sources]


def test_the_least_certain_pictures_are_those_of_the_data(cli: Cli, run: Path) -> None:
    section = page_of(cli, run, "--examples", 3).one("inputs")
    probs = read_predictions(run.with_name("pictures.bnn") / "predictions/laplace.mc/test.h5").probs
    with np.load(run.with_name("test.npz")) as file:
        images, labels = file["x"], file["y"]
    least = np.argsort(probs.max(axis=1), kind="stable")[:3]
    for row, image, picture in zip(least, section.all("img"), shown(section), strict=False):
        np.testing.assert_array_equal(picture, images[row])
        said = f"Image of class {labels[row]}, predicted class {probs[row].argmax()} with probability {probs[row].max():.4f}"
        assert image.attributes["alt"] == said
    assert len(section.all("h3")) == 3


def test_no_inputs_are_shown_where_that_is_asked_for(cli: Cli, run: Path) -> None:
    page = page_of(cli, run, "--examples", 0)
    assert not page.all("img")
    assert not page.one("inputs").all("li")


def test_data_that_have_changed_or_gone_are_not_shown_and_that_is_said(cli: Cli, run: Path) -> None:
    with np.load(run.with_name("test.npz")) as file:
        np.savez(run.with_name("test.npz"), x=255 - file["x"], y=file["y"])
    section = page_of(cli, run).one("inputs")
    assert not section.all("img")
    assert "has changed since the features were extracted" in section.text
    assert section.all("li")
    run.with_name("test.npz").unlink()
    section = page_of(cli, run).one("inputs")
    assert not section.all("img")
    assert "test.npz" in section.all("p")[1].text


def test_inputs_of_code_are_shown_where_it_is_trusted_as_what_it_returns_now(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\ndef images():\n"
        "    return [(np.full((1, 4, 4), row / 20, np.float32), row % 2) for row in range(20)]\n"
    )
    spec = f"py:{tmp_path / 'own.py'}:images"
    run = tmp_path / "own"
    cli("extract-features", run, "--model", "flatten", "--data", f"train={spec}", "--data", f"test={spec}").expect(0)
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("predict", run).expect(0)
    untrusted, trusted = (page_of(cli, run, *words).one("inputs") for words in ((), ("--trust-code",)))
    assert "read by code, which is not executed; add --trust-code" in untrusted.text
    assert not untrusted.all("img")
    assert trusted.all("img")
    assert "Inputs of test are what its code returns now" in trusted.text


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 1), (9, 7, 3), (1, 9, 7), (3, 9, 7)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_arrays_of_images_in_any_order_of_axes_become_small_pictures(shape: tuple[int, ...], kind: type) -> None:
    png = encode_png(np.ones(shape, kind))
    assert png is not None
    with Image.open(io.BytesIO(png)) as image:
        assert image.size == (7, 9)
        assert image.mode == ("RGB" if 3 in shape else "L")


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_pictures_of_more_than_eight_bits_keep_their_shades(kind: type) -> None:
    shades = np.linspace(0, 1 if kind is np.float32 else 65535, 100).reshape(10, 10).astype(kind)
    png = encode_png(Image.fromarray(shades))
    assert png is not None
    found = np.asarray(Image.open(io.BytesIO(png)))
    np.testing.assert_allclose(found, 255 * (shades / shades.max()), atol=1)


def test_a_large_picture_is_made_small_and_a_row_of_numbers_is_none() -> None:
    png = encode_png(Image.new("RGB", (640, 320), "red"))
    assert png is not None
    assert Image.open(io.BytesIO(png)).size == (64, 32)
    assert encode_png(np.zeros(784)) is None
    assert encode_png(np.zeros((4, 4, 4, 4))) is None
    assert encode_png("text") is None
