"""Image files as people see them, on every path: turned as EXIF says, and transparent pixels on a background."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli
from problems.transforms import Halved

from bnncli.data.pixels import ImageCounts, Preprocess
from bnncli.data.splits import load_split
from bnncli.models.architectures.mlp import build

pytestmark = [pytest.mark.core, pytest.mark.libraries]

PIXELS = np.random.default_rng(0).integers(256, size=(4, 4, 3), dtype=np.uint8)
STORED_TURN = {
    2: lambda image: image[:, ::-1],
    3: lambda image: np.rot90(image, 2),
    6: np.rot90,
    8: lambda image: np.rot90(image, 3),
}


def png(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", **options)
    return stream.getvalue()


def turned(orientation: int, pixels: np.ndarray = PIXELS) -> bytes:
    """A file that EXIF turns back to the pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return png(Image.fromarray(np.ascontiguousarray(STORED_TURN[orientation](pixels))), exif=exif)


def transparent(kind: str) -> bytes:
    """Black under its transparent left half: RGBA, LA, a palette, or grey with one transparent shade."""
    alpha = np.full((4, 4), 255, np.uint8)
    alpha[:, :2] = 0
    black = np.zeros((4, 4, 3), np.uint8)
    black[:, 2:] = 90
    image = Image.fromarray(black)
    if kind in ("L", "P"):
        plain = Image.fromarray(black[..., 0]) if kind == "L" else image.quantize(2)
        return png(plain, transparency=plain.getpixel((0, 0)))
    image.putalpha(Image.fromarray(alpha))
    return png(image if kind == "RGBA" else image.convert("LA"))


def write_folder(folder: Path, files: Iterable[bytes]) -> str:
    (folder / "a").mkdir()
    for number, content in enumerate(files):
        (folder / f"a/{number}.png").write_bytes(content)
    return f"images:{folder}"


def write_csv(folder: Path, files: Iterable[bytes]) -> str:
    write_folder(folder, files)
    with (folder / "a.csv").open("w", newline="") as stream:
        names = sorted(path.name for path in (folder / "a").iterdir())
        csv.writer(stream).writerows([("image", "label"), *((f"a/{name}", 0) for name in names)])
    return f"csv:{folder}/a.csv:image=image,label=label"


def write_parquet(folder: Path, files: Iterable[bytes]) -> str:
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    pq.write_table(pa.table({"image": [*files]}), folder / "a.parquet")
    return f"parquet:{folder}/a.parquet"


def write_shards(folder: Path, files: Iterable[bytes]) -> str:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, content in enumerate(files):
            for name, data in ((f"{number}.png", content), (f"{number}.cls", b"0")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return f"webdataset:{folder}/a.tar"


WRITERS = {"images": write_folder, "csv": write_csv, "parquet": write_parquet, "webdataset": write_shards}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Iterable[bytes]], str]:
    return lambda files: WRITERS[request.param](tmp_path, files)


def arrays(spec: str, num_workers: int = 0, **options: Any) -> tuple[np.ndarray, ImageCounts]:
    """Pixels (n, H, W, C) as they are decoded, and what was counted."""
    batches = [*load_split(spec, preprocess=Preprocess(**options)).batches(3, num_workers=num_workers)]
    pixels = torch.cat([batch.inputs for batch in batches]).mul(255).round().byte()  # type: ignore[misc]
    return pixels.movedim(1, -1).numpy(), reduce(ImageCounts.plus, (batch.images for batch in batches))


def test_images_are_turned_as_exif_says(write: Callable[[Iterable[bytes]], str]) -> None:
    spec = write([*map(turned, STORED_TURN), png(Image.fromarray(PIXELS))])
    for num_workers in (0, 1):
        found, counts = arrays(spec, num_workers)
        assert counts == (4, 0)
        np.testing.assert_array_equal(found, np.stack([PIXELS] * 5))
    found, counts = arrays(spec, no_exif=True)
    assert counts == (0, 0)
    np.testing.assert_array_equal(found[:4], np.stack([turn(PIXELS) for turn in STORED_TURN.values()]))


@pytest.mark.parametrize("kind", ["RGBA", "LA", "L", "P"])
def test_transparent_pixels_show_the_background(write: Callable[[Iterable[bytes]], str], kind: str) -> None:
    spec = write(
        [
            transparent(kind),
            png(
                Image.fromarray(PIXELS[..., 0] if kind in ("L", "LA") else PIXELS).convert(
                    "RGB" if kind in ("RGBA", "P") else "L"
                )
            ),
        ]
    )
    for options, shade in (({}, 255), ({"background": "black"}, 0)):
        found, counts = arrays(spec, **options)
        assert counts == (0, 1)
        assert (found[0, :, :2] == shade).all()
        assert (found[0, :, 2:] == 90).all()


def test_what_a_model_prepares_is_upright_and_has_no_alpha(write: Callable[[Iterable[bytes]], str]) -> None:
    wide = np.repeat(PIXELS, 2, axis=1)
    split = load_split(write([turned(6, wide), transparent("RGBA")]), preprocess=Preprocess(transform=Halved()))
    first, second = split.dataset.read(split.rows)[0]
    np.testing.assert_array_equal(np.asarray(first), wide)
    assert (np.asarray(second)[:, :2] == 0).all()


def test_damaged_exif_leaves_an_image_as_it_is(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, "PNG", exif=b"Exif\0\0nonsense")
    found, counts = arrays(write_folder(tmp_path, [stream.getvalue()]))
    assert counts == (0, 0)
    np.testing.assert_array_equal(found[0], PIXELS)


def test_commands_say_and_record_what_they_did_to_images(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(build(inputs=48, hidden=(6,), classes=2).state_dict(), "net.pt")
    for number, content in enumerate([turned(6), transparent("RGBA"), png(Image.fromarray(PIXELS))] * 2):
        folder = Path("train") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(content)
    extraction = (
        "extract-features",
        "net.pt",
        "--model",
        "mlp",
        "--model-arg",
        "inputs=48",
        "--data",
        "train=images:train",
    )
    turned_line = "2 of 6 images were rotated to match their EXIF orientation (turn this off with --no-exif)"
    for words, told, others in (
        ((), (turned_line, "2 of 6 images with transparent pixels are shown on white (see --background)"), ()),
        (
            ("--no-exif", "--background", "black"),
            ("2 of 6 images with transparent pixels are shown on black",),
            (turned_line,),
        ),
    ):
        done = cli(*extraction, *words, "--force")
        assert done.code == 0, done.stderr
        assert cli("fit-laplace", "net.pt", "--prior-precision", 1, "--force").code == 0
        predicted = ("predict", "net.pt", "--posterior", "laplace", "--force", "--table")
        new = cli(*predicted, "a.csv", "--data", "new=images:train")
        followed = cli(*predicted, "b.csv", "--follow", "train/a", "--idle", 0)
        for line in told:
            assert line in done.stderr
            assert line in new.stderr
        for line in others:
            assert line not in done.stderr + new.stderr + followed.stderr
        assert "1 of 3 images with transparent pixels are shown on" in followed.stderr
    mixed = cli(*extraction[:-1], "test=images:train")
    assert mixed.code == 65
    assert "was extracted with another --no-exif (then True, now None)" in mixed.stderr
