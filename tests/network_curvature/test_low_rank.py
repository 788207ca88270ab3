"""The largest eigenvalues of a network's curvature, and the covariance that they make with any prior, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import seeded
from problems.tiny_networks import tiny_target
from torch import Tensor

from bnncli.covariances.low_rank import LowRank
from bnncli.curvature import ggn
from bnncli.inference.prior_search import search
from bnncli.network_curvature.low_rank import LowRank as LowRankCurvature
from bnncli.network_curvature.low_rank import _trace_outside, largest_eigenpairs
from bnncli.parameters.prior import Prior
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import NetworkTarget

CPU = torch.device("cpu")
PRIORS = (Prior(1.0), Prior(2.0, 0.5), Prior(1e-2))
EIGHT = CurvatureChoice(rank=8)


def parts(rank: int) -> tuple[dict[str, Tensor], Tensor]:
    target = tiny_target(choice=CurvatureChoice(rank=rank))
    theta = target.layout.trained()
    return ggn(target, theta, "low-rank"), ggn(target, theta, "full")["hessian.full"]


def eigenpairs(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return largest_eigenpairs(lambda vector: matrix @ vector, len(matrix), count, seeded(0), CPU)


@pytest.mark.parametrize("rank", [1, 8, 1000])
def test_the_eigenvalues_are_the_largest_of_the_dense_matrix(rank: int) -> None:
    found, dense = parts(rank)
    rank = min(rank, len(dense))
    values, vectors = torch.linalg.eigh(dense)
    vectors = vectors.T.flip(0)[:rank]
    torch.testing.assert_close(
        found["hessian.low-rank.values"], values.flip(0)[:rank].clamp_min(0), rtol=1e-5, atol=1e-9
    )
    own = found["hessian.low-rank.vectors"]
    torch.testing.assert_close(own @ own.T, torch.eye(rank, dtype=torch.float64))
    if rank == 8:  # the subspace, whatever the signs
        torch.testing.assert_close(own.T @ own, vectors.T @ vectors, rtol=0, atol=1e-2)


def test_equal_eigenvalues_are_all_found() -> None:
    basis = torch.linalg.qr(torch.randn(40, 40, generator=seeded(1), dtype=torch.float64))[0]
    values = torch.tensor([5.0] * 3 + [2.0] * 2 + [0.0] * 35, dtype=torch.float64)
    found, vectors = eigenpairs(basis @ values.diag() @ basis.T, 6)
    torch.testing.assert_close(found, values[:6], rtol=0, atol=1e-9)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(6, dtype=torch.float64))


def test_a_wide_spectrum_is_resolved_in_few_products() -> None:
    basis = torch.linalg.qr(torch.randn(300, 300, generator=seeded(2), dtype=torch.float64))[0]
    values = 1e4 * torch.arange(1, 301, dtype=torch.float64) ** -2.0
    calls = 0

    def multiply(vector: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return basis @ (values * (basis.T @ vector))

    found, _ = largest_eigenpairs(multiply, 300, 10, seeded(0), CPU)
    torch.testing.assert_close(found, values[:10], rtol=1e-5, atol=0)
    assert calls <= 50


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_the_covariance_is_the_dense_inverse(prior: Prior) -> None:
    found, _ = parts(8)
    layout = tiny_target().layout
    covariance = LowRank.from_hessian(found, prior, layout)
    vectors, values = found["hessian.low-rank.vectors"], found["hessian.low-rank.values"]
    precision = vectors.T @ values.diag() @ vectors + prior.diagonal(layout).diag()
    units = torch.eye(len(precision), dtype=torch.float64)
    root = covariance.unwhiten(units).T
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(covariance.whiten(root.T), units, rtol=0, atol=1e-8)
    torch.testing.assert_close(covariance.pull_back(units), root)
    assert covariance.log_det_scale() == pytest.approx(-0.5 * float(torch.logdet(precision)))
    torch.testing.assert_close(
        covariance.marginal_variances(), torch.linalg.inv(precision).diagonal(), rtol=1e-6, atol=1e-9
    )
    again = LowRank.from_tensors(covariance.to_tensors(), layout)
    torch.testing.assert_close(again.unwhiten(units), covariance.unwhiten(units))
    single = covariance.to(dtype=torch.float32).unwhiten(units)
    torch.testing.assert_close(
        single.double(), covariance.unwhiten(units), rtol=1e-3, atol=1e-3 * float(root.abs().max())
    )


def test_all_eigenvalues_are_the_full_covariance() -> None:
    found, dense = parts(1000)
    layout = tiny_target().layout
    covariance = LowRank.from_hessian(found, PRIORS[1], layout)
    root = covariance.unwhiten(torch.eye(len(dense), dtype=torch.float64))
    expected = torch.linalg.inv(dense + PRIORS[1].diagonal(layout).diag())
    torch.testing.assert_close(root.T @ root, expected, rtol=1e-6, atol=1e-8)


def test_the_captured_share_of_the_trace_is_told_with_its_error() -> None:
    found, dense = parts(8)
    told = LowRankCurvature.metrics(found)
    share = float(found["hessian.low-rank.values"].sum() / dense.trace())
    assert 0.5 < share < 0.999
    assert told["rank"] == 8
    assert told["captured_trace"] < 1 - 0.2 * (1 - share)
    assert abs(told["captured_trace"] - share) <= 4 * told["captured_trace_standard_error"] + 1e-9
    assert LowRankCurvature.metrics(parts(1000)[0])["captured_trace"] == pytest.approx(1.0)


def test_the_rest_of_the_trace_is_without_bias_and_has_the_error_that_is_told() -> None:
    _, dense = parts(1)
    vectors = torch.linalg.eigh(dense)[1].T[-8:]
    rest = float(dense.trace() - (vectors @ dense @ vectors.T).trace())
    found = [_trace_outside(lambda some: some @ dense, vectors, seeded(seed)) for seed in range(300)]
    values, errors = torch.tensor(found).T
    wrong = values - rest
    assert abs(float(wrong.mean())) < 4 * float(wrong.std()) * 300**-0.5
    assert float(errors.square().mean() / wrong.square().mean()) == pytest.approx(1, abs=0.3)


def test_under_many_priors_h_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    operator = NetworkTarget.ggn_operator
    monkeypatch.setattr(NetworkTarget, "ggn_operator", lambda *given: made.append(given) or operator(*given))
    target = tiny_target(choice=EIGHT)
    held_out = target.held_out(target.inputs, target.labels)
    found = search(
        target, start=target.layout.trained(), generator=seeded(0), structure="low-rank", center="checkpoint",
        held_out=held_out, bounds=(0.1, 100.0),
    )  # fmt: skip
    assert len(found.curve) > 5
    assert len(made) == 1
