"""The callback of Lightning: the scores of the commands, in the trainer's own loggers; training stays as it was."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.optional_libraries import library
from torch import nn
from torch.utils.data import DataLoader, StackDataset, SubsetRandomSampler, TensorDataset

import bnncli
from bnncli.errors import BnnWarning, UsageError

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

library("lightning")
FitPosterior = importlib.import_module("bnncli.callbacks.lightning").FitPosterior

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(400, 6, generator=GENERATOR)
Y = (X[:, :3] + torch.randn(400, 3, generator=GENERATOR)).argmax(1)
TRAIN, VAL = TensorDataset(X[:300], Y[:300]), TensorDataset(X[300:], Y[300:])


def train(callbacks: Any, *loaders: Any, package: str = "lightning.pytorch", outputs: int = 3, **options: Any) -> Any:
    """The module after two epochs of training, and its trainer."""
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, outputs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            return self(x).square().mean() if outputs == 1 else nn.functional.cross_entropy(self(x), y)

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            """Lightning asks for one where there is a loader."""

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    torch.manual_seed(0)
    module = Module()
    shown = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, **shown, **options}
    trainer = pl.Trainer(callbacks=callbacks, **settings)
    trainer.fit(module, *(loaders or (DataLoader(TRAIN, 32, shuffle=True), DataLoader(VAL, 32))))
    return module, trainer


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_scores_go_to_the_loggers_and_training_stays_as_it_was(tmp_path: Path, package: str) -> None:
    pl = importlib.import_module(package)
    states = []

    class Watch(pl.Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            modes = [part.training for part in pl_module.modules()]
            states.append((torch.get_rng_state().tolist(), modes, [one.tolist() for one in pl_module.parameters()]))

    loggers = [importlib.import_module(f"{package}.loggers").CSVLogger(tmp_path / name) for name in "ab"]
    callback = FitPosterior(structure="kron", folder=tmp_path / "kept")
    module, trainer = train([Watch(), callback, Watch()], package=package, logger=loggers)
    assert states[0] == states[1]
    expected = bnncli.from_torch(module, (X[:300], Y[:300]), val=(X[300:], Y[300:]), device="cpu")
    metrics = expected.fit_laplace(structure="kron").document["metrics"]["val"]
    with torch.no_grad():
        nll = float(nn.functional.cross_entropy(module.eval()(X[300:]), Y[300:]))
    for logger in loggers:
        *_, row = csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())
        assert float(row["bnncli/val/network/nll"]) == pytest.approx(nll, abs=1e-5)
        assert float(row["bnncli/val/laplace/nll"]) == pytest.approx(metrics["laplace"]["nll"], abs=1e-9)
        assert int(row["step"]) == trainer.global_step
    found = bnncli.open(tmp_path / "kept" / "run")
    assert found.posteriors == ("map", "laplace")
    features = expected.split("train").features
    assert np.array_equal(found.predict(features).probs, callback.run.predict(features).probs)
    assert callback.run.module(inputs=True)(X[:2])["probs"].shape == (2, 3)


def test_rows_of_a_sampler_and_parts_of_a_batch_are_found() -> None:
    rows = np.random.default_rng(0).permutation(400)
    data = StackDataset(x=X, y=Y)
    loaders = [DataLoader(data, 32, sampler=SubsetRandomSampler(some)) for some in (rows[:300], rows[300:])]
    callback = FitPosterior("temperature", inputs="x", labels=lambda batch: batch["y"])
    train(callback, *loaders)
    assert np.array_equal(callback.run.split("train").labels, Y[np.sort(rows[:300])])
    assert np.array_equal(callback.run.split("val").labels, Y[np.sort(rows[300:])])


WRONG = {
    "val: no data; pass val= to FitPosterior": {"loaders": [DataLoader(TRAIN, 32)]},
    "val: 2 data loaders; pass val= to FitPosterior": {"loaders": [DataLoader(TRAIN, 32), [DataLoader(VAL, 32)] * 2]},
    "val: labels must be classes, or zeros and ones; got 0.5": {"val": (X[:9], torch.full((9, 1), 0.5))},
    "last_layer: expected one of 'net.0', 'net.3'; got 'nothing'": {"last_layer": "nothing"},
    "IndexError: list index out of range": {"inputs": 0, "labels": lambda batch: batch[7]},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_one_warning_or_an_error(message: str) -> None:
    options = dict(WRONG[message])
    loaders = options.pop("loaders", ())
    callback = FitPosterior(**options)
    with pytest.warns(BnnWarning) as told:
        _, trainer = train(callback, *loaders)
    (text,) = [str(one.message) for one in told if one.category is BnnWarning]
    assert text.startswith(f"no posterior was fitted: {message}")
    assert "\n" not in text
    assert (callback.run, trainer.state.status.value) == (None, "finished")
    with pytest.raises((bnncli.errors.BnnError, IndexError)):
        train(FitPosterior(on_error="raise", **options), *loaders)


def test_arguments_are_checked_before_the_training() -> None:
    for options in (
        {"method": "magic"},
        {"on_error": "ignore"},
        {"inputs": 0},
        {"structur": "kron"},
        {"structure": "krn"},
        {"draws": "many"},
    ):
        with pytest.raises(UsageError):
            FitPosterior(**options)
