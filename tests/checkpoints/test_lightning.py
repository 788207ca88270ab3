"""Checkpoints that Lightning's own Trainer writes, with hyperparameters, callbacks and averaged weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.optional_libraries import library
from torch import Tensor, nn

from bnncli.artifacts.features import read_features

NETWORK = """
from torch import nn
def make(hidden: int = 8):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
"""
INPUTS, LABELS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


def fitted(folder: Path, lightning: Any, name: str, *callbacks: Any) -> tuple[Path, nn.Module]:
    """The checkpoint of a module that holds the network beside a loss with weights, and the network after training."""

    class Module(lightning.LightningModule):
        def __init__(self, hidden: int, rate: float, place: Path, layers: list[int]) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
            self.loss = nn.CrossEntropyLoss(weight=torch.ones(3))

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            value: Tensor = self.loss(self.net(batch[0]), batch[1])
            self.log("value", value)
            return value

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    module = Module(8, np.float64(0.05), folder / "data", [8, 3])
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, name, monitor="value", enable_version_counter=False)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saving, *callbacks], default_root_dir=folder,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(INPUTS, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(rows, 20))
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return folder / f"{name}.ckpt", module.net.eval()


@pytest.mark.long
def test_what_lightnings_trainer_saves_gives_the_logits_of_its_module(cli: Cli, tmp_path: Path) -> None:
    lightning = library("lightning")
    (tmp_path / "net.py").write_text(NETWORK)
    np.savez(tmp_path / "x.npz", x=INPUTS.numpy(), y=LABELS.numpy())
    words = ("--model", f"{tmp_path}/net.py:make", "--data", f"train=npz:{tmp_path}/x.npz")
    averaging = lightning.pytorch.callbacks
    cases = {
        "plain": ((), "using the checkpoint's tensors under 'net.' for the network"),
        "ema": ((averaging.EMAWeightAveraging(decay=0.9),), "using the averaged weights 'state_dict'"),
        "swa": (
            (averaging.StochasticWeightAveraging(0.01, swa_epoch_start=1),),
            "begin with 'net.'",
        ),  # exchanged at the end
    }
    for name, (callbacks, said) in cases.items():
        path, network = fitted(tmp_path, lightning, name, *callbacks)
        with torch.no_grad():
            expected = network(INPUTS).numpy()
        done = cli("extract-features", path, *words)
        assert done.code == 0, done.stderr
        assert said in done.stderr
        stored = read_features(tmp_path / f"{name}.ckpt.bnn/features/train.h5")
        assert stored.head_weight is not None
        logits = stored.features @ stored.head_weight.T + stored.head_bias
        assert "raw weights" not in done.stderr
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        shown = cli("inspect", path, "--json").json
        assert shown["made_by"].startswith("Lightning")
        assert shown["hyper_parameters"] == {
            "hyper_parameters.hidden": 8, "hyper_parameters.rate": 0.05,
            "hyper_parameters.place": str(tmp_path / "data"), "hyper_parameters.layers": "8, 3",
        }  # fmt: skip
        averaged = [one["key"] for one in shown["states"] if one["is_averaged"]]
        assert len(averaged) == (name != "plain")
        if averaged:
            assert cli("extract-features", path, *words, "--state", "ema", "--force").code == 0
