"""What a model brings for images and texts: applied beside the network, refused where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems.transforms import Halved, WordLengths

from bnncli.data.pixels import Preprocess
from bnncli.data.splits import Batch, InputSplit, load_split
from bnncli.errors import BnnError, DataError, UsageError

RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
TEXTS = ["a bb ccc", "dddd", "", "a b c d e", "one two three four five six"]
IDS = [[1, 2, 3, 0], [4, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [3, 3, 5, 4]]

DATASETS = f"""
import numpy as np
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
    assert split.labels is not None
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
    "py:SETS:ragged": (
        None,
        DataError,
        r"row 1 has shape \(4,\); others have \(3,\) for 'input_ids': pad to equal length",
    ),
    "py:SETS:other": (None, DataError, "row 1 has the inputs 'ids'; others have 'input_ids'"),
}


@pytest.mark.parametrize("spec", REFUSED)
def test_data_that_the_model_cannot_take_are_refused(datasets: Path, tmp_path: Path, spec: str) -> None:
    transform, error, message = REFUSED[spec]
    np.savez(tmp_path / "colour.npz", x=COLOUR, rows=COLOUR.reshape(6, -1), short=COLOUR[:2])
    Image.fromarray(COLOUR[0]).save(tmp_path / "0.png")
    with pytest.raises(error, match=message):
        batches_of(spec.replace("SETS", str(datasets)).replace("FOLDER", str(tmp_path)), transform)


def test_texts_without_a_tokenizer_are_told_where_one_belongs(datasets: Path) -> None:
    with pytest.raises(UsageError) as refused:
        batches_of(f"py:{datasets}:texts", None)
    assert "hf:FOLDER; save the tokenizer to the folder" in (refused.value.hint or "")


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
