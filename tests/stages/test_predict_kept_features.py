"""predict --keep-features: new data predicted in one go are a split of the run, as extract-features writes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli, Invocation
from problems.image_runs import draw, make_run, rows

from bnncli.artifacts.files import read_header

NEW = Path("net.pt.bnn/features/new.h5")
DATA = ("--data", "new=npz:test.npz")
KEPT = ("--table", "kept.csv", "--keep-features")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, request: pytest.FixtureRequest) -> Path:
    """A run of a network on images of 4 x 4, in the working folder."""
    monkeypatch.chdir(tmp_path)
    make_run(cli, *getattr(request, "param", ()))
    return tmp_path


def predict(cli: Cli, *words: object, code: int = 0) -> Invocation:
    done = cli("predict", "net.pt", "--posterior", "laplace", "--samples", 20, *words)
    assert done.code == code, done.stderr
    return done


def kept(name: str) -> list[str]:
    """Rows of a table, in one order."""
    return sorted(str(row) for row in rows(name))


HALVES = ("--dtype", "float16", "--mean", "0.5")


@pytest.mark.parametrize("folder", [(), HALVES], indirect=True, ids=["float32", "float16"])
def test_the_table_is_that_without_keeping_and_that_of_the_split(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.commands.predict.new_data.BLOCK", 256)  # and so another one of 300
    predict(cli, *DATA, "--table", "streamed.csv")
    done = predict(cli, *DATA, *KEPT, "--json").json
    assert [output["role"] for output in done["outputs"]] == ["features.new", "table"]
    predict(cli, "--split", "new", "--table", "split.csv")
    assert kept("kept.csv") == kept("streamed.csv") == kept("split.csv")


@pytest.mark.parametrize("folder", [(), HALVES], indirect=True, ids=["float32", "float16"])
def test_the_split_is_the_one_that_extract_features_writes(folder: Path, cli: Cli) -> None:
    predict(cli, *DATA, *KEPT)
    by_predict = read_header(NEW)
    options = HALVES if by_predict.provenance["params"]["mean"] else ()
    extract = ("extract-features", "net.pt", "--model", "mlp", *options, *DATA)
    assert cli(*extract, "--json").json["action"] == "up_to_date"
    NEW.unlink()
    assert cli(*extract).code == 0
    by_extract = read_header(NEW)
    assert by_predict.content_digest == by_extract.content_digest
    for name in ("params", "params_hash", "checkpoint", "inputs", "source"):
        assert by_predict.provenance.get(name) == by_extract.provenance.get(name), name
    assert sorted(by_predict.provenance["command"]) == sorted(by_extract.provenance["command"])


def test_features_that_are_there_are_not_made_again(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    predict(cli, *DATA, *KEPT)
    before = NEW.read_bytes()
    monkeypatch.setattr("bnncli.session.network.Network.features", None)
    assert f"{NEW}: up to date" in predict(cli, *DATA, *KEPT).stderr
    assert NEW.read_bytes() == before


def test_a_posterior_over_all_layers_takes_the_split_afterwards(folder: Path, cli: Cli) -> None:
    fit = ("fit-laplace", "net.pt", "--layers", "all", "--structure", "diag", "--prior-precision", 5, "--name", "whole")
    assert cli(*fit).code == 0
    whole = ("predict", "net.pt", "--posterior", "whole", "--samples", 20)
    assert cli(*whole, *DATA, *KEPT).code == 0
    assert cli(*whole, "--split", "new", "--table", "split.csv").code == 0
    assert [row["predicted"] for row in rows("kept.csv")] == [row["predicted"] for row in rows("split.csv")]
    assert cli("evaluate", "net.pt", "--split", "new", "--bootstrap", 0).code == 0


def test_data_of_other_classes_are_kept_without_their_labels(folder: Path, cli: Cli) -> None:
    np.savez("odd.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 3]))
    refused = predict(cli, "--data", "new=npz:odd.npz", *KEPT, code=65)
    assert "pass data with other classes as --ood" in refused.stderr
    assert not NEW.exists()
    predict(cli, "--ood", "new=npz:odd.npz", "--table", "streamed.csv")
    predict(cli, "--ood", "new=npz:odd.npz", *KEPT)
    assert {row["label"] for row in rows("kept.csv")} == {""}
    assert kept("kept.csv") == kept("streamed.csv")
    assert read_header(NEW).meta["is_ood"]


def test_a_split_of_other_data_is_never_replaced(folder: Path, cli: Cli) -> None:
    before = Path("net.pt.bnn/features/train.h5").read_bytes()
    for more in ((), ("--force",), ("--dry-run",)):
        done = predict(cli, "--data", "train=npz:test.npz", *KEPT, *more, code=73)
        assert "the run already has a split 'train' with other data" in done.stderr
        assert "give the new data another name" in done.stderr
    assert Path("net.pt.bnn/features/train.h5").read_bytes() == before
    assert not Path("kept.csv").exists()
    assert not list(Path("net.pt.bnn/features").glob(".*newer-request*"))


def test_a_dry_run_says_what_is_kept_and_keeps_nothing(folder: Path, cli: Cli) -> None:
    done = predict(cli, *DATA, *KEPT, "--dry-run")
    assert f"compute: {NEW}" in done.stdout
    assert "write: kept.csv (300 of new)" in done.stdout
    assert not NEW.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep-features",), "--keep-features applies to new data: add --data SPLIT=SPEC"),
        (("--data", "new=-", *KEPT), "cannot read stdin again"),
        (("--follow", "in", *KEPT), "use extract-features --data SPLIT=images:in"),
        (
            ("--ood", "new=npz:test.npz", "--follow", "in", "--table", "t.csv"),
            "--ood and --follow are mutually exclusive",
        ),
        (("--ood", "new=py:code.py:make", *KEPT), "--ood: 'py:code.py:make' is code"),
        (("--ood", "new=npz:test.npz", *DATA, *KEPT), "--ood: two splits have the same name"),
    ],
)
def test_what_cannot_be_a_split_is_refused(folder: Path, cli: Cli, words: tuple[str, ...], message: str) -> None:
    assert message in " ".join(predict(cli, *words, code=2).stderr.split())
    assert not NEW.exists()


def test_image_files_keep_their_names_and_code_is_run_where_it_is_trusted(folder: Path, cli: Cli) -> None:
    Path("net.py").write_text(
        "from bnncli.models.architectures.mlp import build\ndef make():\n    return build(inputs=16, hidden=(6,), classes=3)\n"
    )
    shutil.copy("net.pt", "own.pt")
    named = ("--model", "net.py:make", "--data", "train=npz:train.npz")
    assert cli("extract-features", "own.pt", *named).code == 0
    for seed in range(3):
        draw(Path("seen") / f"{seed}.png", seed)
    asked = ("predict", "own.pt", "--posterior", "map", "--data", "new=images:seen", *KEPT)
    refused = cli(*asked)
    assert (refused.code, "--trust-code" in refused.stderr) == (77, True)
    assert cli(*asked, "--trust-code").code == 0
    assert cli("predict", "own.pt", "--posterior", "map", "--split", "new", "--table", "split.csv").code == 0
    assert kept("split.csv") == kept("kept.csv")
    assert [row["name"] for row in rows("kept.csv")] == ["0.png", "1.png", "2.png"]


@pytest.mark.parametrize("task", ["multiclass", "binary", "multilabel"])
def test_raw_inputs_and_labels_of_every_kind_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, task: str
) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, count in (("train", 40), ("new", 9)):
        x = random.normal(size=(count, 3)).astype(np.float32)
        np.savez(f"{name}.npz", x=x, y=(x > 0).astype(np.uint8) if task == "multilabel" else (x[:, 0] > 0).astype(int))
    raw = ("extract-features", "raw", "--model", "flatten", "--task", task)
    assert cli(*raw, "--data", "train=npz:train.npz").code == 0
    assert cli("fit-laplace", "raw", "--prior-precision", 1).code == 0
    one = ("predict", "raw", "--posterior", "laplace", "--samples", 20)
    assert cli(*one, "--data", "new=npz:new.npz", *KEPT).code == 0
    assert cli(*one, "--split", "new", "--table", "split.csv").code == 0
    assert kept("kept.csv") == kept("split.csv")
    assert cli(*raw, "--data", "new=npz:new.npz", "--json").json["action"] == "up_to_date"
