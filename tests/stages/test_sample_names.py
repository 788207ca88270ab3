"""Names of examples: from image files to the table of predict; and every class's probability beside them."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from problems.command_line import Cli, new_run
from problems.outputs import table_rows

from bnncli.artifacts import hdf5
from bnncli.artifacts.features import encoded_names, read_features
from bnncli.artifacts.outputs import is_table
from bnncli.artifacts.predictions import read_predictions
from bnncli.data.splits import load_split
from bnncli.errors import DataError

Arrays = dict[str, np.ndarray]
ODD = ['a, "b".png', "ü 猫.png", "two\nlines.png", os.fsdecode(b"not-utf8-\xff.png"), "=1+1;.png"]


def draw(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(names):
        pixels = np.full((3, 3), (40 * place + len(folder.name)) % 256, np.uint8)
        Image.fromarray(pixels).save(folder / name, format="png")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a network on images: class folders for train, a flat folder with odd names for new."""
    from bnncli.cli.execute import run_command_line

    tmp_path = tmp_path_factory.mktemp("names")
    for name in ("cat", "dog; big", "owl"):
        draw(tmp_path / "train" / name, [f"{number}.png" for number in range(4)])
    draw(tmp_path / "new", ODD)
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).random((6, 9), dtype=np.float32))
    specs = {"train": f"images:{tmp_path}/train", "new": f"images:{tmp_path}/new", "rows": f"npz:{tmp_path}/rows.npz"}
    words = [word for split, spec in specs.items() for word in ("--data", f"{split}={spec}")]
    run = str(tmp_path / "run")
    first = ["extract-features", run, "--model", "flatten", *words, "--hold-out", "val=train:3"]
    for argv in (first, ["fit-laplace", run, "--prior-precision", "1"]):
        assert run_command_line(argv, io.StringIO()) == 0
    return tmp_path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def test_the_names_of_image_files_stand_in_the_table(cli: Cli, run: Path) -> None:
    assert cli("predict", run, "--table", run.with_name("t.csv"), "--split", "new", "--split", "val").code == 0
    rows = table_rows(run.with_name("t.csv"))
    new = [row["name"] for row in rows if row["split"] == "new"]
    names = [name.encode("utf-8", "backslashreplace").decode() for name in sorted(ODD)]
    assert new == [f"'{name}" if name[0] in "=+-@" else name for name in names]  # no formulas
    files = sorted(str(path.relative_to(run.with_name("train"))) for path in run.with_name("train").rglob("*.png"))
    val = [row for row in rows if row["split"] == "val"]
    assert len(val) == 3
    assert [row["name"] for row in val] == [files[int(row["sample_id"])] for row in val]
    assert {row["name"].split("/")[0] for row in val} == {row["label"] for row in val}
    assert is_table(run.with_name("t.csv"))


def test_a_split_without_names_has_empty_ones_beside_others_and_no_column_alone(cli: Cli, run: Path) -> None:
    assert cli("predict", run, "--table", run.with_name("t.csv")).code == 0
    assert {row["name"] for row in table_rows(run.with_name("t.csv")) if row["split"] == "rows"} == {""}
    assert cli("predict", run, "--table", run.with_name("t.csv"), "--split", "rows").code == 0
    assert "name" not in table_rows(run.with_name("t.csv"))[0]


def test_every_class_has_its_probability_in_both_kinds_of_table(cli: Cli, run: Path) -> None:
    words = ("predict", run, "--probabilities", "--merge", "some=cat,owl", "--raw-text", "--table")
    assert cli(*words, run.with_name("t.csv")).code == cli(*words, run.with_name("t.npz")).code == 0
    rows = table_rows(run.with_name("t.csv"))
    texts = np.array([[row[f"p_{name}"] for name in ("cat", "dog; big", "owl")] for row in rows], dtype=np.float32)
    with np.load(run.with_name("t.npz"), allow_pickle=False) as file:
        table = dict(file)
    assert np.array_equal(table["probabilities"], texts)
    assert table["name"].tolist() == [row["name"] for row in rows]
    stored = [read_predictions(run.with_name("run.bnn") / f"predictions/laplace.mc/{split}.h5").probs
              for split in dict.fromkeys(row["split"] for row in rows)]  # fmt: skip
    assert np.array_equal(texts, np.concatenate(stored))
    np.testing.assert_allclose([float(row["some"]) for row in rows], texts[:, 0] + texts[:, 2], rtol=1e-6)


