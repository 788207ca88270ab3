"""Words of texts as examples: JSON lines, Parquet, saved data sets and CoNLL files; labels, groups, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bnncli.data.pixels import Preprocess
from bnncli.data.splits import load_split, open_stored
from bnncli.data.transform import Word
from bnncli.errors import BnnError, UsageError

pytestmark = pytest.mark.core

ROWS: list[dict[str, Any]] = [
    {"tokens": ["Ada", "Lovelace", "writes"], "tags": ["B-PER", "I-PER", "O"]},
    {"tokens": [], "tags": []},
    {"tokens": ["in", "London"], "tags": [None, "B-LOC"]},
    {"tokens": ["."], "tags": [-100]},
]
WORDS = [Word(("Ada", "Lovelace", "writes"), 0), Word(("Ada", "Lovelace", "writes"), 1), Word(("Ada", "Lovelace", "writes"), 2), Word(("in", "London"), 1)]  # fmt: skip
CLASSES = ("B-LOC", "B-PER", "I-PER", "O")
CONLL = "-DOCSTART- -X- O\n\nAda NNP B-PER\nLovelace NNP I-PER\nwrites VBZ O\n\n\nin IN O\r\nLondon NNP B-LOC\n"
CONLLU = """# sent_id = 1
1\tAda\tAda\tPROPN\tNNP\t_\t3\tnsubj\t_\t_
2-3\tisn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tis\tbe\tAUX\t_\t_\t0\troot\t_\t_
3\tn't\tnot\t_\t_\t_\t2\tadvmod\t_\t_
3.1\tgone\tgo\tVERB\t_\t_\t_\t_\t_\t_

