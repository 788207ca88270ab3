"""The choice among structures: by paired validation losses, by memory and time, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run

from bnncli.evaluation.recommendation import WORSE_SHARE
from bnncli.inference import memory
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.mode import covariance_at
from bnncli.inference.prior_criterion import Criterion
from bnncli.inference.prior_search import choose_structure, first_near_the_best, search
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.system.memory import SHARE
from bnncli.targets.last_layer import LastLayerTarget
from tests.conftest import make_arrays

LAYOUT = HeadLayout(3, 4)


def test_of_structures_within_a_standard_error_the_first_is_taken() -> None:
    base = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = 0.4 * torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise -= noise.mean()
    error = float(noise.std()) / 20
    for above, expected in ((0.9, "full"), (1.1, "kron")):
        losses = {"full": base + noise + above * error, "kron": base, "diag": base + 1}
        assert first_near_the_best(losses) == expected
    assert first_near_the_best({"full": base, "kron": base}) == "full"
    small = 0.01 * noise  # sure, and too little to count
    assert error > WORSE_SHARE * float(base.mean())
    assert first_near_the_best({"full": base + small + 0.9 * WORSE_SHARE * base.mean(), "kron": base}) == "full"
    assert first_near_the_best({"full": base + small + 1.1 * WORSE_SHARE * base.mean(), "kron": base}) == "kron"
    assert first_near_the_best({"block": base + 1, "kron": base + noise, "diag": base}) == "kron"


def test_a_single_example_of_val_decides_nothing() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert first_near_the_best({"full": one, "kron": 0.5 * one}) == "full"


def test_equal_structures_lose_the_first_place_no_oftener_than_a_standard_error_does() -> None:
    generator = torch.Generator().manual_seed(2)
    rounds, lost = 1000, 0
    for _ in range(rounds):
        draws = torch.randn(2, 100, generator=generator, dtype=torch.float64)
        lost += first_near_the_best({"full": draws[0], "kron": draws[1]}) == "kron"
    share = 0.1587  # of a normal beyond one standard error
    assert lost / rounds == pytest.approx(share, abs=3.3 * (share * (1 - share) / rounds) ** 0.5)


def test_the_losses_are_those_of_each_structure_at_the_same_mode_and_draws() -> None:
    generator = torch.Generator().manual_seed(3)
    features, val = (torch.randn(count, 4, generator=generator, dtype=torch.float64) for count in (40, 60))
    labels, val_labels = (torch.randint(3, (count,), generator=generator) for count in (40, 60))
    target = LastLayerTarget(features, labels, LAYOUT, Prior(2.0))
    fit = fit_gaussian(target, start=torch.zeros(15))
    noise = torch.randn(64, 15, generator=generator, dtype=torch.float64)
    held_out = target.held_out(val, val_labels)
    found = choose_structure(target, fit, ("full", "kron", "diag"), judge=Criterion(noise, held_out))
    for structure in ("full", "kron", "diag"):
        covariance = covariance_at(target, fit.gaussian.mean, structure)[0]
        draws = fit.gaussian.mean + covariance.unwhiten(noise)
        assert found.nll[structure] == pytest.approx(float(held_out.losses(draws).mean()), rel=1e-12)


def test_the_search_gives_its_judge() -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (40,), generator=generator)
    target = LastLayerTarget(features, labels, LAYOUT, Prior(2.0))
    start = torch.zeros(15)
    found = search(target, start=start, generator=generator, held_out=target.held_out(features, labels))
    losses = found.judge.losses(target, found.fit.gaussian.mean, found.fit.gaussian.covariance)
    assert float(losses.mean()) == pytest.approx(dict(found.curve)[found.best], rel=1e-9)


def test_quick_structures_are_those_that_fit_and_the_first_is_the_automatic_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layout = HeadLayout(10, 84)
    assert memory.automatic_structures(layout, 1 << 40, device="cpu") == memory.structures()
    below = memory.fit_bytes("full", layout) - 1
    assert memory.automatic_structures(layout, below, device="cpu") == ["block", "kron", "diag"]
    assert memory.automatic_structure(layout, below, device="cpu") == "block"
    assert memory.automatic_structures(HeadLayout(10, 1280), 1 << 40, device="cpu") == ["kron", "diag"]
    assert memory.automatic_structure(layout, 0, device="cpu") == "diag"


def few_arrays() -> dict[str, np.ndarray]:
    """Hardly more examples than features: where the exact Hessian is nearly flat, draws go too far."""
    generator = np.random.default_rng(0)
    centers = 0.6 * generator.normal(size=(8, 40))
    arrays = {"head_weight": centers.astype(np.float32), "head_bias": np.zeros(8, np.float32)}
    for split, count in (("train", 60), ("val", 400), ("test", 30)):
        labels = generator.integers(8, size=count)
        features = centers[labels] + generator.normal(size=(count, 40))
        arrays |= {f"features_{split}": features.astype(np.float32), f"labels_{split}": labels}
    return arrays


def test_the_exact_structure_is_taken_where_it_is_quick_whatever_val_says(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", few_arrays())
    metrics = cli("fit-laplace", run, "--json").json["metrics"]
    assert (metrics["structure"], metrics["structure_nll"]) == ("full", None)
    assert cli("status", run, "--check").code == 0


def test_rougher_structures_are_compared_on_val_and_the_closest_is_taken_where_the_mode_predicts_best(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", few_arrays())
    monkeypatch.setattr("bnncli.inference.memory.QUICK_ANYWHERE", 320)  # of 328 parameters
    monkeypatch.setattr("bnncli.inference.memory.largest_full", lambda device: 320)
    done = cli("fit-laplace", run)
    metrics = cli("fit-laplace", run, "--json").json["metrics"]
    assert (metrics["structure"], metrics["prior_precision_for"]) == ("block", "plug-in")
    assert metrics["structure_nll"] is None
    monkeypatch.setattr(
        "bnncli.commands.fit_laplace.last_layer.first_near_the_best", lambda losses: "mc"
    )  # as if draws did
    done = cli("fit-laplace", run, "--name", "draws")
    by_draws = cli("fit-laplace", run, "--name", "draws", "--json").json["metrics"]
    compared = by_draws["structure_nll"]
    assert set(compared) == set(memory.structures()[1:])
    assert compared["kron"] < 0.99 * compared["block"]
    assert f"structure kron (val NLL at one precision: block {compared['block']:.4f}" in done.stderr
    assert (by_draws["structure"], by_draws["prior_precision_for"]) == ("kron", "mc")
    own = dict(by_draws["prior_precision_curve"])
    assert own[by_draws["prior_precision"]] == min(own.values())


def test_without_val_the_largest_quick_structure_is_taken(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    metrics = cli("fit-laplace", run, "--prior-precision", "marglik", "--json").json["metrics"]
    assert (metrics["structure"], metrics["structure_nll"]) == ("full", None)


def test_structures_that_could_be_asked_for_have_their_bytes_and_seconds(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    monkeypatch.setattr("bnncli.inference.memory.QUICK_ANYWHERE", 10)
    monkeypatch.setattr("bnncli.inference.memory.largest_full", lambda device: 10)
    done = cli("fit-laplace", run, "--prior-precision", "3", "--json").json
    (text,) = [text for text in done["warnings"] if "parameters (about" in text]
    assert text.startswith("using kron for 18 parameters (about ")
    assert "closer to the posterior: --structure full (about " in text
    assert "--structure block (about " in text
    assert " and 1 s)" in text


def test_a_structure_that_does_not_fit_is_not_recommended(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    layout = HeadLayout(3, 5)
    between = memory.fit_bytes("block", layout, num_draws=128)
    assert between < memory.fit_bytes("full", layout, num_draws=128)
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: between / SHARE + 1)
    done = cli("fit-laplace", run, "--prior-precision", "3", "--json").json
    (text,) = [text for text in done["warnings"] if "parameters (about" in text]
    assert text.startswith("using block for ")
    assert "--structure full" not in text
    assert "full needs " in text
    assert "can be used" in text


@pytest.mark.parametrize("split", ["val", "train"])
def test_classes_without_examples_are_named(cli: Cli, tmp_path: Path, split: str) -> None:
    arrays = make_arrays()
    arrays[f"labels_{split}"][arrays[f"labels_{split}"] == 1] = 2
    run = new_run(cli, tmp_path / "run", arrays)
    done = cli("fit-laplace", run, "--prior-precision", "3", "--json").json
    (text,) = [text for text in done["warnings"] if "classes (" in text]
    count = len(arrays[f"labels_{split}"])
    assert text.startswith(f"{split} ({count} examples) has no examples of 1 of the 3 classes ('1'): ")
    assert ("choice of the prior precision" if split == "val" else "examples of other classes") in text


def test_with_examples_of_all_classes_nothing_is_said_of_them(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    done = cli("fit-laplace", run, "--prior-precision", "3", "--json").json
    assert not [text for text in done["warnings"] if "classes (" in text]


@pytest.mark.long
def test_in_the_span_of_few_examples_the_exact_structure_is_taken_and_predicts(cli: Cli, tmp_path: Path) -> None:
    arrays = {name: part[:30] if name.endswith("_train") else part for name, part in few_arrays().items()}
    run = new_run(cli, tmp_path / "run", arrays)
    metrics = cli("fit-laplace", run, "--json").json["metrics"]
    assert (metrics["structure"], metrics["structure_nll"]) == ("full", None)
    assert metrics["row_space_rank"] == 30
    assert cli("predict", run, "--split", "val", "--integrator", "mc", "--integrator", "probit").code == 0
    assert cli("refine", run, "--epochs", "1", "--flow", "affine").code == 0
