"""Parquet, Arrow and folders of Hugging Face's datasets: rows as they were written, a block at a time."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from problems.transforms import Halved, WordLengths
from pyarrow import parquet as pq

from bnncli.data.pixels import Preprocess
from bnncli.data.prediction_files import read_given_predictions, read_numbers
from bnncli.data.splits import InputSplit, load_split
from bnncli.data.table_files import Table, feature_class_names, open_parquet
from bnncli.data.tables import indicator_matrix
from bnncli.errors import BnnError, DataError, MissingInput, UsageError

pytestmark = [pytest.mark.core, pytest.mark.libraries]

NUM_ROWS = 50
TEXTS = [f"text {row}" * (row % 3 + 1) for row in range(NUM_ROWS)]
LABELS = [row % 3 for row in range(NUM_ROWS)]
NAMES = ["c", "a", "b"]  # of the classes, in no order
FEATURES = {"label": {"names": NAMES, "_type": "ClassLabel"}, "text": {"dtype": "string", "_type": "Value"}}


def table(rows: slice = slice(None), **columns: Any) -> Any:
    found = pa.table({"text": TEXTS[rows], "label": LABELS[rows], **columns})
    return found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})


def test_files_of_a_folder_come_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2):
        pq.write_table(pa.table({"text": [f"part {number}"]}), tmp_path / f"part-{number}.parquet")
    for place in (tmp_path, tmp_path / "part-*.parquet"):
        split = load_split(f"parquet:{place}", preprocess=Preprocess(transform=WordLengths()))
        assert split.dataset.read(split.rows)[0] == ["part 2", "part 10"]


def test_two_columns_of_a_name_are_told(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has several columns named 'text'"):
        load_split(f"parquet:{tmp_path / 'a.parquet'}", preprocess=Preprocess(transform=WordLengths()))


def test_images_with_bytes_and_path_are_turned_as_datasets_turns_them(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 2)).save(tmp_path / "a.jpg", exif=exif)
    stored = [{"bytes": (tmp_path / "a.jpg").read_bytes(), "path": None}, {"bytes": None, "path": "a.jpg"}]
    pq.write_table(pa.table({"image": stored}), tmp_path / "a.parquet")
    split = load_split(f"parquet:{tmp_path / 'a.parquet'}", preprocess=Preprocess(transform=Halved()))
    found = split.dataset.read(split.rows)[0]
    assert [image.size for image in found] == [(2, 4), (2, 4)]


def write_stream(whole: Any, path: Path, *, rows: int = 7) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=rows)
    return path


def write_file(whole: Any, path: Path) -> Path:
    options = pa.ipc.IpcWriteOptions(compression="lz4")  # as Feather is by default
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, whole.schema, options=options) as writer:
        writer.write_table(whole, max_chunksize=7)
    return path


def write_saved(folder: Path, *, features: Any = FEATURES) -> Path:
    """As `Dataset.save_to_disk` does, in two files, the second one first by its name."""
    folder.mkdir(parents=True)
    names = ["data-9.arrow", "data-1.arrow"]
    for name, rows in zip(names, (slice(20), slice(20, None)), strict=True):
        write_stream(table(rows).replace_schema_metadata(None), folder / name)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def write_cached(folder: Path) -> Path:
    """As `load_dataset` does: all splits beside each other, and what `map` has made."""
    folder.mkdir(parents=True)
    whole = table().replace_schema_metadata(None)
    write_stream(whole.slice(20), folder / "my-set-train-00001-of-00002.arrow")
    write_stream(whole.slice(0, 20), folder / "my-set-train-00000-of-00002.arrow")
    write_stream(whole.slice(0, 5), folder / "my-set-test.arrow")
    write_stream(whole.slice(0, 2), folder / "cache-0123456789.arrow")
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))
    return folder


def write_dict(folder: Path) -> Path:
    """As `DatasetDict.save_to_disk` does."""
    write_saved(folder / "train")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


def write_parquet_files(folder: Path) -> Path:
    folder.mkdir()
    for number, rows in enumerate((slice(20), slice(20, None))):
        pq.write_table(table(rows), folder / f"train-0000{number}-of-00002.parquet", row_group_size=13)
    pq.write_table(table(slice(5)), folder / "test-00000-of-00001.parquet")
    return folder


def one_parquet_file(folder: Path) -> str:
    pq.write_table(table(), folder / "a.parquet", row_group_size=13)
    return f"parquet:{folder / 'a.parquet'}"


FORMS: dict[str, Callable[[Path], str]] = {
    "a file": one_parquet_file,
    "a pattern": lambda folder: f"parquet:{write_parquet_files(folder / 'a')}/train-*.parquet:label=label",
    "a stream": lambda folder: f"arrow:{write_stream(table(), folder / 'a.arrow')}",
    "an arrow file": lambda folder: f"arrow:{write_file(table(), folder / 'a.feather')}",
    "saved": lambda folder: f"hf-dataset:{write_saved(folder / 'a')}",
    "saved splits": lambda folder: f"hf-dataset:{write_dict(folder / 'a')}:train",
    "cached": lambda folder: f"hf-dataset:{write_cached(folder / 'a/default/0.0.0')}:train:text=text",
    "cached, by a folder above": lambda folder: f"hf-dataset:{write_cached(folder / 'a/0').parent}:train",
}


def load(spec: str, transform: Any = None) -> InputSplit:
    return load_split(spec, name="train", preprocess=Preprocess(transform=transform or WordLengths()))


@pytest.mark.parametrize("form", FORMS)
def test_rows_come_as_they_were_written(tmp_path: Path, form: str) -> None:
    split = load(FORMS[form](tmp_path))
    assert split.classes == tuple(NAMES)
    assert split.labels.tolist() == LABELS
    for rows in (np.arange(NUM_ROWS), np.arange(3, NUM_ROWS, 5), np.array([0]), np.array([49]), np.array([12, 13, 5])):
        assert split.dataset.read(rows)[0] == [TEXTS[row] for row in rows]
    again = pickle.loads(pickle.dumps(split.dataset))
    assert again.read(np.array([21]))[0] == [TEXTS[21]]


@pytest.mark.parametrize("form", ["a file", "a stream", "saved"])
def test_workers_read_what_one_process_reads(tmp_path: Path, form: str) -> None:
    split = load(FORMS[form](tmp_path))
    first = [np.concatenate([batch.inputs["input_ids"] for batch in split.batches(4, num_workers=n)]) for n in (0, 2)]
    assert np.array_equal(*first)


def test_a_large_row_group_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(5000)]}), tmp_path / "a.parquet")
    split = load(f"parquet:{tmp_path / 'a.parquet'}")
    passes, read = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *args, **options: passes.append(1) or read(*args, **options))  # fmt: skip
    for start in range(0, 5000, 256):
        rows = np.arange(start, min(start + 256, 5000))
        assert split.dataset.read(rows)[0] == [f"text {row}" for row in rows]
    assert len(passes) == 1
    assert split.dataset.read(np.array([3]))[0] == ["text 3"]  # and again from its start
    assert len(passes) == 2


def test_only_the_columns_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table(big=[b"x" * 1000] * NUM_ROWS), tmp_path / "a.parquet")
    asked, read = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *args, **options: asked.append(options["columns"]) or read(*args, **options))  # fmt: skip
    split = load(f"parquet:{tmp_path / 'a.parquet'}")
    split.dataset.read(split.rows)
    assert asked == [["label"], ["text"]]


def png(row: int, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (5 * row, 0, 255)).convert(mode).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("stored", ["structs", "bytes"])
@pytest.mark.parametrize("transform", [None, Halved()])
def test_images_are_decoded(tmp_path: Path, stored: str, transform: Any) -> None:
    data = [png(row) for row in range(10)]
    images = [{"bytes": each, "path": None} for each in data] if stored == "structs" else data
    pq.write_table(pa.table({"img": images, "fine_label": LABELS[:10]}), tmp_path / "a.parquet", row_group_size=4)
    split = load_split(f"parquet:{tmp_path / 'a.parquet'}:image=img,label=fine_label", preprocess=Preprocess(transform=transform))  # fmt: skip
    inputs = np.concatenate([batch.inputs for batch in split.batches(3, num_workers=1)])
    scaled = (inputs + 1) / 2 if transform else inputs
    np.testing.assert_allclose(scaled[:, :, 1, 1] * 255, [[5 * row, 0, 255] for row in range(10)], atol=1e-3)


def test_grey_images_have_one_channel_and_files_of_images_are_found_by_their_paths(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png(3, "L"))
    rows = [{"bytes": None, "path": "0.png"}, {"bytes": png(3, "L"), "path": None}]
    pq.write_table(pa.table({"image": rows}), tmp_path / "a.parquet")
    inputs = np.concatenate([batch.inputs for batch in load_split(f"parquet:{tmp_path / 'a.parquet'}").batches(2)])
    assert inputs.shape == (2, 1, 4, 4)
    assert (inputs[0] == inputs[1]).all()


def test_numbers_and_lists_of_numbers_are_inputs_where_they_are_named(tmp_path: Path) -> None:
    columns = {
        "a": [1.5, 2.5],
        "b": [3, 4],
        "many": [[1.0, 2.0], [3.0, 4.0]],
        "label": pa.array(["x", "y"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    split = load_split(f"parquet:{tmp_path / 'a.parquet'}:x=a+many+b")
    np.testing.assert_array_equal(next(split.batches(2)).inputs, [[1.5, 1, 2, 3], [2.5, 3, 4, 4]])
    assert split.classes == ("x", "y")


def test_lists_of_token_ids_go_to_the_networks_arguments(tmp_path: Path) -> None:
    ids = [[1, 2, 0], [3, 4, 5]]
    pq.write_table(pa.table({"input_ids": ids, "attention_mask": [[1, 1, 0], [1, 1, 1]]}), tmp_path / "a.parquet")
    for columns in ("input_ids+attention_mask", "input_ids"):
        inputs = next(load_split(f"parquet:{tmp_path / 'a.parquet'}:x={columns}").batches(2)).inputs
        assert "+".join(inputs) == columns
        assert (inputs["input_ids"].tolist(), str(inputs["input_ids"].dtype)) == (ids, "torch.int64")
    pq.write_table(pa.table({"input_ids": [[1, 2, 0], [3, 4]]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError,
        match=r"row 1, column 'input_ids': expected 3 numbers as in the first row \(pad to equal length\), got list",
    ):
        next(load_split(f"parquet:{tmp_path / 'a.parquet'}:x=input_ids").batches(2))


def test_the_identity_is_of_files_columns_classes_and_rows(tmp_path: Path) -> None:
    def digest(spec: str) -> str:
        return load(spec).order_digest

    saved = write_saved(tmp_path / "a")
    renamed = write_saved(tmp_path / "b", features={"label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}})
    found = [digest(f"hf-dataset:{saved}{more}") for more in ("", ":label=", "@9")]
    assert len({*found, digest(f"hf-dataset:{renamed}")}) == 4
    assert digest(f"hf-dataset:{write_saved(tmp_path / 'c')}") == found[0]


LISTED = {
    "List": {"feature": FEATURES["label"], "_type": "List"},
    "Sequence": {"feature": FEATURES["label"], "length": -1, "_type": "Sequence"},
    "brackets": [FEATURES["label"]],
}


@pytest.mark.parametrize("form", LISTED)
def test_lists_of_classes_have_their_names(form: str) -> None:
    assert feature_class_names({"labels": LISTED[form], "text": FEATURES["text"]}) == {"labels": tuple(NAMES)}


def test_lists_of_classes_are_zeros_and_ones() -> None:
    assert indicator_matrix([[0, 2], [], [1]], 3, "a").tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    with pytest.raises(DataError, match="a: row 1 has class 3, but there are only 3 classes"):
        indicator_matrix([[0], [3]], 3, "a")


def test_a_column_of_lists_of_classes_is_several_labels(tmp_path: Path) -> None:
    metadata = {"huggingface": json.dumps({"info": {"features": {"labels": LISTED["List"]}}})}
    whole = pa.table({"text": ["a", "b"], "labels": [[0, 2], [1]]}).replace_schema_metadata(metadata)
    pq.write_table(whole, tmp_path / "a.parquet")
    split = load(f"parquet:{tmp_path / 'a.parquet'}")
    assert split.labels.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert split.classes == tuple(NAMES)


def write_other(folder: Path) -> str:
    folder.mkdir()
    pq.write_table(table(), folder / "0.parquet")
    pq.write_table(pa.table({"text": ["a"]}), folder / "1.parquet")
    return f"parquet:{folder}"


def write_damaged(path: Path) -> str:
    pq.write_table(table(), path)
    path.write_bytes(path.read_bytes()[:-40])
    return f"parquet:{path}"


def write_images(path: Path, second: Image.Image) -> str:
    stream = io.BytesIO()
    second.save(stream, "PNG")
    pq.write_table(pa.table({"image": [png(1, "L"), stream.getvalue()]}), path)
    return f"parquet:{path}"


@pytest.mark.parametrize(("mode", "message"), [("RGB", "'row 1' is a colour image"), ("I;16", "more than 8 bits")])
def test_images_that_would_lose_something_are_refused(tmp_path: Path, mode: str, message: str) -> None:
    split = load_split(write_images(tmp_path / "a.parquet", Image.new(mode, (4, 4))))
    with pytest.raises(DataError, match=message):
        list(split.batches(2))


def test_bytes_that_are_no_image_are_told_with_their_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [png(1), b"no image"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"cannot decode row 1 of '.*a.parquet'"):
        list(load_split(f"parquet:{tmp_path / 'a.parquet'}").batches(2))


def write_text(path: Path) -> str:
    path.write_text("text,label\na,1\n")
    return f"arrow:{path}"


REFUSED: dict[str, tuple[Callable[[Path], str], type[BnnError], str]] = {
    "several splits": (lambda f: f"parquet:{write_parquet_files(f / 'a')}", UsageError, "several splits: 'test', 'train'"),
    "no match": (lambda f: f"parquet:{write_parquet_files(f / 'a')}/valid-*.parquet", DataError, "no file matches '.*valid-"),
    "no files": (lambda f: f"parquet:{f}", DataError, "no parquet files in"),
    "nothing there": (lambda f: f"parquet:{f}/none.parquet:text=a", MissingInput, "no file '.*none.parquet'"),
    "other columns": (lambda f: write_other(f / "a"), DataError, "have different columns: only one of them has 'label'"),
    "damaged": (lambda f: write_damaged(f / "a.parquet"), DataError, "is not a complete parquet file"),
    "of another kind": (lambda f: write_text(f / "a.arrow"), DataError, "is not a complete arrow file"),
    "no such column": (lambda f: f"{one_parquet_file(f)}:text=words", DataError, "has no column 'words'; it has 'text', 'label'"),
    "no folder": (lambda f: f"hf-dataset:{f}/none", MissingInput, "no folder '.*none'"),
    "no split named": (lambda f: f"hf-dataset:{write_dict(f / 'a')}", UsageError, "several splits: it has 'train', 'test'"),
    "no such split": (lambda f: f"hf-dataset:{write_cached(f / 'a')}:valid", UsageError, "no split 'valid'; it has 'test', 'train'"),
    "one split": (lambda f: f"hf-dataset:{write_saved(f / 'a')}:test", UsageError, "is a single split; omit 'test'"),
    "no data set": (lambda f: f"hf-dataset:{f}", DataError, "has no state.json, dataset_dict.json or dataset_info.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_told_in_a_line(tmp_path: Path, case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as caught:
        load(make(tmp_path))
    assert "\n" not in caught.value.message


def test_damage_within_a_file_is_told_by_a_worker_too(tmp_path: Path) -> None:
    split = load(one_parquet_file(tmp_path))
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:40] = b"\xff" * 36
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a.parquet' is not a complete parquet file"):
        list(split.batches(5, num_workers=1))


@pytest.mark.nightly
def test_folders_of_the_library_itself_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)})
    whole = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS}, features=features)
    chosen = whole.shuffle(seed=1).filter(lambda row: row["label"] > 0)
    expected = list(chosen["text"])
    chosen.save_to_disk(tmp_path / "saved", num_shards=3)
    datasets.DatasetDict({"train": chosen, "test": whole}).save_to_disk(tmp_path / "both")
    chosen.to_parquet(tmp_path / "a.parquet")
    chosen.to_csv(tmp_path / "a.csv")
    chosen.to_json(tmp_path / "a.jsonl")
    builder = datasets.load_dataset("parquet", data_files={"train": str(tmp_path / "a.parquet")}, cache_dir=str(tmp_path / "cache"))  # fmt: skip
    assert builder["train"].num_rows == len(expected)
    for spec in ("hf-dataset:saved", "hf-dataset:both:train", "hf-dataset:cache", "parquet:a.parquet", "csv:a.csv", "jsonl:a.jsonl"):  # fmt: skip
        kind, _, place = spec.partition(":")
        split = load(f"{kind}:{tmp_path / place}")
        assert split.dataset.read(split.rows)[0] == expected, spec
        assert split.labels.tolist() == list(chosen["label"])
        assert split.classes == (None if kind in ("csv", "jsonl") else tuple(NAMES)), spec


PLAIN = {
    "doubles": [[1.5, -0.0, 5e-324], [0.25, 1e308, 0.1]],
    "floats": [pa.array([0.1, 2, 3], pa.float32()), pa.array([1, -2, 127], pa.int8())],
    "half floats": [pa.array(np.array([0.1, 2, 3], np.float16))],
    "truth values": [[True, False, True], [0.5, 0.5, 0.5]],
    "texts": [["0.5", "1e3", "-7"]],
    "lists": [[[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]]],
    "lists of a size": [pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2))],
    "large lists": [pa.array([[1, 2], [3, 4], [5, 6]], pa.large_list(pa.int64()))],
}
OTHER: dict[str, list[Any]] = {
    "NaN": [[float("nan"), 1e308, 0.1]],
    "large whole numbers": [pa.array([2**64 - 1, 2**53 + 1, 0], pa.uint64()), pa.array([-(2**63), 2**53 + 3, 7])],
    "missing": [[0.5, None, 1.0], [1.0, 2.0, 3.0]],
    "other texts": [["0.5", " 1e3", "1_0"]],
    "a missing number in a list": [[[0.25, None], [0.5, 0.5], [1.0, 0.0]]],
}


@pytest.mark.parametrize("case", [*PLAIN, *OTHER])
def test_numbers_at_once_are_those_of_single_rows(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {f"c{k}": values for k, values in enumerate((PLAIN | OTHER)[case])}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    found = Table(tmp_path, [tmp_path / "a.parquet"], open_parquet, "parquet")
    assert (found.numbers(list(columns)) is not None) == (case in PLAIN)
    fast = read_numbers(found, list(columns), "here")
    monkeypatch.setattr(found, "numbers", lambda names: None)
    slow = read_numbers(found, list(columns), "here")
    assert fast.shape == slow.shape
    assert np.array_equal(fast, slow, equal_nan=True)
    assert np.array_equal(np.signbit(fast), np.signbit(slow))


def test_lists_of_several_lengths_and_other_cells_are_told_with_their_row(tmp_path: Path) -> None:
    cases: dict[str, list[Any]] = {
        "row 2: column 'c' has 1 numbers, but the first row has 2": [[0.25, 0.75], [0.5, 0.5], [1.0]],
        "row 2: column 'c' has 1 numbers, but the first row has 3": [[0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [1.0]],
        "row 0, column 'c': expected a number, got nothing": [None, [0.5, 0.5]],
        "row 1, column 'c': expected a number, got 'x'": ["0.5", "x", "1"],
    }
    for message, values in cases.items():
        pq.write_table(pa.table({"c": values}), tmp_path / "a.parquet", row_group_size=2)
        found = Table(tmp_path, [tmp_path / "a.parquet"], open_parquet, "parquet")
        with pytest.raises(DataError, match=f"here: {message}"):
            read_numbers(found, ["c"], "here")


@pytest.mark.parametrize(
    ("value", "shape"), [([], "(3, 0)"), ([[0.5, 0.5], [0.1, 0.9]], "(3, 2, 2)"), ([[0.5], [0.5]], "(3, 2, 1)")]
)
def test_empty_lists_and_lists_of_lists_are_no_predictions(tmp_path: Path, value: list[Any], shape: str) -> None:
    place = tmp_path / "a.parquet"
    pq.write_table(pa.table({"probs": [value] * 3}), place)
    with pytest.raises(DataError, match=re.escape(f"column 'probs': expected shape (N, C), got {shape}")):
        read_given_predictions(str(place), has_labels=False)


def test_values_are_those_of_the_library(tmp_path: Path) -> None:
    columns = {
        "a": [1, None, 3], "b": [0.5, 1.5, None], "c": ["x", None, "é"], "d": [True, False, None], "e": [1, 2, 3],
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    found = Table(tmp_path, [tmp_path / "a.parquet"], open_parquet, "parquet").values(list(columns))
    assert found == list(columns.values())
    assert [type(value) for value in found[4]] == [int] * 3
