"""The benchmark of LoRA adapters on texts: its scores, its texts, and a run of it on a tiny encoder of random weights."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import hf_folders
from problems.optional_libraries import library
from sklearn.metrics import log_loss, roc_auc_score

pytestmark = pytest.mark.libraries
library("peft")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = ("movieReviewSnippets", "amazonReviewSnippets", "tweets", "nytEditorialSnippets")


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's modules can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of rated snippets, whose words tell the rating."""
    draw, folder = random.Random(0), tmp_path / "texts"
    folder.mkdir()
    for number, name in enumerate(FILES):
        lines = []
        for row in range(400):
            rating = draw.choice([-2.0, -0.4, 0.3, 2.0])
            word = draw.choice(["good", "fine"] if rating > 0 else ["bad", "awful"])
            filler = " ".join(draw.choice(hf_folders.WORDS) for _ in range(4 + number))
            lines.append(f"{row}\t{rating}\tfilm {row} is {word} {filler}\n")
        (folder / f"{name}_GroundTruth.txt").write_text("".join(lines))
    return folder


def run_script(monkeypatch: pytest.MonkeyPatch, encoder: Path, texts: Path, *words: object) -> None:
    script = str(BENCHMARKS / "review_texts.py")
    monkeypatch.setattr(sys, "argv", [script, *map(str, ("--encoder", encoder, "--texts", texts, *words))])
    runpy.run_path(script, run_name="__main__")


def test_scores_are_those_of_scikit_learn() -> None:
    from adapters import Adapters, Predictions, score

    draw = np.random.default_rng(0)
    found = {
        name: Predictions(draw.dirichlet([1, 1], size), {"combined": draw.normal(size=size)})
        for name, size in (("test", 60), ("shifted", 50), ("other", 40))
    }
    targets = {name: torch.from_numpy(draw.integers(2, size=len(one.probs))) for name, one in found.items()}
    inputs: dict[str, dict[str, torch.Tensor]] = {}
    task = Adapters(
        Path(), "", [], dict, lambda network, inputs: inputs["x"], inputs, targets, "", "other", shifts=["shifted"]
    )
    mine = score(found, task)
    is_other = np.repeat([0, 1], [60, 40])
    entropies = [-(found[name].probs * np.log(found[name].probs)).sum(axis=1) for name in ("test", "other")]
    combined = [found[name].scores["combined"] for name in ("test", "other")]
    assert mine["nll"] == pytest.approx(log_loss(targets["test"], found["test"].probs))
    assert mine["shifted_nll"] == pytest.approx(log_loss(targets["shifted"], found["shifted"].probs))
    assert mine["auroc"] == pytest.approx(roc_auc_score(is_other, np.concatenate(entropies)))
    assert mine["combined_auroc"] == pytest.approx(roc_auc_score(is_other, np.concatenate(combined)))


def test_splits_share_no_text_and_leave_middling_ratings_out(texts: Path) -> None:
    from review_texts import make_splits

    sizes = {"train": 50, "val": 20, "test": 90, "amazon": 30, "tweets": 30, "editorials": 300}
    splits = make_splits(texts, sizes)
    assert {name: len(rows) for name, rows in splits.items()} == sizes
    chosen = [text for name in ("train", "val", "test") for text, _ in splits[name]]
    assert len(set(chosen)) == len(chosen) == 160
    for name, rows in splits.items():
        own = (texts / f"{FILES[{'amazon': 1, 'tweets': 2, 'editorials': 3}.get(name, 0)]}_GroundTruth.txt").read_text()
        ratings = {text: float(rating) for _, rating, text in (line.split("\t") for line in own.splitlines())}
        for text, label in rows:
            assert label == ("positive" if ratings[text] > 0 else "negative")
            assert abs(ratings[text]) == 2 or name == "editorials"


def test_what_is_missing_is_said_in_a_line(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"encoder/config.json does not exist; --help says where"):
        run_script(monkeypatch, tmp_path / "encoder", texts)
    encoder = hf_folders.text_folder(tmp_path / "encoder")
    (texts / "tweets_GroundTruth.txt").unlink()
    with pytest.raises(SystemExit, match=r"tweets_GroundTruth.txt does not exist; --help says where"):
        run_script(monkeypatch, encoder, texts)
    (texts / "tweets_GroundTruth.txt").touch()
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "adapters", raising=False)
    with pytest.raises(SystemExit, match=r"needs transformers and peft: .*peft"):
        run_script(monkeypatch, encoder, texts)


def test_every_way_to_get_probabilities_is_scored(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = hf_folders.text_folder(tmp_path / "encoder", max_position_embeddings=64)
    words = ("--examples", 0.1, "--epochs", 2, "--out", tmp_path / "found.json", "--folder", tmp_path / "runs")
    run_script(monkeypatch, encoder, texts, *words)
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    chosen = [name for name in found if name.startswith("auto: ")]
    ways = {"network", "one temperature", "Laplace", "Laplace-LoRA", "MC dropout"}
    assert {*found} == {*ways, "three adapters", "three adapters at a temperature each", *chosen}
    assert len(chosen) == 1
    for scores in found.values():
        assert scores["nll"] > 0
        assert {"ece", "accuracy", "amazon_nll", "tweets_nll", "auroc"} < {*scores}
    assert found["network"]["accuracy"] == found["one temperature"]["accuracy"]
    assert found["MC dropout"]["nll"] != pytest.approx(found["network"]["nll"], rel=1e-4)
    assert {"combined_auroc", "mutual_info_auroc"} < {*found["Laplace-LoRA"]}
    run_script(monkeypatch, encoder, texts, *words)  # goes on from what is there
    assert json.loads((tmp_path / "found.json").read_text()) == found
