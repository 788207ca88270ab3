"""Transforms and augmentations of images."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from problems.command_line import Cli
from problems.transforms import Halved, WordLengths
from pyarrow import parquet as pq

from bnncli.data.pixels import Augmentation, ImageCounts, Preprocess
from bnncli.data.shift import Shift
from bnncli.data.splits import Batch, InputSplit, load_split
from bnncli.errors import BnnError, DataError, UsageError
from bnncli.models.architectures.mlp import build

pytestmark = [pytest.mark.core, pytest.mark.libraries]


RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
TEXTS = ["a bb ccc", "dddd", "", "a b c d e", "one two three four five six"]
IDS = [[1, 2, 3, 0], [4, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [3, 3, 5, 4]]

DATASETS = f"""
import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq
from PIL import Image
TEXTS = {TEXTS!r}
def texts(): return [(text, row % 2) for row, text in enumerate(TEXTS)]
def bare(): return TEXTS
def records(): return [{{"text": text, "label": row % 2}} for row, text in enumerate(TEXTS)]
def pairs(): return [((text, "zz"), 1) for text in TEXTS]
def odd(): return [("text", 0), (3.0, 1)]
def images(): return [(Image.new("RGB", (4 + row, 6), (row, 0, 255)), row % 2) for row in range(5)]
def named(): return [{{"input_ids": np.arange(3) + row, "weight": np.float64([row / 2]), "label": row % 2}} for row in range(5)]
def ragged(): return [{{"input_ids": np.arange(3 + row)}} for row in range(5)]
def other(): return [{{"input_ids": np.arange(3)}}, {{"ids": np.arange(3)}}]
"""


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sets_of_items.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "sets_of_items.py"


def batches_of(spec: str, transform: Any = None, *, num_workers: int = 0) -> list[Batch]:
    return list(load_split(spec, preprocess=Preprocess(transform=transform)).batches(2, num_workers=num_workers))


def named(batches: list[Batch], name: str) -> torch.Tensor:
    found = [batch.inputs[name] for batch in batches if isinstance(batch.inputs, dict)]
    return torch.cat(found)


def plain(batches: list[Batch]) -> torch.Tensor:
    found = [batch.inputs for batch in batches if isinstance(batch.inputs, torch.Tensor)]
    return torch.cat(found)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("factory", ["texts", "bare", "records"])
def test_texts_become_what_the_tokenizer_makes_of_them(datasets: Path, factory: str, num_workers: int) -> None:
    batches = batches_of(f"py:{datasets}:{factory}", WordLengths(), num_workers=num_workers)
    assert named(batches, "input_ids").tolist() == IDS
    assert named(batches, "input_ids").dtype == torch.int64
    assert named(batches, "attention_mask").tolist() == (np.array(IDS) > 0).tolist()
    assert [batch.num_truncated for batch in batches] == [0, 1, 1]
    labels = [batch.labels for batch in batches]
    assert labels == [None] * 3 if factory == "bare" else torch.cat(labels).tolist() == [0, 1, 0, 1, 0]  # type: ignore[arg-type]


def test_a_pair_of_texts_stays_a_pair(datasets: Path) -> None:
    batches = batches_of(f"py:{datasets}:pairs", WordLengths())
    assert named(batches, "input_ids")[1].tolist() == [4, 2, 0, 0]


@pytest.mark.parametrize("stored", ["channels last", "channels first", "grey"])
def test_arrays_of_pixels_go_through_the_processor(tmp_path: Path, stored: str) -> None:
    pixels = {"channels last": COLOUR, "channels first": COLOUR.transpose(0, 3, 1, 2), "grey": COLOUR[..., 0]}[stored]
    np.savez(tmp_path / "a.npz", x=pixels)
    rgb = np.repeat(COLOUR[..., :1], 3, axis=3) if stored == "grey" else COLOUR
    expected = rgb.reshape(6, 2, 2, 2, 2, 3).mean(axis=(2, 4)).transpose(0, 3, 1, 2) / 127.5 - 1
    inputs = plain(batches_of(f"npz:{tmp_path / 'a.npz'}", Halved()))
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1 / 127)
    assert inputs.dtype == torch.float32


def test_floating_point_arrays_are_what_the_network_takes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=COLOUR / 255)
    assert torch.equal(plain(batches_of(f"npz:{tmp_path / 'a.npz'}", Halved())), torch.from_numpy(COLOUR / 255).float())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_image_files_of_any_size_go_through_the_processor(tmp_path: Path, num_workers: int) -> None:
    for row, size in enumerate([(4, 4), (6, 8), (2, 10)]):
        Image.new("L" if row else "RGB", size, 51 if row else (51, 51, 51)).save(tmp_path / f"{row}.png")
    inputs = plain(batches_of(f"images:{tmp_path}", Halved(), num_workers=num_workers))
    torch.testing.assert_close(inputs, torch.full((3, 3, 2, 2), 51 / 127.5 - 1))


def test_images_of_a_dataset_go_through_the_processor(datasets: Path) -> None:
    inputs = plain(batches_of(f"py:{datasets}:images", Halved()))
    assert ((inputs[:, :, 0, 0] + 1) * 127.5).round().tolist() == [[row, 0, 255] for row in range(5)]


def test_the_identity_of_images_tells_the_channels_that_the_model_takes(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "0.png")

    def digest(mode: str) -> str:
        return load_split(f"images:{tmp_path}", preprocess=Preprocess(transform=Halved(mode))).order_digest

    assert digest("RGB") != digest("L")


def test_inputs_of_a_dataset_may_have_names(datasets: Path) -> None:
    batches = batches_of(f"py:{datasets}:named")
    assert named(batches, "input_ids").tolist() == [[row, row + 1, row + 2] for row in range(5)]
    assert named(batches, "weight").dtype == torch.float32
    assert torch.cat([batch.labels for batch in batches if batch.labels is not None]).tolist() == [0, 1, 0, 1, 0]


def test_arrays_of_a_file_may_go_to_several_arguments(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", input_ids=IDS, attention_mask=np.array(IDS) > 0, y=[0, 1, 0, 1, 2], x=np.zeros((5, 2)))
    split = load_split(f"npz:{tmp_path / 'a.npz'}:input_ids+attention_mask,y@4")
    batches = list(split.batches(3))
    assert named(batches, "input_ids").tolist() == IDS[:4]
    assert named(batches, "attention_mask").dtype == torch.bool
    assert split.labels.tolist() == [0, 1, 0, 1]
    alone = list(load_split(f"npz:{tmp_path / 'a.npz'}:input_ids").batches(5))
    assert named(alone, "input_ids").tolist() == IDS


def test_the_identity_of_named_arrays_tells_their_values_and_names(tmp_path: Path) -> None:
    def digest(**arrays: Any) -> str:
        np.savez(tmp_path / "a.npz", **arrays)
        return load_split(f"npz:{tmp_path / 'a.npz'}:{'+'.join(arrays)}").order_digest

    ids = np.array(IDS)
    found = [digest(a=ids, b=ids), digest(a=ids, c=ids), digest(a=ids, b=ids + 1), digest(a=ids, b=ids)]
    assert found[0] == found[3]
    assert len({*found}) == 3


REFUSED: dict[str, tuple[Any, type[BnnError], str]] = {
    "py:SETS:texts": (None, UsageError, "the data are texts, but the model has no tokenizer"),
    "py:SETS:bare": (Halved(), UsageError, "the data are texts, but the model takes images"),
    "images:FOLDER": (WordLengths(), UsageError, "the data are images, but the model takes texts"),
    "npz:FOLDER/colour.npz:x": (WordLengths(), DataError, r"takes texts, but the data are arrays of shape \(4, 4, 3\)"),
    "npz:FOLDER/colour.npz": (Halved("L"), DataError, "colour images, but the model takes greyscale images"),
    "npz:FOLDER/colour.npz:rows": (Halved(), DataError, r"takes images, but the data are arrays of shape \(48,\)"),
    "npz:FOLDER/colour.npz:x+short": (None, DataError, r"have different numbers of rows \('x' 6, 'short' 2\)"),
    "npz:FOLDER/colour.npz:x+absent": (None, DataError, "has no array 'absent'"),
    "py:SETS:odd": (WordLengths(), DataError, "row 1: expected a string, as in row 0, got float"),
    "py:SETS:ragged": (None, DataError, r"row 1 has shape \(4,\); others have \(3,\) for 'input_ids': pad to equal length"),
    "py:SETS:other": (None, DataError, "row 1 has the inputs 'ids'; others have 'input_ids'"),
}  # fmt: skip


@pytest.mark.parametrize("spec", REFUSED)
def test_data_that_the_model_cannot_take_are_refused(datasets: Path, tmp_path: Path, spec: str) -> None:
    transform, error, message = REFUSED[spec]
    np.savez(tmp_path / "colour.npz", x=COLOUR, rows=COLOUR.reshape(6, -1), short=COLOUR[:2])
    Image.fromarray(COLOUR[0]).save(tmp_path / "0.png")
    with pytest.raises(error, match=message):
        batches_of(spec.replace("SETS", str(datasets)).replace("FOLDER", str(tmp_path)), transform)


class Failing(WordLengths):
    def __call__(self, items: Any) -> Any:
        raise ValueError("no such word\nand more")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_preprocessing_that_fails_is_said_in_a_line(datasets: Path, num_workers: int) -> None:
    with pytest.raises(DataError, match=r"bare rows 0 to 1: the model's preprocessing failed .*: no such word$"):
        batches_of(f"py:{datasets}:bare", Failing(), num_workers=num_workers)


@pytest.mark.parametrize("option", ["mean", "std", "resize", "crop"])
def test_a_model_with_its_own_preprocessing_takes_no_other(option: str) -> None:
    with pytest.raises(UsageError, match=f"\0{option}\0: the model has its own preprocessing"):
        Preprocess.parse(**{option: "1" if option in ("mean", "std") else 1}, transform=Halved())  # type: ignore[arg-type]


def test_named_inputs_are_not_normalised(datasets: Path) -> None:
    split: InputSplit = load_split(f"py:{datasets}:named", preprocess=Preprocess(mean=(0.5,)))
    with pytest.raises(UsageError, match="\0mean\0 applies to images, but the inputs are 'input_ids', 'weight'"):
        next(split.batches(2))


FILL = torch.tensor([-1.0, 2.0])


@pytest.mark.parametrize(("padding", "flips"), [(2, True), (1, False), (0, True)])
def test_images_are_shifted_and_mirrored_as_drawn(padding: int, flips: bool) -> None:
    augmentation = Augmentation(padding, flips, FILL)
    shifts = 2 * padding + 1
    num_kinds = shifts**2 * (1 + flips)
    images = torch.randn(num_kinds, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    found = augmentation.apply(images, torch.arange(num_kinds))
    expected = []
    for number, image in enumerate(images):
        padded = FILL.view(2, 1, 1).expand(2, 5 + 2 * padding, 4 + 2 * padding).clone()
        padded[:, padding : padding + 5, padding : padding + 4] = image
        top, left = number // shifts % shifts, number % shifts
        cropped = padded[:, top : top + 5, left : left + 4]
        expected.append(cropped.flip(2) if number >= shifts**2 else cropped)
    # Shifted, then mirrored: the order of torchvision's RandomCrop and RandomHorizontalFlip.
    assert torch.equal(found, torch.stack(expected))


def test_every_shift_is_as_likely() -> None:
    augmentation = Augmentation(1, True, FILL)
    counts = augmentation.draw(18_000, torch.Generator().manual_seed(1)).bincount(minlength=18)
    assert len(counts) == 18
    # 1,000 each, standard deviation sqrt(18,000 / 18 x 17 / 18) = 30.7
    assert bool(((counts - 1000).abs() < 4 * 30.7).all())


@pytest.fixture
def images() -> np.ndarray:
    """Smooth, so that interpolation errs little."""
    coarse = np.random.default_rng(0).integers(256, size=(5, 4, 4, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(one).resize((28, 28), Image.Resampling.BICUBIC)) for one in coarse])


def split_of(path: Path, images: np.ndarray, shift: Shift | None) -> InputSplit:
    np.savez(path / "x.npz", x=images, y=np.arange(len(images)))
    return replace(load_split(f"npz:{path}/x.npz"), shift=shift)


def inputs_of(split: InputSplit, batch_size: int = 2, num_workers: int = 0) -> np.ndarray:
    batches: list[Any] = [one.inputs for one in split.batches(batch_size, num_workers=num_workers)]
    return np.concatenate([one.numpy() for one in batches])


@pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 4])
@pytest.mark.parametrize("size", [28, 27])
def test_quarter_turns_are_counter_clockwise_and_exact(images: np.ndarray, quarters: int, size: int) -> None:
    image = images[0][:size, :size]
    assert np.array_equal(Shift(rotate=90.0 * quarters).apply(image, 0), np.rot90(image, quarters))


@pytest.mark.parametrize("degrees", [15.0, -40.0, 130.0])
def test_other_turns_are_pillows_inside(images: np.ndarray, degrees: float) -> None:
    found = Shift(rotate=degrees).apply(images[1], 0).astype(int)
    expected = np.asarray(Image.fromarray(images[1]).rotate(degrees, Image.Resampling.BILINEAR)).astype(int)
    rows, columns = np.mgrid[:28, :28] - 13.5
    inside = np.hypot(rows, columns) < 12
    assert np.abs(found - expected)[inside].max() <= 1
    assert not Shift(rotate=45.0).apply(images[1], 0)[0, 0].any()


def test_noise_belongs_to_the_row_whatever_the_batches(tmp_path: Path, images: np.ndarray) -> None:
    split = split_of(tmp_path, images, Shift(corrupt="gaussian-noise:3", seed=7))
    whole = inputs_of(split)
    assert np.array_equal(whole, inputs_of(split, batch_size=5))
    assert np.array_equal(whole, inputs_of(split, num_workers=2))
    assert np.array_equal(whole[[1, 4]], inputs_of(split.take(np.array([1, 4]))))
    assert not np.array_equal(whole, inputs_of(replace(split, shift=Shift(corrupt="gaussian-noise:3", seed=8))))


def test_rows_have_noise_of_their_own_and_the_same_at_every_severity(tmp_path: Path) -> None:
    grey = np.full((2, 30, 30), 128, np.uint8)
    first, second = (
        inputs_of(split_of(tmp_path, grey, Shift(corrupt=f"gaussian-noise:{severity}"))) - 128 / 255
        for severity in (1, 2)
    )
    assert abs(np.corrcoef(first[0].ravel(), first[1].ravel())[0, 1]) < 5 / 30
    assert np.corrcoef(first[0].ravel(), second[0].ravel())[0, 1] > 0.98


def test_channels_first_and_last_are_shifted_alike(tmp_path: Path, images: np.ndarray) -> None:
    shift = Shift(rotate=20.0, corrupt="impulse-noise:2")
    last = inputs_of(split_of(tmp_path, images, shift))
    assert np.array_equal(last, inputs_of(split_of(tmp_path, np.moveaxis(images, 3, 1), shift)))


def test_it_rotates_before_it_corrupts(images: np.ndarray) -> None:
    turned = Shift(rotate=45.0).apply(images[0], 3)
    both = Shift(rotate=45.0, corrupt="brightness:1").apply(images[0], 3)
    assert np.array_equal(both, Shift(corrupt="brightness:1").apply(turned, 3))
    assert both[0, 0].all()


def test_images_for_a_transform_are_shifted_too(images: np.ndarray) -> None:
    shift = Shift(rotate=90.0)
    found = shift.of_stored([Image.fromarray(one) for one in images], np.arange(len(images)), "x")
    assert all(np.array_equal(np.asarray(one), np.rot90(image)) for one, image in zip(found, images, strict=True))


@pytest.mark.parametrize(
    ("stored", "what"),
    [
        (np.zeros((2, 4, 4), np.float32), "float32"),
        (np.zeros((2, 4), np.uint8), r"\(4,\)"),
        (["a", "b"], "texts"),
        ({"ids": np.zeros((2, 3))}, "ids"),
    ],
)
def test_anything_but_images_of_bytes_is_refused(stored: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"uint8 images.*{what}"):
        Shift(rotate=5.0).of_stored(stored, np.arange(2), "x")


def test_the_digest_is_that_of_the_data(tmp_path: Path, images: np.ndarray) -> None:
    split = split_of(tmp_path, images, Shift(rotate=5.0))
    assert split.order_digest == replace(split, shift=None).order_digest


@pytest.mark.parametrize("text", ["fog:1", "jpeg", "jpeg:0", "jpeg:6", "jpeg:two"])
def test_unknown_corruptions_are_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"KIND:SEVERITY, such as gaussian-noise:3, with KIND one of gaussian-noise.*jpeg"
    ):
        Shift(corrupt=text)


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
        "extract-features", "net.pt", "--model", "mlp", "--model-arg", "inputs=48", "--data", "train=images:train",
    )  # fmt: skip
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