def test_probabilities_need_a_table_and_their_columns_are_taken(cli: Cli, run: Path) -> None:
    assert "add --table FILE" in cli("predict", run, "--probabilities").stderr
    words = ("predict", run, "--table", run.with_name("t.csv"), "--merge", "p_cat=owl,cat")
    assert "already has a column 'p_cat'" in cli(*words, "--probabilities").stderr
    assert cli(*words).code == 0


def test_wide_tables_are_written_some_rows_at_a_time(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("predict", run, "--probabilities", "--table")
    assert cli(*words, run.with_name("a.csv")).code == 0
    monkeypatch.setattr("bnncli.artifacts.outputs._CELLS", 40)
    assert cli(*words, run.with_name("b.csv")).code == 0
    assert run.with_name("a.csv").read_bytes() == run.with_name("b.csv").read_bytes()


@pytest.mark.parametrize("limit", [hdf5.IN_MEMORY_LIMIT, 0])
def test_names_are_texts_for_other_readers_and_whole(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(hdf5, "IN_MEMORY_LIMIT", limit)
    words = ("extract-features", run, "--model", "flatten", "--data", f"new=images:{run.with_name('new')}", "--force")
    assert cli(*words).code == 0
    path = run.with_name("run.bnn") / "features" / "new.h5"
    with h5py.File(path) as file:
        assert h5py.check_string_dtype(file["sample_name"].dtype).encoding == "utf-8"
        stored = file["sample_name"].asstr()[()].tolist()
        offset = file["sample_name"].id.get_offset()
    split = read_features(path, is_full_check=True)
    assert split.names is not None
    assert [name.decode() for name in split.names.tolist()] == stored
    assert encoded_names(sorted(ODD)).tolist() == split.names.tolist()  # type: ignore[union-attr]
    assert cli("verify", path).code == 0
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    assert cli("verify", path).code == 65


def test_features_without_names_are_read_as_ever(cli: Cli, small_run: Path) -> None:
    assert read_features(small_run.with_name("small.bnn") / "features/test.h5").names is None
    golden = Path(__file__).parents[2] / "fixtures/schema/1.0/features.h5"
    shutil.copy(golden, small_run.with_name("golden.h5"))
    assert read_features(small_run.with_name("golden.h5"), is_full_check=True).names is None


def test_the_order_digest_of_images_is_what_it_was(tmp_path: Path) -> None:
    draw(tmp_path / "images", ["b.png", "a.png"])
    assert load_split(f"images:{tmp_path}/images").names == ["a.png", "b.png"]
    expected = "bnn-sha256/1:fb2bdd588a7f465bedeba3c38c5d9e26dd38a14eafa6b00b444869b897dfa9e2"  # before names were kept
    assert load_split(f"images:{tmp_path}/images").content_digest() == expected


def test_names_of_ready_features_travel_too(cli: Cli, arrays: Arrays, tmp_path: Path) -> None:
    names = np.array([f"row {number}" for number in range(120)])
    run = new_run(cli, tmp_path / "run", {**arrays, "names_test": names}, "--hold-out", "more=test:7")
    assert cli("predict", run, "--table", tmp_path / "t.csv", "--split", "more", "--split", "test").code == 0
    rows = table_rows(tmp_path / "t.csv")
    assert [row["name"] for row in rows] == [f"row {row['sample_id']}" for row in rows]
    np.savez(tmp_path / "b.npz", **arrays, names_test=np.arange(120))
    done = cli("extract-features", tmp_path / "other", "--from-npz", tmp_path / "b.npz")
    assert (done.code, "expected strings of shape (120,)" in done.stderr) == (65, True)


def test_a_dataset_of_yours_may_name_its_examples(tmp_path: Path) -> None:
    code = (
        "import torch\nclass Rows:\n    names = ['x', 'y']\n    def __len__(self):\n        return {count}\n"
        "    def __getitem__(self, i):\n        return torch.ones(3)\n"
    )
    (tmp_path / "two_rows.py").write_text(code.format(count=2))
    assert load_split(f"py:{tmp_path}/two_rows.py:Rows").names == ["x", "y"]
    (tmp_path / "three_rows.py").write_text(code.format(count=3))
    with pytest.raises(DataError, match="has 2 names, but there are 3 examples"):
        load_split(f"py:{tmp_path}/three_rows.py:Rows")
