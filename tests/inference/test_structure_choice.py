"""The choice among structures, what each costs, and which examples a search reads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.heads import at_random, by_noisy_sign, draw_examples, gaussian_at_mode, head_target
from problems.seeds import normal, seeded

from bnncli.evaluation.recommendation import WORSE_SHARE
from bnncli.inference import memory, prior_search, structure_choice
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.mode import covariance_at, default_tolerance, find_mode
from bnncli.inference.prior_criterion import Criterion, losses_by_logits
from bnncli.inference.prior_search import (
    Candidates,
    Pace,
    SearchRows,
    choose_pace,
    choose_structure,
    first_near_the_best,
    is_short_search,
    judge_precisions,
    search,
    search_rows,
    search_size,
)
from bnncli.inference.structure_choice import QUICK_ANYWHERE, automatic_structures, fit_seconds, largest_full
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT
from bnncli.system.devices import estimate_speed
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
    assert structure_choice.automatic_structures(layout, 1 << 40, device="cpu") == memory.structures()
    below = memory.fit_bytes("full", layout) - 1
    assert structure_choice.automatic_structures(layout, below, device="cpu") == ["block", "kron", "diag"]
    assert structure_choice.automatic_structure(layout, below, device="cpu") == "block"
    assert structure_choice.automatic_structures(HeadLayout(10, 1280), 1 << 40, device="cpu") == ["kron", "diag"]
    assert structure_choice.automatic_structure(layout, 0, device="cpu") == "diag"


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


@pytest.mark.long
def test_rougher_structures_are_compared_on_val_and_the_closest_is_taken_where_the_mode_predicts_best(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", few_arrays())
    monkeypatch.setattr("bnncli.inference.structure_choice.QUICK_ANYWHERE", 320)  # of 328 parameters
    monkeypatch.setattr("bnncli.inference.structure_choice.largest_full", lambda device: 320)
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
    monkeypatch.setattr("bnncli.inference.structure_choice.QUICK_ANYWHERE", 10)
    monkeypatch.setattr("bnncli.inference.structure_choice.largest_full", lambda device: 10)
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


CORE = estimate_speed("cpu", threads=1)


@pytest.mark.parametrize(
    ("structure", "layout", "num_examples"),
    [
        ("full", HeadLayout(10, 150), 2000),
        ("block", HeadLayout(10, 400), 1000),
        ("kron", HeadLayout(10, 800), 1000),
        ("kron", HeadLayout(500, 4), 40),
    ],
)
def test_a_covariance_takes_about_as_long_as_estimated(structure: str, layout: HeadLayout, num_examples: int) -> None:
    target = head_target(layout, num_examples, prior=10.0, dtype=torch.float32)
    theta = torch.zeros(layout.num_params, dtype=torch.float64)
    covariance_at(target, theta, structure)  # warms up
    before = time.process_time()
    covariance_at(target, theta, structure)
    measured = time.process_time() - before
    expected = fit_seconds(structure, layout, num_examples=num_examples, speed=CORE, num_modes=0)
    assert 1 / 6 < measured / expected < 6  # of all threads' time; cores differ


def test_kronecker_factors_of_very_many_outputs_are_not_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "kron" in automatic_structures(HeadLayout(1000, 4), 2**40, device="cpu", num_draws=128)
    assert automatic_structures(HeadLayout(10_000, 4), 2**40, device="cpu", num_draws=128) == ["block", "diag"]


def test_the_largest_quick_covariance_is_as_large_as_the_device_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert largest_full("cpu") == QUICK_ANYWHERE
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert largest_full("cpu") == 6000
    found = {}
    for capability in ((9, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, told=capability: told)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
        )
        found[capability] = largest_full("cuda:0")
    seconds = fit_seconds("full", HeadLayout(100, 256), num_examples=50_000, speed=estimate_speed("cuda:0"))
    assert QUICK_ANYWHERE < found[8, 9] < 25_700 < found[9, 0]  # what is fast in float32 alone takes long
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert (
        fit_seconds("full", HeadLayout(100, 256), num_examples=50_000, speed=estimate_speed("cuda:0")) < seconds < 1000
    )


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_small_problems_are_searched_by_all_examples() -> None:
    sizes = {"num_params": 850, "num_outputs": 10, "device": CPU}
    rows = search_rows(60_000, 10_000, **sizes, generator=seeded(0))
    assert rows == SearchRows(None, None)
    assert search_size(60_000, **sizes) == 60_000


def test_large_ones_by_rows_drawn_without_replacement_as_the_seed_says() -> None:
    sizes = {"num_params": 1_281_000, "num_outputs": 1000, "device": CPU}
    rows, again, other = (search_rows(100_000, 10_000, **sizes, generator=seeded(seed)) for seed in (0, 0, 1))
    for found, same, different, total in (
        (rows.train, again.train, other.train, 100_000),
        (rows.val, again.val, other.val, 10_000),
    ):
        assert same is not None
        assert different is not None
        assert len(found.unique()) == len(found) < total / 2
        assert found.equal(found.sort().values)
        assert int(found[0]) >= 0
        assert int(found[-1]) < total
        assert found.equal(same)
        assert not found.equal(different)
        middle = float(found.double().mean() / total)  # of a uniform draw, sd 1 / sqrt(12 n)
        assert abs(middle - 0.5) < 5 / math.sqrt(12 * len(found))
    assert rows.train is not None
    assert len(rows.train) == search_size(100_000, **sizes)


def test_a_search_reads_ten_examples_of_an_output_at_least_and_more_on_a_gpu() -> None:
    huge = {"num_params": 20_000_000, "num_outputs": 10_000}
    assert search_size(10**7, **huge, device=CPU) == 100_000
    assert search_size(10**7, **huge, device=CUDA) == 100_000
    large = {"num_params": 2_049_000, "num_outputs": 1000}
    assert search_size(1_280_000, **large, device=CPU) < search_size(1_280_000, **large, device=CUDA)


def test_a_search_by_all_examples_is_brief_where_its_modes_take_seconds() -> None:
    assert not is_short_search(11_300, num_params=7_700, device=CPU)
    assert not is_short_search(60_000, num_params=850, device=CPU)
    assert is_short_search(32_000, num_params=51_225, device=CPU)
    assert not is_short_search(32_000, num_params=51_225, device=CUDA)


def test_a_search_of_a_large_head_leaves_precisions_out_and_finds_the_same() -> None:
    layout = HeadLayout(3, 4)
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    held_out = target.held_out(*draw_examples(layout, 200, labels=by_noisy_sign, seed=1))

    def found(start: torch.Tensor, *, is_large: bool) -> tuple[float, list[float]]:
        result = search(
            target, start=start, generator=seeded(7), structure="full", criterion="val",
            held_out=held_out, bounds=(1e-6, 1e5), tolerance=0.0, is_large=is_large,
        )  # fmt: skip
        return result.best, [key for key, _ in result.curve]

    best, whole = found(torch.zeros(layout.num_params), is_large=False)
    for own in (1e-3, 1.0, 1e4):  # the precision that the start is the mode of
        start = find_mode(target.with_prior(Prior(own)), torch.zeros(layout.num_params)).theta
        again, part = found(start, is_large=True)
        assert again == pytest.approx(best, rel=0.3)  # other draws
        assert len(part) < len(whole)
        # Where it began, one beyond the lowest, and one beyond its beginning where it went the wrong way first.
        assert min(part) == pytest.approx(min(own, 0.1), rel=0.02)
        assert max(part) == pytest.approx(10.0 if own < 10 else 10 * own, rel=0.02)


def test_a_search_that_takes_seconds_leaves_precisions_out_and_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = HeadLayout(3, 4)
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    held_out = target.held_out(*draw_examples(layout, 200, labels=by_noisy_sign, seed=1))
    found = []
    for work in (1e7, 0):
        monkeypatch.setattr(prior_search, "_BRACKET_WORK", work)
        start = torch.zeros(layout.num_params)
        found.append(
            search(target, start=start, generator=seeded(7), criterion="val", held_out=held_out, tolerance=0.0)
        )
    assert len(found[1].curve) < len(found[0].curve)
    assert found[1].best == pytest.approx(found[0].best, rel=1e-3)
    assert found[1].fit.log_joint == pytest.approx(found[0].fit.log_joint, rel=1e-5)


class Curve:
    """Candidates of a network: a smooth criterion of the log precision, judged in groups."""

    def __init__(self, lowest: float, curvature: float) -> None:
        self.lowest, self.curvature = lowest, curvature
        self.values: dict[float, float] = {}
        self.num_passes = 0

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        self.num_passes += 1
        for key in log_precisions:
            away = key - self.lowest
            self.values[key] = self.curvature * (away**2 + 0.05 * away**3)

    @property
    def best(self) -> float:
        return min(self.values, key=lambda key: self.values[key])


@pytest.mark.parametrize(("curvature", "num_passes"), [(1e-4, 2), (1.0, 3)])
def test_a_search_with_shared_work_takes_few_passes(curvature: float, num_passes: int) -> None:
    candidates = Curve(0.87, curvature)
    judge_precisions(candidates, [math.log(10.0**power) for power in range(-3, 4)], Pace(False, 3, is_together=True))
    assert candidates.num_passes == num_passes
    assert candidates.values[candidates.best] < 5e-5


def test_searches_of_shared_centers_and_small_ones_judge_the_whole_grid() -> None:
    large, small = (head_target(HeadLayout(3, 4), count) for count in (700_000, 40))
    assert choose_pace(large, is_large=False).is_bracketed
    assert not choose_pace(large, is_large=False, shares_center=True).is_bracketed
    assert not choose_pace(small, is_large=False).is_bracketed
    assert choose_pace(small, is_large=True) == Pace(is_bracketed=True, num_halvings=1)


def test_the_checkpoints_own_precision_is_that_of_which_it_is_the_mode() -> None:
    layout = HeadLayout(3, 4)
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    start = find_mode(target.with_prior(Prior(17.0)), torch.zeros(layout.num_params)).theta
    criterion = Criterion(normal(2, layout.num_params), None)
    candidates = Candidates(target, "kron", "mode", criterion, start, 0.0, SILENT.task("", 1))
    assert math.exp(candidates.own_log_precision) == pytest.approx(17.0, rel=1e-3)


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("layout", [HeadLayout(3, 4), HeadLayout(1, 4, has_bias=False)], ids=str)
def test_losses_by_logits_are_those_by_draws_of_theta(structure: str, layout: HeadLayout) -> None:
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    held_out = target.held_out(*draw_examples(layout, 30, labels=by_noisy_sign, seed=1))
    gaussian = gaussian_at_mode(target, structure)
    num_draws, parts = 100_000, 20
    size = num_draws // parts

    def probabilities(draw: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean (M,) over the parts, and its standard error."""
        found = torch.stack([torch.exp(-draw(seed)) for seed in range(parts)])
        return found.mean(dim=0), found.std(dim=0) / parts**0.5

    def by_logits(seed: int) -> torch.Tensor:
        noise = normal(size, layout.num_outputs, seed=seed)
        return losses_by_logits(held_out, target, gaussian.mean, gaussian.covariance, noise=noise)

    def by_theta(seed: int) -> torch.Tensor:
        return held_out.losses(gaussian.sample(size, seeded(100 + seed)))

    (one, error), (other, its_error) = probabilities(by_logits), probabilities(by_theta)
    assert ((one - other).abs() < 5 * (error.square() + its_error.square()).sqrt()).all()
    plug_in = torch.exp(-held_out.losses(gaussian.mean.unsqueeze(0)))
    assert ((one - plug_in).abs() > 5 * error).any()  # draws do move it


