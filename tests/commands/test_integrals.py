"""The integrals command: published errors of the integrators, exact values by independent means, and its contract."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli
from scipy import integrate, special, stats

from bnncli.commands.integrals import list_integrators, predict, sigmoid_posterior, softmax_posterior
from bnncli.figures.integrals import ErrorPanel, draw
from bnncli.integrators import _exact, load_integrator, settings_of, supports
from bnncli.integrators._exact import exact_probs
from bnncli.registry import names

COVARIANCE = [[2.0, 1.0, 0.0], [1.0, 2.0, 0.3], [0.0, 0.3, 1.0]]


def matrix(rows: Any) -> torch.Tensor:
    return torch.as_tensor(rows, dtype=torch.float64)


def by_variant(document: dict[str, Any]) -> dict[str, Any]:
    return {row["variant"]: row for row in document["integrators"]}


def random_covariance(size: int, *, scale: float, seed: int) -> torch.Tensor:
    factor = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scale**2 / size * factor @ factor.T


def test_three_classes_are_exact_by_adaptive_quadrature() -> None:
    mean, covariance = np.array([1.0, 0.0, -1.0]), np.array(COVARIANCE)
    contrast = np.array([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]])  # logits against the last class, in the plane
    (m, n), spread_of = contrast @ mean, contrast @ covariance @ contrast.T
    (p, q), (_, r) = np.linalg.inv(spread_of).tolist()
    scale = 1 / (2 * math.pi * math.sqrt(np.linalg.det(spread_of)))

    def weighted(b: float, a: float) -> float:
        x, y = a - m, b - n
        return scale * math.exp(a - (p * x * x + 2 * q * x * y + r * y * y) / 2) / (math.exp(a) + math.exp(b) + 1)

    reach = 8 * np.sqrt(np.diag(spread_of))
    expected, _ = integrate.dblquad(weighted, m - reach[0], m + reach[0], n - reach[1], n + reach[1], epsabs=1e-6)
    found = exact_probs(matrix(mean), matrix(covariance))
    assert found.probs[0].item() == pytest.approx(expected, abs=1e-5)
    assert found.probs.sum().item() == pytest.approx(1, abs=1e-13)
    assert found.method.startswith("product")


@pytest.mark.parametrize(
    ("size", "scale"), [(3, 0.5), (4, 0.5), (3, 3.0), pytest.param(4, 3.0, marks=pytest.mark.long)]
)
def test_product_rule_and_sobol_points_agree(size: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mean, covariance = torch.linspace(-1, 2, size).double(), random_covariance(size, scale=scale, seed=size)
    product = exact_probs(mean, covariance)
    monkeypatch.setattr(_exact, "_MAX_NODES", 0)
    sobol = exact_probs(mean, covariance)
    assert product.error < 1e-12 < sobol.error < 1e-5
    assert (product.probs - sobol.probs).abs().max() < 4 * sobol.error


def test_exact_probabilities_know_when_two_of_many_logits_matter() -> None:
    # All but one logit are equal and certain: K - 1 classes share 1 - p, and log(K - 1) shifts the binary logit.
    mean, covariance = torch.zeros(6, dtype=torch.float64), torch.zeros(6, 6, dtype=torch.float64)
    mean[0], covariance[0, 0] = 1.5, 4.0
    found = exact_probs(mean, covariance)
    expected = exact_probs(matrix([1.5 - math.log(5)]), matrix([[4.0]])).probs[1].item()
    np.testing.assert_allclose(found.probs, [expected, *[(1 - expected) / 5] * 5], atol=1e-13)
    assert "fixed logits" in exact_probs(mean, torch.zeros(6, 6)).method


def test_a_case_hands_integrators_exactly_its_moments() -> None:
    features = torch.ones(1, 1, dtype=torch.float64)
    for covariance in (matrix(COVARIANCE), torch.ones(3, 3).double(), torch.zeros(3, 3).double()):
        mean, found = softmax_posterior(matrix([1.0, 0.0, -1.0]), covariance).logit_moments(features)
        torch.testing.assert_close(found[0], covariance)
        torch.testing.assert_close(mean[0], matrix([1.0, 0.0, -1.0]))


def test_every_registered_integrator_and_setting_is_judged() -> None:
    posterior = sigmoid_posterior(matrix([0.0, 1.0]), matrix([1.0, 2.0]))
    judged = {case.name for case in list_integrators(posterior, [])}
    fit = {name for name in names("integrators") if supports(name, posterior)}
    assert judged == {name for name in fit if not load_integrator(name).needs_target}
    variants = {case.variant for case in list_integrators(posterior, [])}
    assert {"bridge-none", "bridge-conditional", "probit-difference", "mean-field-2", "logit-mc-qmc"} <= variants
    for name in judged:
        changed = {setting for case in list_integrators(posterior, [name]) for setting in case.settings}
        assert changed == set(settings_of(load_integrator(name))) - {"points"}


def test_the_published_picture_of_errors_comes_out(cli: Cli) -> None:
    chosen = [word for name in ("probit", "quadrature", "plug-in") for word in ("--integrator", name)]
    document = cli("integrals", *chosen, "--json").json
    rows = by_variant(document)
    assert document["grid"]["mean"] == {"low": -10, "high": 10, "count": 81}
    assert rows["probit"]["largest_error"] == pytest.approx(0.0160, abs=5e-5)
    assert abs(rows["probit"]["at"]["mean"]) == 10
    assert rows["quadrature"]["largest_error"] < 6e-8
    assert rows["plug-in"]["largest_error"] > 0.3
    drawn = by_variant(document := cli("integrals", "--integrator", "mc", "--grid-size", 31, "--json").json)["mc"]
    assert 0.09 < drawn["largest_error"] < 0.23
    assert drawn["mean_error"] < document["monte_carlo_sd_bound"] == 0.05


@pytest.mark.parametrize(("extent", "largest"), [(5, 0.0113), (20, 0.0172)])
def test_the_grid_ends_where_it_is_told(cli: Cli, extent: int, largest: float) -> None:
    words = ("--integrator", "probit", "--max-mean", extent, "--max-sd", extent, "--grid-size", 100)
    rows = by_variant(cli("integrals", *words, "--json").json)
    assert rows["probit"]["largest_error"] == pytest.approx(largest, abs=6e-5)


def test_draws_are_new_in_every_row(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[ErrorPanel] = []

    def keep(panels: list[ErrorPanel], *rest: Any, **words: Any) -> Any:
        shown.extend(panels)
        return draw(panels, *rest, **words)

    monkeypatch.setattr("bnncli.commands.integrals.draw", keep)
    # So wide that only the signs of the draws count: the same draws would err alike in both rows.
    words = ("--integrator", "mc", "--max-sd", 1e6, "--grid-size", 2, "--plot", tmp_path / "e.png")
    cli("integrals", *words).expect(0)
    (errors,) = [panel.errors for panel in shown if panel.names[0] == "mc"]
    assert errors.shape == (2, 3)
    assert not np.allclose(errors[0], errors[1], atol=1e-3)


def test_draws_are_new_in_every_cell() -> None:
    posterior = sigmoid_posterior(torch.zeros(200).double(), torch.full((200,), 9.0).double())
    (case,) = [case for case in list_integrators(posterior, ["mc"]) if not case.settings]
    probs = predict(case, posterior, num_samples=100, generator=torch.Generator().manual_seed(0)).probs[:, 1]
    deviation = math.sqrt(exact_second_moment() - 0.25)
    assert probs.std().item() == pytest.approx(deviation / 10, rel=4 / math.sqrt(400))


def exact_second_moment() -> float:
    """E sigma(f)^2 for f ~ N(0, 9)."""
    return integrate.quad(lambda f: special.expit(f) ** 2 * stats.norm.pdf(f, scale=3), -40, 40)[0]


def test_one_logit_and_two_give_the_same_exact_value(cli: Cli) -> None:
    one = cli("integrals", "--mean", "1.7", "--variance", "4", "--json").json
    two = cli("integrals", "--mean", "0.5,2.2", "--covariance", "3,0.5;0.5,2", "--json").json
    np.testing.assert_allclose(one["exact"]["probs"], two["exact"]["probs"], atol=1e-14)
    assert round(by_variant(one)["probit"]["probs"][1], 3) == 0.743
    assert by_variant(one)["quadrature"]["largest_error"] < 6e-8


def test_several_classes_are_compared_with_their_errors(cli: Cli) -> None:
    words = ("--mean", "-1,0,2", "--covariance", "2,1,0;1,2,0;0,0,1", "--samples", 4000)
    rows = by_variant(document := cli("integrals", *words, "--json").json)
    exact = np.array(document["exact"]["probs"])
    for row in rows.values():
        np.testing.assert_allclose(np.array(row["probs"]) - exact, row["errors"])
        assert row["largest_error"] == max(map(abs, row["errors"]))
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-6)
    assert rows["mc"]["largest_error"] < 4 * 0.5 / math.sqrt(4000)
    assert "quadrature" not in rows
    assert "class 2" in cli("integrals", *words).stdout


@pytest.mark.long
def test_ten_classes_have_a_standard_error_and_the_seed_decides(cli: Cli) -> None:
    words = ("integrals", "--mean", ",".join(["0"] * 10), "--variance", "4", "--integrator", "mc", "--json")
    first, again, other = (cli(*words, "--seed", seed).json for seed in (0, 0, 1))
    assert 1e-7 < first["exact"]["error"] < 1e-4
    assert first["integrators"] == again["integrators"] != other["integrators"]
    assert first["exact"] == again["exact"] != other["exact"]
    off = np.abs(np.array(first["exact"]["probs"]) - 0.1).max()
    assert 0.7 < off / first["exact"]["error"] < 4  # the largest of ten deviations in largest standard errors


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--mean", "a", "--variance", "1"], "--mean: expected finite numbers"),
        (["--mean", "1,nan", "--variance", "1"], "--mean: expected finite numbers"),
        (["--mean", "1"], "either --variance or --covariance"),
        (["--variance", "1"], "--variance and --covariance need --mean"),
        (["--mean", "1", "--variance", "1", "--covariance", "1"], "either --variance or --covariance"),
        (["--mean", "1,2,3", "--variance", "1,2"], "one number, or 3"),
        (["--mean", "1", "--variance", "-1"], "at least 0; got -1"),
        (["--mean", "1,2", "--covariance", "1,2;3,4"], "symmetric"),
        (["--mean", "1,2", "--covariance", "1,2;2,1"], "no negative eigenvalue; got -1"),
        (["--mean", "1,2", "--covariance", "1,2"], "2 rows of 2 numbers"),
        (["--mean", "1", "--variance", "1", "--plot", "x.png"], "--plot draws the grid"),
        (["--mean", "1,2,3", "--variance", "1", "--integrator", "quadrature"], "does not work with 3 classes"),
        (["--plot", "x.gif"], "--plot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_moments_are_one_line(cli: Cli, words: list[str], why: str) -> None:
    done = cli("integrals", *words)
    assert (done.code, done.stdout) == (2, "")
    assert why in done.stderr.splitlines()[0]


def test_plot_makes_a_picture_and_spares_foreign_files(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "errors.png"
    path.write_bytes(b"a photograph")
    words = ("integrals", "--grid-size", 5, "--integrator", "mc", "--plot", path)
    assert (cli(*words).code, path.read_bytes()) == (73, b"a photograph")
    assert [output["path"] for output in cli(*words, "--force", "--json").json["outputs"]] == [str(path)]
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels.shape[1] > 600
    assert 0.05 < (pixels < 200).mean() < 0.8
    assert str(path) in cli(*words).stdout


def test_the_map_shows_the_errors_where_they_are() -> None:
    errors = np.full((3, 4), 1e-3)
    errors[2, 1] = 0.1
    means, sds = np.linspace(-3, 3, 4), np.linspace(1, 3, 3)
    figure = draw([ErrorPanel(["one", "two"], errors, (-1.0, 3.0)), ErrorPanel(["best"], 0 * errors, (0.0, 1.0))], means, sds, title="t")  # fmt: skip
    first, second, bar = figure.axes
    assert first.images[0].get_array().argmax() == 9
    assert first.images[0].origin == "lower"
    assert first.images[0].get_extent() == [-4, 4, 0.5, 3.5]
    assert first.lines[0].get_xydata().tolist() == [[-1, 3]]
    assert not second.lines
    assert first.get_title().startswith("one = two\nlargest 0.1")
    assert bar.get_ylabel() == "absolute error of the probability"
