"""What is measured on: the features of a training split, and the target and the start that they define."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bnncli.artifacts.features import read_features
from bnncli.commands.demo import fixture_path
from bnncli.errors import DataError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget


@dataclass(frozen=True)
class Problem:
    """Features (N, D) and labels (N,) on the device, the head as trained (P,) float64, and the prior precision."""

    features: Tensor
    labels: Tensor
    head: Tensor
    layout: HeadLayout
    prior_precision: float

    def target(self) -> LastLayerTarget:
        """The log posterior, made anew: its checks and its label statistic are part of what a fit costs."""
        return LastLayerTarget(self.features, self.labels, self.layout, Prior(self.prior_precision))


def load_problem(path: Path, prior_precision: float, device: torch.device) -> Problem:
    """The problem in a feature file with labels and a head. Raises DataError when it lacks either."""
    split = read_features(path)
    if split.labels is None or split.head_weight is None:
        raise DataError(
            f"{path}: expected labels and a head, for the checkpoint's weights are where refinement starts",
            hint="give the train split that extract-features wrote from a network",
        )
    weight = torch.from_numpy(split.head_weight)
    bias = None if split.head_bias is None else torch.from_numpy(split.head_bias)
    if len(weight) == 1:
        raise DataError(f"{path}: expected two outputs or more, for the others' models are categorical; got one")
    layout = HeadLayout(weight.shape[0], weight.shape[1], has_bias=bias is not None)
    head = layout.join(weight, bias).double().to(device)
    features = torch.from_numpy(split.features).to(device=device, dtype=torch.float32)
    if split.features.dtype == "float32" and device.type == "cpu":
        features = features.clone()  # out of the file's pages: both sides are timed on memory
    return Problem(features, torch.from_numpy(split.labels).to(device), head, layout, prior_precision)


def fixture_features(folder: Path) -> Path:
    """The train split of the embedded case, extracted into a run in `folder`."""
    checkpoint = fixture_path("lenet5-fmnist.pt")
    words = ["extract-features", str(checkpoint), "--model", "lenet5", "--run-dir", str(folder / "run"), "--quiet"]
    data = ["--data", f"train=npz:{fixture_path('train.npz')}"]
    subprocess.run([sys.executable, "-m", "bnncli", *words, *data], check=True, stdout=sys.stderr)
    return folder / "run" / "features" / "train.h5"


def fit_laplace(problem: Problem, structure: str, center: str = "checkpoint") -> LaplaceFit:
    """Ours, from the features on: the target's checks and its label statistic are in the time."""
    return fit_gaussian(problem.target(), start=problem.head, structure=structure, center=center)
