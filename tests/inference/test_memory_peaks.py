"""Estimates of memory against the peaks that processes reach."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peaks import peak_of, peak_of_command

from bnncli.cli.execute import run_command_line
from bnncli.flows._affine_sizes import num_elements
from bnncli.flows.affine import Affine
from bnncli.inference import memory
from bnncli.latent.factors import num_params
from bnncli.models.architectures import mlp
from bnncli.parameters.layouts import HeadLayout, NetworkLayout

pytestmark = pytest.mark.long

# Sizes at which the matrices, draws and blocks outweigh the rest.
CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("fit", ("full", 10, 120)),
    ("fit", ("block", 30, 200)),
    ("fit", ("kron", 30, 800)),
    ("fit", ("diag", 30, 800)),
    ("hmc", (59, 700)),
    ("span", (3, 3000)),
    ("refine", (10, 600, "kron")),
    ("refine", (300, 150, "kron")),
    ("lbbnn", ((784, 400, 600, 10), 1, 100, "lrt")),
    ("lbbnn", ((784, 400, 600, 10), 1, 100, "concrete")),
    ("lbbnn", ((300, 500, 10), 1, 2500, "lrt")),
    ("lbbnn", ((84, 10), 16, 1000, "mnf")),
]


def estimate(name: str, sizes: Any) -> int:
    """The bytes by the formula that a command uses."""
    if name == "fit":
        return memory.fit_bytes(sizes[0], HeadLayout(*sizes[1:]))
    if name == "hmc":
        return memory.sampling_bytes("full", HeadLayout(10, sizes[0]), num_chains=sizes[1])
    if name == "span":
        return memory.fit_bytes("full", HeadLayout(sizes[0], 300), whole=HeadLayout(*sizes))
    if name == "refine":
        layout = HeadLayout(*sizes[:2])
        num_layer_params = Affine.recipe.length * num_elements(layout, sizes[2])
        return memory.training_bytes(layout, num_layer_params=num_layer_params, num_draws=8)
    layers, repeats, batch_size, estimator = sizes
    flows = sum(num_params(inputs) for inputs in layers[:-1]) if estimator == "mnf" else 0
    plan = {"num_repeats": repeats, "batch_size": batch_size, "num_flow_params": flows}
    return memory.latent_bytes(NetworkLayout(layers), **plan)


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_the_estimate_is_near_the_peak(name: str, sizes: tuple[Any, ...], tmp_path: Path) -> None:
    expected, measured = estimate(name, sizes), peak_of(name, sizes, tmp_path)
    assert 0.67 < expected / measured < 2, f"{expected >> 20} MiB expected, {measured >> 20} MiB measured"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a network as it is made, and random data: sizes alone matter."""
    folder, generator = tmp_path_factory.mktemp("network"), np.random.default_rng(0)
    torch.save(mlp.build(hidden=(200, 200), activation="tanh").state_dict(), folder / "ckpt.pt")
    for split, count in (("train", 3000), ("val", 500)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        np.savez(folder / f"{split}.npz", x=images, y=generator.integers(0, 10, count))
    data = [word for split in ("train", "val") for word in ("--data", f"{split}=npz:{folder / split}.npz")]
    model = ("--model", "mlp", "--model-arg", "activation=tanh", "--model-arg", "hidden=200,200")
    assert run_command_line(["extract-features", str(folder / "ckpt.pt"), *model, *data, "-q"], io.StringIO()) == 0
    fit = ["fit-laplace", str(folder / "ckpt.pt"), "--layers", "all", "--structure", "diag", "--prior-precision", "50"]
    assert run_command_line([*fit, "-q"], io.StringIO()) == 0
    return folder / "ckpt.pt"


@pytest.mark.parametrize(
    "words",
    [
        ("fit-laplace", "--structure", "kron", "--name", "kron"),
        ("hmc", "--prior-precision", "5000", "--warmup", "2", "--draws", "10", "--chains", "4"),
        ("refine", "--epochs", "1"),
        ("predict", "--posterior", "laplace-all", "--split", "val"),
        ("predict", "--posterior", "laplace-all", "--split", "val", "--integrator", "mc"),
    ],
    ids=" ".join,
)
def test_the_estimate_for_a_network_is_near_the_peak(words: tuple[str, ...], network: Path, tmp_path: Path) -> None:
    over = () if words[0] == "predict" else ("--layers", "all")
    expected, measured = peak_of_command((words[0], network, *words[1:], *over), tmp_path)
    assert 0.67 < expected / measured < 2, f"{expected >> 20} MiB expected, {measured >> 20} MiB measured"


def test_an_affine_inverse_makes_nothing_for_each_output_of_a_features_factor(tmp_path: Path) -> None:
    matrices, draws = 8 * (200**2 + 400**2), 8 * 3 * 400 * 200
    assert peak_of("inverse", (400, 199, 3), tmp_path) < 6 * (matrices + draws) < 0.2 * 8 * 400 * 200**2