# sent_id = 2
1\t#\t#\tSYM\t_\t_\t0\troot\t_\t_
"""


class Lengths:
    """A model's preprocessing of words: their lengths."""

    takes, mode = "words", ""

    def __call__(self, items: Any) -> Any:
        raise AssertionError

    def to_json(self) -> dict[str, Any]:
        return {}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_labelled_word_is_an_example_with_its_text(kind: str, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = write(tmp_path / "ner.jsonl", ROWS)
    if kind == "parquet":
        path = tmp_path / "ner.parquet"
        tags = [[None if tag == -100 else tag for tag in row["tags"]] for row in ROWS]
        parquet.write_table(pyarrow.table({"tokens": [row["tokens"] for row in ROWS], "tags": tags}), path)
    found: Any = open_stored(f"{kind}:{path}:words=tokens,label=tags")
    assert (len(found), found.items, found.classes) == (4, "words", CLASSES)
    assert found.labels.tolist() == [1, 2, 3, 0]
    assert found.groups.tolist() == [0, 0, 0, 2]
    assert found.groups.dtype == np.int64
    assert found.names == ("0:0", "0:1", "0:2", "2:1")
    assert found.read(np.arange(4))[0] == WORDS
    words, labels = found.read(np.array([3, 1]))
    assert (words, labels.tolist()) == ([WORDS[3], WORDS[1]], [0, 2])


def test_without_a_label_every_word_is_an_example(tmp_path: Path) -> None:
    path = write(tmp_path / "new.jsonl", [{**row, "tags": [-100] * len(row["tags"])} for row in ROWS])
    for named in ("", ":words=tokens,label=", ":words=tokens,label=tags"):
        split = load_split(f"jsonl:{path}{named}", preprocess=Preprocess(transform=Lengths()))  # type: ignore[arg-type]
        assert (len(split), split.is_labeled, split.labels) == (6, False, None)
        assert split.names == ["0:0", "0:1", "0:2", "2:0", "2:1", "3:0"]


def test_numbers_of_named_classes_are_read_from_a_saved_data_set(tmp_path: Path) -> None:
    import pyarrow

    tags = {"feature": {"names": ["O", "B-PER"], "_type": "ClassLabel"}, "_type": "List"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {"ner_tags": tags}}))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    table = pyarrow.table({"tokens": [["Ada", "writes"]], "ner_tags": [[1, 0]], "pos_tags": [[3, 4]]})
    with pyarrow.ipc.new_stream(tmp_path / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    found = open_stored(f"hf-dataset:{tmp_path}:words=tokens,label=ner_tags")
    assert found.labels is not None
    assert (found.labels.tolist(), found.classes) == ([1, 0], ("O", "B-PER"))
    with pytest.raises(UsageError, match="several columns could be the labels: 'ner_tags', 'pos_tags'"):
        open_stored(f"hf-dataset:{tmp_path}:words=tokens")


@pytest.mark.parametrize("is_zipped", [False, True])
def test_conll_files(is_zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / ("ner.conll.gz" if is_zipped else "ner.conll")
    path.write_bytes(gzip.compress(CONLL.encode()) if is_zipped else CONLL.encode())
    found: Any = open_stored(f"conll:{path}")
    assert found.labels.tolist() == [1, 2, 3, 3, 0]
    assert found.groups.tolist() == [0, 0, 0, 1, 1]
    assert found.read(np.array([4]))[0] == [WORDS[3]]
    assert open_stored(f"conll:{path}:label=2").classes == ("IN", "NNP", "VBZ")


def test_conllu_files(tmp_path: Path) -> None:
    path = tmp_path / "pos.conllu"
    path.write_text(CONLLU)
    found: Any = open_stored(f"conll:{path}")
    assert found.classes == ("AUX", "PROPN", "SYM")
    assert found.read(np.arange(3))[0] == [
        Word(("Ada", "is", "n't"), 0),
        Word(("Ada", "is", "n't"), 1),
        Word(("#",), 0),
    ]
    assert open_stored(f"conll:{path}:label=deprel").classes == ("advmod", "nsubj", "root")


def test_known_data_keep_their_groups(tmp_path: Path) -> None:
    class Memory(dict[str, np.ndarray]):
        read, offer = dict.copy, dict.update

    memory, path = Memory(), write(tmp_path / "ner.jsonl", ROWS)
    spec, preprocess = f"jsonl:{path}:words=tokens", Preprocess(transform=Lengths())  # type: ignore[arg-type]
    for _ in range(2):
        split = load_split(spec, preprocess=preprocess, memory=memory)
        assert split.dataset.groups.tolist() == [0, 0, 0, 2]  # type: ignore[attr-defined]
        assert memory


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tokens": "Ada writes", "tags": ["O"]}, "row 1, column 'tokens': expected a list of words, got str 'Ada writes'"),
        ({"tokens": None, "tags": []}, "row 1, column 'tokens': expected a list of words, got nothing"),
        ({"tokens": ["Ada", ""], "tags": ["O", "O"]}, "row 1, column 'tokens': expected a list of words, none of them empty, got str ''"),
        ({"tokens": ["Ada", 3], "tags": ["O", "O"]}, "none of them empty, got int '3'"),
        ({"tokens": ["Ada", "writes"], "tags": ["O"]}, "row 1 has 2 words, but 1 tag in column 'tags'"),
        ({"tokens": ["Ada"], "tags": "O"}, "row 1, column 'tags': expected a list with the tag of each word, got str 'O'"),
        ({"tokens": ["Ada"], "tags": [1]}, "row 1, column 'tags': expected a tag like 'B-PER' before, got int '1'"),
        ({"tokens": ["Ada"], "tags": [-1]}, "expected tags that are class names, or class numbers from 0 (-100 or null for no label), got int '-1'"),
        ({"tokens": ["Ada"], "tags": [1.5]}, "for no label), got float '1.5'"),
        ({"tokens": ["Ada"], "tags": [""]}, "for no label), got str ''"),
        ({"tokens": ["Ada"], "tags": [True]}, "for no label), got bool 'True'"),
    ],
)  # fmt: skip
def test_odd_words_and_tags_are_refused(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "ner.jsonl", [ROWS[0], row])
    with pytest.raises(BnnError) as told:
        open_stored(f"jsonl:{path}:words=tokens,label=tags")
    assert said in told.value.message


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.conll", "", "is empty: expected one word and its tags per line"),
        ("a.conll", "Ada O\nwrites\n", "line 2 has 1 field, expected 2"),
        ("a.conll", "# id 3 en\nAda O\n", "line 2 has 2 fields, expected 4"),
        ("a.conll", "\nAda O\n# id 3 en\n", "line 3 has 4 fields, expected 2"),
        ("a.conllu", "1 Ada PROPN\n", "line 1 has 1 field, expected 10"),
        ("a.jsonl", '{"tokens": []}\n', "has no words"),
        ("a.csv", "tokens,label\na b,0\n", "expected a list of words, got str 'a b'"),
    ],
)
def test_odd_files_of_words_are_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    kind = path.suffix[1:].replace("conllu", "conll")
    with pytest.raises(BnnError) as told:
        open_stored(f"{kind}:{path}" + (":words=tokens" if kind != "conll" else ""))
    assert said in told.value.message
    assert (told.value.hint is not None and "comments" in told.value.hint) == ("# id" in text)


def test_words_are_refused_without_a_tokenizer_and_a_csv_without_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "ner.jsonl", ROWS)
    with pytest.raises(UsageError, match="the data are words, but the model has no tokenizer"):
        load_split(f"jsonl:{path}:words=tokens,label=tags")
    (tmp_path / "a.csv").write_text("text,label\na b,0\n")
    with pytest.raises(UsageError, match="found no column of words") as told:
        load_split(f"csv:{tmp_path / 'a.csv'}", preprocess=Preprocess(transform=Lengths()))  # type: ignore[arg-type]
    assert "conll:" in str(told.value.hint)
    with pytest.raises(UsageError, match="the data are texts, but the model takes words") as told:
        load_split(f"csv:{tmp_path / 'a.csv'}:text=text", preprocess=Preprocess(transform=Lengths()))  # type: ignore[arg-type]
    assert told.value.hint == "name the column: words=COLUMN"
