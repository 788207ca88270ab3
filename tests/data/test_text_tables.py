"""Tables of text."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from problems.transforms import Halved, WordLengths

from bnncli.data.labels import match_classes
from bnncli.data.pixels import Preprocess
from bnncli.data.prediction_files import read_numbers
from bnncli.data.splits import InputSplit, hold_out, load_split
from bnncli.data.table_files import Table, open_delimited
from bnncli.data.tables import convert_labels as numbers_of_labels
from bnncli.errors import BnnError, DataError, MissingInput, UsageError, WriteError
from bnncli.progress import SILENT

pytestmark = [pytest.mark.core, pytest.mark.libraries]


# What breaks readers: quotation marks, delimiters, line ends of all kinds, other scripts, spaces, long texts.
TEXTS = [
    "plain", 'she said "no"', '"quoted as a whole"', "a, comma; semicolon", "tab\there", "two\nlines",
    "windows\r\nlines", "old mac\rlines", " spaces ", "naïve 日本 \u2028 line separator \x85 and \x1c", "", "'" * 3,
    "x" * 200_000, '"', "\\", "last",
]  # fmt: skip
LABELS = ["no", "yes"] * (len(TEXTS) // 2)
SAMPLE = [["text", "label"], ["a b", "1"], ["c", "0"], ["d e f", "2"]]


def write(path: Path, rows: Sequence[Sequence[Any]], **options: Any) -> Path:
    with open(path, "w", newline="", encoding=options.pop("encoding", "utf-8")) as stream:
        csv.writer(stream, **options).writerows(rows)
    return path


def load(spec: str, transform: Any = None) -> InputSplit:
    return load_split(spec, name="train", preprocess=Preprocess(transform=transform or WordLengths()))


def texts_of(split: InputSplit) -> list[Any]:
    """All texts, read in batches and in one, and with gaps."""
    whole = list(split.dataset.read(split.rows)[0])
    for rows in (split.rows[::3], split.rows[-1:], split.rows[[0, 2]]):
        assert list(split.dataset.read(rows)[0]) == [whole[row] for row in rows]
    return whole


def labels_of(split: InputSplit) -> list[int]:
    assert split.labels is not None
    return [int(label) for label in split.labels]


CSV_FORMS: dict[str, dict[str, Any]] = {
    "as csv.writer does": {},
    "as spreadsheets do": {"encoding": "utf-8-sig", "delimiter": ";"},
    "all quoted, newlines alone": {"quoting": csv.QUOTE_ALL, "lineterminator": "\n"},
}


ODD_NUMBERS: dict[str, tuple[str, str]] = {
    "shorter": ("[1]", r"row 3, column 'x': expected 2 numbers as in row \d, got list '\[1\]'"),
    "missing": ("null", r"row 3, column 'x': expected 2 numbers as in row \d, got nothing"),
    "too large": (f"[1, 1{'0' * 400}]", "row 3, column 'x': expected .* got list"),
    "text": ('"a"', "row 3, column 'x': expected .* got str 'a'"),
    "no numbers": ("[]", "row 3, column 'x': expected .* got list '\\[\\]'"),
    "half a surrogate pair": ('"\\ud800"', r"row 3 \(line 4\) is not JSON: .* surrogates not allowed"),
}


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("case", ODD_NUMBERS)
def test_odd_numbers_are_told_with_their_row(tmp_path: Path, case: str, batch: int) -> None:
    value, message = ODD_NUMBERS[case]
    lines = ['{"x": [1, 2], "label": 0}\n'] * 3
    (tmp_path / "a.jsonl").write_text("".join([*lines, f'{{"x": {value}, "label": 1}}\n', *lines]))

    def read() -> None:
        split = load_split(f"jsonl:{tmp_path / 'a.jsonl'}:x=x")
        for start in range(0, 7, batch):
            split.dataset.read(np.arange(start, min(7, start + batch)))

    with pytest.raises(DataError, match=message):
        read()


@pytest.mark.parametrize("form", CSV_FORMS)
@pytest.mark.parametrize("is_zipped", [False, True])
def test_texts_of_a_csv_file_come_as_they_were_written(tmp_path: Path, form: str, is_zipped: bool) -> None:
    rows: list[list[Any]] = [
        ["text", "other, and", "label"],
        *([text, 3, label] for text, label in zip(TEXTS, LABELS, strict=True)),
    ]
    path = write(tmp_path / "a.csv", rows, **CSV_FORMS[form])
    if is_zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    split = load(f"csv:{path}:text=text")
    assert texts_of(split) == TEXTS
    assert split.classes == ("no", "yes")
    assert labels_of(split) == [0, 1] * (len(TEXTS) // 2)


def test_empty_lines_are_no_rows_and_the_last_line_need_not_end(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\n\na,1\n\n\r\nb c,0\n\n\nd,1")
    split = load(f"csv:{tmp_path / 'a.csv'}")
    assert texts_of(split) == ["a", "b c", "d"]
    assert labels_of(split) == [1, 0, 1]


def test_a_tsv_file_quoted_where_it_must_be_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", [["text", "label"], *zip(TEXTS, LABELS, strict=True)], delimiter="\t")
    assert texts_of(load(f"tsv:{path}")) == TEXTS


def test_a_tsv_file_with_single_quotation_marks_is_read_line_by_line(tmp_path: Path) -> None:
    texts = ['"the start of a quotation', 'its end"', 'a "word"', '5" screen', "plain"]
    lines = ["sentence\tlabel", *(f"{text}\t{row % 2}" for row, text in enumerate(texts)), '"all ""of"" it"\t1', ""]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    split = load(f"tsv:{tmp_path / 'a.tsv'}")
    assert texts_of(split) == [*texts, 'all "of" it']
    assert labels_of(split) == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("is_zipped", [False, True])
def test_texts_of_a_jsonl_file_come_as_they_were_written(tmp_path: Path, is_zipped: bool) -> None:
    records = [{"text": text, "label": label == "yes", "id": 3} for text, label in zip(TEXTS, LABELS, strict=True)]
    lines = [json.dumps(record, ensure_ascii=row % 2 == 0) for row, record in enumerate(records)]
    data = "\n".join([*lines[:3], "", " ", *lines[3:]]).encode()
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(data) if is_zipped else data)
    split = load(f"jsonl:{tmp_path / 'a.jsonl'}")
    assert texts_of(split) == TEXTS
    assert labels_of(split) == [0, 1] * (len(TEXTS) // 2)
    assert split.classes is None


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_workers_read_what_one_process_reads(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        write(path, [["text", "label"], *zip(TEXTS, LABELS, strict=True)])
    else:
        path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    split = load(f"{kind}:{path}")
    ids = [np.concatenate([batch.inputs["input_ids"] for batch in split.batches(3, num_workers=workers)]) for workers in (0, 2)]  # fmt: skip
    assert np.array_equal(*ids)
    again = pickle.loads(pickle.dumps(split.dataset))  # as processes that are started anew get it
    assert again.read(split.rows)[0] == TEXTS


FOUND: dict[str, tuple[list[str], list[str], Any]] = {
    "": (["id", "Sentence", "LABEL"], ["text"], ["Sentence"]),
    ":text=a,label=b": (["a", "b", "text"], ["text"], ["a"]),
    ":text=a+b": (["a", "b"], ["pair"], ["a", "b"]),
    ":text=a+b,label=": (["a+b", "label"], ["text"], ["a+b"]),
    ":text=a, b:c,label=d=e": (["a, b:c", "d=e"], ["text"], ["a, b:c"]),
    ":label=text": (["text", "other"], ["text"], ["other"]),
    "@2": (["premise", "hypothesis", "label"], ["pair"], ["premise", "hypothesis"]),
}


@pytest.mark.parametrize("named", FOUND)
def test_columns_are_found_or_named(tmp_path: Path, named: str) -> None:
    columns, _, expected = FOUND[named]
    rows = [[f"{name} {row}" for name in columns] for row in range(3)]
    split = load(f"csv:{write(tmp_path / 'a:text=b, c@2.csv', [columns, *rows])}{named}")
    found = [tuple(f"{name} {row}" for name in expected) for row in range(len(split))]
    assert texts_of_few(split) == [texts if len(expected) > 1 else texts[0] for texts in found]
    assert split.is_labeled == ("label=" not in named.replace("label=d", "").replace("label=b", "").replace("label=t", "") and len(columns) > 1 and named != ":text=a+b")  # fmt: skip


def texts_of_few(split: InputSplit) -> list[Any]:
    return list(split.dataset.read(split.rows)[0])


def test_numbers_are_inputs_where_they_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [["a", "b", "label"], [1, "2.5", 0], ["-3", "1e-3", 1]])
    split = load_split(f"csv:{path}:x=b+a")
    batch = next(split.batches(5))
    np.testing.assert_allclose(batch.inputs, [[2.5, 1], [1e-3, -3]], rtol=1e-6)
    assert labels_of(split) == [0, 1]
    path = write(tmp_path / "b.csv", [["f_1", "", "f_2", ""], [1, "x", 2, ""]])
    for named, expected in (("f_*", [1, 2]), ("f_2+f_2", [2, 2])):
        np.testing.assert_array_equal(next(load_split(f"csv:{path}:x={named}").batches(5)).inputs, [expected])


@pytest.mark.long
def test_a_header_may_have_thousands_of_columns(tmp_path: Path) -> None:
    names = [f"column{number}" for number in range(20_000)]
    path = write(tmp_path / "wide.csv", [[*names, "label"], [*range(20_000), 1]])
    split = load_split(f"csv:{path}:x=column19999+column3")
    np.testing.assert_allclose(next(split.batches(5)).inputs, [[19_999, 3]])


@pytest.mark.parametrize("transform", [None, Halved()])
def test_images_are_named_by_their_paths(tmp_path: Path, transform: Any) -> None:
    (tmp_path / "pictures").mkdir()
    for row in range(3):
        Image.new("RGB", (4, 4), (51 * row, 0, 255)).save(tmp_path / "pictures" / f"{row}.png")
    rows = [["image_path", "label"], *([f"pictures/{row}.png", row % 2] for row in range(3))]
    path = write(tmp_path / "a.csv", rows)
    spec = f"csv:{path}" + ("" if transform else ":image=image_path")
    split = load_split(spec, preprocess=Preprocess(transform=transform))
    inputs = np.concatenate([batch.inputs for batch in split.batches(2, num_workers=1)])
    scaled = (inputs + 1) / 2 if transform else inputs
    np.testing.assert_allclose(scaled[:, :, 0, 0] * 255, [[51 * row, 0, 255] for row in range(3)], atol=1e-3)
    assert split.names == [f"pictures/{row}.png" for row in range(3)]
    before = split.order_digest
    Image.new("RGB", (4, 4), (9, 0, 255)).save(tmp_path / "pictures" / "1.png")
    assert load_split(spec, preprocess=Preprocess(transform=transform)).order_digest != before


def test_the_identity_is_of_the_text_the_columns_and_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [["text", "other", "label"], *([text, "b", 1] for text in TEXTS)])
    first = load(f"csv:{path}")
    (tmp_path / "elsewhere.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert load(f"csv:{tmp_path / 'elsewhere.csv.gz'}").order_digest == first.order_digest
    others = [load(f"csv:{path}{more}").order_digest for more in (":text=other", ":label=", "@3")]
    path.write_bytes(path.read_bytes() + b"one more,b,1\r\n")
    assert len({first.order_digest, load(f"csv:{path}").order_digest, *others}) == 5


def test_rows_held_out_are_rows_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [["text", "label"], *([f"text {row}", row] for row in range(9))])
    splits = hold_out({"train": load(f"csv:{path}")}, "val=train:4", seed=1)
    for split in splits.values():
        assert list(split.dataset.read(split.rows)[0]) == [f"text {row}" for row in split.rows]
        assert labels_of(split) == split.rows.tolist()
    assert sorted(row for split in splits.values() for row in split.rows.tolist()) == [*range(9)]


LABEL_COLUMNS: dict[str, tuple[list[str], list[int] | None, Any]] = {
    "numbers": (["2", "0", "1"], [2, 0, 1], None),
    "names": (["spam", "ham", "spam"], [1, 0, 1], ("ham", "spam")),
    "names with numbers": (["1", "two", "1"], [0, 1, 0], ("1", "two")),
    "none at all": (["", "", ""], None, None),
    "a test split's": (["-1", "-1", "-1"], None, None),
}


@pytest.mark.parametrize("kind", LABEL_COLUMNS)
def test_labels_are_numbers_or_names(tmp_path: Path, kind: str) -> None:
    column, expected, classes = LABEL_COLUMNS[kind]
    path = write(tmp_path / "a.csv", [["text", "label"], *(["a", label] for label in column)])
    split = load(f"csv:{path}")
    assert split.is_labeled == (expected is not None)
    assert (None if expected is None else labels_of(split)) == expected
    assert split.classes == classes


SEVERAL = [[1, 0, 1], [0, 0, 0], [0, 1, 1]]


def test_columns_of_zeros_and_ones_are_several_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [["text", "rude", "toxic", "threat"], *(["a", *row] for row in SEVERAL)])
    split = load(f"csv:{path}:text=text,label=rude+toxic+threat")
    assert split.classes == ("rude", "toxic", "threat")
    assert np.array_equal(labels_matrix(split), SEVERAL)
    by_name = match_classes(split, ("Threat", "rude", "toxic"))
    assert np.array_equal(labels_matrix(by_name), np.array(SEVERAL)[:, [2, 0, 1]])


def table_of_labels(path: Path, column: list[object]) -> str:
    write(path, [["text", "rude", "toxic"], *(["a", label, 1] for label in column)])
    return f"csv:{path}:label=rude+toxic"


@pytest.mark.parametrize(
    ("words", "expected"), [("no yes No", [0, 1, 0]), ("True false TRUE", [1, 0, 1]), ("1.0 0 0.0", [1, 0, 0])]
)
def test_one_of_several_labels_is_what_says_yes_or_no(tmp_path: Path, words: str, expected: list[int]) -> None:
    split = load(table_of_labels(tmp_path / "a.csv", [*words.split()]))
    assert labels_matrix(split)[:, 0].tolist() == expected


@pytest.mark.parametrize("unknown", ["-1", "", "NaN", "NA"])
def test_a_label_that_is_not_known_is_told_with_its_row(tmp_path: Path, unknown: str) -> None:
    spec = table_of_labels(tmp_path / "a.csv", [0, 1, unknown])
    with pytest.raises(DataError, match="row 2 has no value for label 'rude'") as caught:
        load(spec)
    assert caught.value.hint is not None
    assert "remove the rows" in caught.value.hint
    write(tmp_path / "a.csv", [["text", "rude", "toxic"], *(["a", unknown, unknown] for _ in range(3))])
    assert not load(spec).is_labeled


@pytest.mark.parametrize("value", ["0.3", "2", "absent"])
def test_one_of_several_labels_that_is_neither_there_nor_not_is_told(tmp_path: Path, value: str) -> None:
    with pytest.raises(DataError, match=f"column 'rude': row 1 has '{value}'; expected 0 or 1"):
        load(table_of_labels(tmp_path / "a.csv", [0, value]))


def test_labels_that_the_data_lack_and_columns_named_twice_are_told(tmp_path: Path) -> None:
    split = load(table_of_labels(tmp_path / "a.csv", [0, 1]))
    split = match_classes(split, ("rude", "spam", "toxic"))
    with pytest.raises(DataError, match="the labels 'rude', 'toxic'; the model has 'rude', 'spam', 'toxic'"):
        _ = split.labels
    with pytest.raises(UsageError, match="label= names column 'rude' twice"):
        load(f"csv:{tmp_path / 'a.csv'}:label=rude+toxic+rude")


def test_lists_of_zeros_and_ones_are_several_labels(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "a", "labels": row}) for row in SEVERAL))
    assert np.array_equal(labels_matrix(load(f"jsonl:{tmp_path / 'a.jsonl'}")), SEVERAL)


def labels_matrix(split: InputSplit) -> np.ndarray:
    """Those of the batches, which are those that the split tells of beforehand."""
    found = np.concatenate([np.asarray(batch.labels) for batch in split.batches(2)])
    assert np.array_equal(found, np.asarray(split.labels))
    return found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1", "1", "0", "0", ""], "row 4 has no label"),
        (["1", "0", "1", "x"], "row 3"),
        ([0, 0, 1, 1, -3], "row 4 has -3"),
        ([1, 0, True, 1], "not both; row 0 has '1', row 2 has 'True'"),
        (["true", "False", "1"], "not both; row 0 has 'true', row 2 has '1'"),
        (["1", "9" * 5000], "row 1 has a number with 5000 digits"),
    ],
)
def test_the_first_bad_label_is_told_by_its_row_among_all(values: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        numbers_of_labels(values, ("0", "1") if "x" in values else None, where="here")


def test_labels_that_repeat_are_what_each_of_them_is() -> None:
    chosen = np.random.default_rng(0).integers(4, size=100)
    for names in (["b", " a", "d", "a "], ["7", "07", "0", " 3"], [5, 0, 2, 3]):
        found = numbers_of_labels([names[k] for k in chosen], None, where="here")
        places = [sorted({str(name).strip() for name in names}).index(str(name).strip()) for name in names]
        expected = places if isinstance(names[0], str) and names[0] == "b" else [int(name) for name in names]
        assert found.numbers.tolist() == [expected[k] for k in chosen]
        assert found.numbers.dtype == np.int64


def test_spaces_around_labels_are_no_part_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na, pos\nb,neg \nc,pos\n")
    split = load(f"csv:{tmp_path / 'a.csv'}")
    assert split.classes == ("neg", "pos")
    assert np.array_equal(np.asarray(split.labels), [1, 0, 1])


BAD: dict[str, tuple[str, bytes, type[BnnError], str]] = {
    "no bytes": ("csv", b"", DataError, "'a.csv' is empty: expected a header line with column names"),
    "a header behind an empty line": ("csv", b"\ntext,label\na,1\n", DataError, "'a.csv': line 1 is empty: expected"),
    "carriage returns": ("csv", b"text,label\ra,1\rb,0\r", DataError, "lines end in bare carriage returns, expected line feeds"),
    "a header alone": ("csv", b"text,label\n", DataError, "'a.csv' has no rows"),
    "too few fields": ("csv", b"text,label\na,1\n\nb\n", DataError, r"row 1 \(line 4\) has 1 field, expected 2"),
    "too many": ("csv", b"text,label\na,1\nb, c,1\n", DataError, r"row 1 \(line 3\) has 3 fields"),
    "open quotation": ("csv", b'text,label\n"a\nb",1\n"b,1\nc,0\n', DataError, r"row 1 \(line 4\) is damaged: unexpected end"),
    "text after it": ("csv", b'text,label\na,1\n"b"c,1\n', DataError, r"row 1 \(line 3\) is damaged: ',' expected"),
    "latin-1": ("csv", b"text,label\na,1\ncaf\xe9,1\n", DataError, r"row 1 \(line 3\) is not UTF-8 text \(byte 0xe9\)"),
    "utf-16": ("csv", "text,label\na,1\n".encode("utf-16"), DataError, "is in UTF-16, expected UTF-8"),
    "half a gzip file": ("csv", gzip.compress(b"text,label\na,1\n" * 99)[:-9], DataError, "is not a complete gzip file"),
    "a missing label": ("csv", b"text,label\na,x\nb,\n", DataError, "column 'label': row 1 has no label"),
    "a label like a real number": ("csv", b"text,label\na,1\nb,1e0\n", DataError, "from 0; row 1 has '1e0'"),
    "a label that is none": ("csv", b"text,label\na,1\nb,NA\n", DataError, "column 'label': row 1 has no label"),
    "no header": ("csv", b"good,0\nbad,1\n", UsageError, r"a column name is a number: 'good', '0' \(is the header line missing"),
    "real labels": ("csv", b"text,label\na,0.5\nb,1\n", DataError, r"row 0 is 0.5 \(regression targets"),
    "negative labels": ("csv", b"text,label\na,0\nb,-1\n", DataError, "row 1 has -1"),
    "two columns of a name": ("csv", b"text,text,label\na,b,1\n", DataError, "several columns named 'text'"),
    "two texts": ("csv", b"review,content,y\na,b,1\n", UsageError, "could be the text: 'review', 'content'"),
    "two labels": ("csv", b"text,label,class\na,0,1\n", UsageError, "could be the labels: 'label', 'class'"),
    "no texts": ("csv", b"a,b,label\n1,2.5,0\n", UsageError, r"'a' \(whole numbers\), 'b' \(real numbers\)$"),
    "odd tabs": ("tsv", b"text\tlabel\na\t1\nb\tc\td\n", DataError, r"row 1 \(line 3\) has 3 fields"),
    "no objects": ("jsonl", b"\n", DataError, "is empty: expected one JSON object per line"),
    "no JSON": ("jsonl", b'{"text": "a"}\n\n{"text": "b"\n', DataError, r"row 1 \(line 3\) is not JSON"),
    "one document": ("jsonl", b'[{"text": "a"}]', DataError, "expected an object.*jq -c"),
    "a document of lines": ("jsonl", b'{\n"text": "a"}', DataError, "is not JSON.*jq -c"),
    "latin-1 in JSON": ("jsonl", b'{"text": "a"}\n{"text": "\xe9"}', DataError, r"row 1 \(line 2\) is not UTF-8 text"),
    "labels of two kinds": ("jsonl", b'{"text": "a", "label": 1}\n{"text": "a", "label": "b"}', DataError, "row 0 has 1, row 1 has 'b'"),
    "one-hot labels": ("jsonl", b'{"text": "a", "label": [1, 0]}\n{"text": "a", "label": [0, 1]}', DataError, "one-hot"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damage_is_told_in_a_line_with_its_row(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, data, error, message = BAD[case]
    Path(f"a.{kind}").write_bytes(data)
    with pytest.raises(error, match=message) as caught:
        load(f"{kind}:a.{kind}")
    assert "\n" not in caught.value.message


READ_BAD = {
    "none": (b'{"text": "a"}\n{"text": null}', "row 1, column 'text': expected a string, got nothing"),
    "missing": (b'{"text": "a"}\n{"other": "b"}', "row 1, column 'text': expected a string, got nothing"),
    "a number": (b'{"text": "a"}\n{"text": 3}', "row 1, column 'text': expected a string, got int '3'"),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("case", READ_BAD)
def test_a_row_without_a_text_is_named(tmp_path: Path, case: str, num_workers: int) -> None:
    data, message = READ_BAD[case]
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=message):
        list(load(f"jsonl:{tmp_path / 'a.jsonl'}").batches(2, num_workers=num_workers))


NAMED_BAD: dict[str, tuple[Any, type[BnnError], str]] = {
    ":text=absent": (WordLengths(), DataError, "has no column 'absent'; it has 'text', 'label'"),
    ":label=absent": (WordLengths(), DataError, "has no column 'absent'"),
    ":text=text+absent": (WordLengths(), DataError, "has no column 'absent'"),
    ":text=text,x=label": (WordLengths(), UsageError, "with only one of text=, words=, image=, audio= and x="),
    ":text=": (WordLengths(), UsageError, "expected columns such as text=COL,label=COL"),
    ":body=text": (WordLengths(), UsageError, "expected columns such as text=COL,label=COL.*got 'body=text'"),
    ":text=text+label+text": (WordLengths(), UsageError, "text= takes one column, or two for pairs"),
    ":x=text": (None, DataError, "row 0, column 'text': expected a number, got str 'a b'"),
    "": (Halved(), UsageError, "; its columns, apart from the label: 'text'"),
    ":text=text": (Halved(), UsageError, "the data are texts, but the model takes images"),
    ":x=label,label=": (WordLengths(), UsageError, "the data are numbers, but the model takes texts"),
    ":image=text": (WordLengths(), UsageError, "the data are images, but the model takes texts"),
    ":label=": (None, UsageError, "the data are texts, but the model has no tokenizer"),
    ":image=text,label=": (Halved(), MissingInput, "no file '.*a b'"),
}


@pytest.mark.parametrize("named", NAMED_BAD)
def test_columns_that_cannot_be_are_refused(tmp_path: Path, named: str) -> None:
    transform, error, message = NAMED_BAD[named]
    spec = f"csv:{write(tmp_path / 'a.csv', SAMPLE)}{named}"
    with pytest.raises(error, match=message):
        next(load_split(spec, preprocess=Preprocess(transform=transform)).batches(2))


def test_a_file_that_is_gone_is_a_missing_input(tmp_path: Path) -> None:
    for spec in ("csv:none.csv", "csv:none.csv:text=a", "tsv:none.tsv@3", "jsonl:none.jsonl"):
        with pytest.raises(MissingInput, match="no file 'none"):
            load(spec)


def test_rows_are_those_of_the_file_when_it_was_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", SAMPLE)
    split = load(f"csv:{path}")
    text = path.read_bytes()
    path.write_bytes(text[:20])
    assert texts_of_few(split) == ["a b", "c", "d e f"]
    assert split.dataset.identity(split.rows, SILENT)["sha256"].tolist() == [hashlib.sha256(text).hexdigest()]


def test_a_table_of_another_delimiter_is_no_column_of_texts(tmp_path: Path) -> None:
    for kind, delimiter in (("tsv", ","), ("tsv", ";"), ("csv", "|")):
        path = write(tmp_path / f"a.{kind}", SAMPLE, delimiter=delimiter)
        with pytest.raises(DataError, match=r"one column, 'text.label': expected the delimiter .*, found '[,;|]'"):
            load(f"{kind}:{path}")
    path.write_text('"text, or so"\nhello\n')
    assert list(load(f"csv:{path}").dataset.read(np.arange(1))[0]) == ["hello"]


def test_a_file_without_a_kind_is_told_which_it_may_be() -> None:
    for spec, kind in (("a.csv", "csv:a.csv"), ("cvs:b.tsv.gz:text=t@3", "tsv:b.tsv.gz:text=t@3"), ("a.png", None)):
        with pytest.raises(UsageError, match="expected npz:FILE") as refused:
            load(spec)
        assert refused.value.hint == (kind and f"did you mean {kind}?")


def test_the_longest_of_some_texts_stands_for_all(tmp_path: Path) -> None:
    rows = [[text, str(place % 2)] for place, text in enumerate(["a", "b b b", "ccccccccc", "dd", "e e e e e"])]
    split = load(f"csv:{write(tmp_path / 'a.csv', [['text', 'label'], *rows])}")
    assert split.longest(5).rows.tolist() == [2]
    assert split.longest(3).rows.tolist() == [2]
    assert split.longest(2).rows.tolist() == [4]  # the first and the last are looked at
    assert split.take(np.array([3, 1, 0])).longest(9).rows.tolist() == [1]
    pairs = [["a", "b", "label"], ["x" * 5, "y", "0"], ["x", "y" * 6, "1"]]
    assert load(f"csv:{write(tmp_path / 'b.csv', pairs)}:text=a+b").longest(9).rows.tolist() == [1]
    np.savez(tmp_path / "c.npz", x=np.ones((3, 2), np.float32), y=[0, 1, 0])
    arrays = load_split(f"npz:{tmp_path / 'c.npz'}", name="train", preprocess=Preprocess())
    assert arrays.longest(9).rows.tolist() == [0]


def table_of(path: Path, text: str) -> Table:
    path.write_text(text)
    return Table(path, [path], open_delimited, "csv")


def read(table: Table, names: Sequence[str]) -> np.ndarray:
    return read_numbers(table, names, "'t.csv'")


def bits(values: object) -> list[int]:
    return np.array(values, np.float64).view(np.uint64).ravel().tolist()


def spellings(generator: np.random.Generator) -> list[str]:
    """Finite numbers of any exponent, as they are and at other lengths, and those that round off just half-way."""
    anything = generator.integers(0, 1 << 63, 2000).view(np.float64)
    values = [value for value in anything.tolist() if np.isfinite(value)] + generator.random(500).tolist()
    half = [f"{9007199254740993 + 2 * k}{tail}" for k in range(40) for tail in ("", ".0", ".00000000000000000001")]
    forms = ("", ".17e", ".25g", ".3f")
    return [f"{(-1) ** k * value:{forms[k % 4]}}" for k, value in enumerate(values)] + half


def test_numbers_are_those_nearest_to_the_text(tmp_path: Path) -> None:
    texts = spellings(np.random.default_rng(0))
    texts += [
        "0",
        "-0.0",
        ".5",
        "5.",
        "1E5",
        "1e+05",
        "4.9e-324",
        "2.5e-324",
        "1e-400",
        "1.7976931348623157e308",
        " 7 ",
    ]
    texts += ["0.1" + "0" * 400 + "1"]
    table = table_of(
        tmp_path / "t.csv", "id,a,b\n" + "".join(f"x,{text},{texts[-1 - k]}\n" for k, text in enumerate(texts))
    )
    expected = [[float(text), float(texts[-1 - k])] for k, text in enumerate(texts)]
    assert bits(read(table, ["a", "b"])) == bits(expected)
    assert bits(read(table, ["b", "a"])) == bits(np.array(expected)[:, ::-1])


ODD = [
    "nan", "inf", "-Infinity", "1_0", "+1", "１２", "1e999", "\u2009 3", '"4"', '"5,5"', "0x10", "1d5", "1e", "NA", "",
    "1 2", "nan(1)", "1\0",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_other_numbers_are_what_float_takes_them_for(tmp_path: Path, odd: str) -> None:
    table = table_of(tmp_path / "t.csv", f"a,b\n0.25,0\n0.5,{odd}\n")
    try:
        expected = float(odd.strip('"'))
    except ValueError:
        came = re.escape(repr(odd.strip('"'))) if odd else "nothing"
        with pytest.raises(DataError, match=f"'t.csv': row 1, column 'b': expected a number, got {came}"):
            read(table, ["a", "b"])
    else:
        assert bits(read(table, ["a", "b"])) == bits([[0.25, 0], [0.5, expected]])


def test_empty_lines_of_a_single_column_are_no_rows(tmp_path: Path) -> None:
    for body in ("1\n\n2\n", "\n1\n2\n", "1\n2\n\n", "1\r\n\r\n2"):
        table = table_of(tmp_path / "t.csv", "a\n" + body)
        assert table.values(["a"]) == [["1", "2"]]
        assert bits(read(table, ["a"])) == bits([[1.0], [2.0]])


def test_damage_beyond_the_first_rows_is_seen(tmp_path: Path) -> None:
    for damage in (b"a", b"a,b,c", b'a,"b"c', b'a,"b', b"caf\xe9,b", b"a,\xff", b"a\rb,c"):
        (tmp_path / "t.csv").write_bytes(b"k,l\n" + b"a,b\n" * 1500 + damage + b"\n")
        with pytest.raises(DataError, match="row 1500 \\(line 1502\\)"):
            load(f"csv:{tmp_path / 't.csv'}:text=l")


def test_a_full_disk_is_told_with_the_folder_of_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: io.FileIO("/dev/full", "r+"))
    with pytest.raises(WriteError, match=r"no space left in '.*' for a copy of the table"):
        load(f"csv:{write(tmp_path / 'a.csv', SAMPLE)}")
