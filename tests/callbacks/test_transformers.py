"""The callback of the Hugging Face Trainer: scores in its history and reports, of the texts that the network was trained on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.optional_libraries import library

import bnncli
from bnncli.errors import BnnWarning

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

transformers = library("transformers")
FitPosterior = importlib.import_module("bnncli.callbacks.transformers").FitPosterior


class Texts(torch.utils.data.Dataset):
    """Texts of different lengths; their class is in their tokens. `targets` makes it a regression."""

    def __init__(self, count: int, seed: int, *, targets: bool = False) -> None:
        draw = np.random.default_rng(seed)
        texts = [draw.integers(5, 30, size=draw.integers(3, 12)) for _ in range(count)]
        self.rows = [
            {"input_ids": text.tolist(), "labels": float(text.mean()) if targets else int(text.mean() > 17)}
            for text in texts
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded to the longest text, with a mask."""
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=1)
    masks = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": padded, "attention_mask": masks, "labels": torch.tensor([row["labels"] for row in rows])}


class Report(transformers.TrainerCallback):
    """Reports that end with the training, as those of MLflow."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.has_ended = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert not self.has_ended
        self.logs.append(dict(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.has_ended = True


def train(folder: Path, *callbacks: Any, targets: bool = False, **options: Any) -> Any:
    """A trainer that has trained a small Bert."""
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=1 if targets else 2,
    )  # fmt: skip
    torch.manual_seed(0)
    chosen = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "greater_is_better": True,
        **options,
    }
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=16, learning_rate=0.1, report_to=[], use_cpu=True,
        disable_tqdm=True, **chosen,
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.BertForSequenceClassification(config), arguments, train_dataset=Texts(200, 0, targets=targets),
        eval_dataset=Texts(80, 1, targets=targets), data_collator=collate, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer


def test_scores_are_logged_for_the_best_model(tmp_path: Path) -> None:
    report, callback = Report(), FitPosterior("laplace", structure="kron", folder=tmp_path / "kept")
    trainer = train(tmp_path / "out", report, callback)
    history = trainer.state.log_history[-1]
    assert report.logs[-1] == {name: number for name, number in history.items() if name != "step"}
    assert history["step"] == trainer.state.global_step
    assert all(one.requires_grad for one in trainer.model.parameters())
    assert callback.run.split("train").labels.tolist() == [row["labels"] for row in Texts(200, 0).rows]
    losses = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    assert losses[0] > losses[1]
    assert history["bnncli/val/network/nll"] == pytest.approx(losses[0], abs=1e-5)
    metrics = json.loads(json.dumps(callback.result.document["metrics"]))
    assert history["bnncli/val/laplace/nll"] == metrics["val"]["laplace"]["nll"]
    assert bnncli.open(tmp_path / "kept" / "run").posteriors == ("map", "laplace")


def test_the_validation_data_may_be_given(tmp_path: Path) -> None:
    callback = FitPosterior("temperature", val=Texts(60, 2).rows)
    train(tmp_path, callback, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    assert callback.run.split("val").labels.tolist() == [row["labels"] for row in Texts(60, 2).rows]


def test_a_finished_training_is_kept(tmp_path: Path) -> None:
    callback = FitPosterior()
    with pytest.warns(
        BnnWarning, match=r"no posterior was fitted: train: labels must be classes, or zeros and ones"
    ) as told:
        trainer = train(tmp_path, callback, targets=True)
    assert "\n" not in str(told[-1].message)
    assert callback.run is None
    assert "train_loss" in trainer.state.log_history[-1]