def test_losses_of_many_draws_and_classes_are_made_in_blocks() -> None:
    layout = HeadLayout(40, 6)
    target = head_target(layout, 50, prior=1.0, labels=at_random)
    theta = normal(300, layout.num_params, seed=1)
    log_probs = torch.log_softmax(layout.logits(target.features, theta).double(), dim=2)
    expected = -(log_probs[:, torch.arange(50), target.labels].logsumexp(dim=0) - math.log(300))
    torch.testing.assert_close(
        target.held_out(target.features, target.labels).losses(theta), expected, atol=1e-5, rtol=0
    )


def test_a_mode_is_as_near_as_its_default_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = HeadLayout(3, 4)
    target = head_target(layout, 40, prior=1.0, labels=by_noisy_sign)
    start = torch.zeros(layout.num_params)
    exact = find_mode(target, start)
    assert exact.newton_decrement <= 1e-3
    tolerances = [default_tolerance(num_params) for num_params in (850, 10_000, 40_000, 100_000, 1_281_000)]
    assert tolerances == pytest.approx([1e-3, 1e-3, 16e-3, 0.1, 0.1])
    for name in ("_TOLERANCE", "_TOLERANCE_OF_MANY"):
        monkeypatch.setattr(f"bnncli.inference.mode.{name}", 1.0)
    rough = find_mode(target, start)
    assert rough.num_iterations < exact.num_iterations
    assert 1e-3 < rough.newton_decrement <= 1.0
