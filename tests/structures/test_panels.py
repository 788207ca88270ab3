"""Roots of inverses panel by panel: against a factor and a solve; the same bits for any number of workers."""

from __future__ import annotations

import signal

import pytest
import torch
from problems.heads import at_random, head_target
from problems.seeds import seeded
from problems.threads import in_threads
from torch import Tensor

from bnncli.errors import Interrupted, NumericError
from bnncli.parameters.layouts import HeadLayout
from bnncli.structures import root_for_many
from bnncli.structures.factorisation import inverse_root, panelled_root, root_of_sum
from bnncli.structures.full import Full, LastLayerFull
from bnncli.system import signals
from bnncli.system.workers import Team

ALONE = Team(0, 1)


def precision_of(size: int) -> Tensor:
    root = torch.randn(size, size + 3, generator=seeded(), dtype=torch.float64)
    return root @ root.T


def root_by(team: Team, matrix: Tensor) -> Tensor | None:
    size = len(matrix)

    def columns(start: int, stop: int) -> Tensor:
        return matrix.flip(0, 1)[start:, start:stop].clone()

    return panelled_root(columns, size, team, device=matrix.device)


@pytest.mark.parametrize("size", [1, 256, 257, 700])
def test_a_root_is_lower_triangular_and_gives_the_inverse(size: int) -> None:
    precision = precision_of(size)
    root = root_by(ALONE, precision)
    assert torch.equal(root, root.tril())
    torch.testing.assert_close(root @ root.T @ precision, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-7)
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(precision), rtol=1e-7, atol=1e-9)
    assert (root.diagonal() > 0).all()


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_any_number_of_workers_has_the_same_bits(workers: int) -> None:
    precision = precision_of(700)
    expected = root_by(ALONE, precision)
    for found in in_threads(workers, lambda team: root_by(team, precision)):
        assert torch.equal(found, expected)


def test_a_large_matrix_has_the_root_that_a_factor_and_a_solve_give() -> None:
    precision, precisions = precision_of(1100), torch.rand(1100, generator=seeded(), dtype=torch.float64)
    summed, _ = root_of_sum(lambda start, stop: precision[start:stop], precisions, mean=1.0)
    for found, matrix in ((inverse_root(precision.clone()), precision), ((summed, 0), precision + precisions.diag())):
        assert found[1] == 0
        factor = torch.linalg.cholesky(matrix.flip(0, 1)).flip(0, 1)
        torch.testing.assert_close(found[0] @ factor.T, torch.eye(1100, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2])
def test_jitter_is_added_where_there_is_no_factor_and_told(workers: int) -> None:
    column = torch.arange(1.0, 41.0, dtype=torch.float64).unsqueeze(1)
    singular = column @ column.T - 1e-7 * torch.eye(40, dtype=torch.float64)
    assert in_threads(workers, lambda team: root_by(team, singular)) == [None] * workers
    root, jitter = inverse_root(singular.clone())
    assert jitter == pytest.approx(float(singular.diagonal().mean()) * 1e-8) or jitter > 1e-7
    torch.testing.assert_close(
        root @ root.T @ (singular + jitter * torch.eye(40, dtype=torch.float64)),
        torch.eye(40, dtype=torch.float64),
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("change", "message"), [(-1e9, "not positive definite"), (float("nan"), "not finite"), (float("inf"), "not finite")]
)
@pytest.mark.parametrize("size", [40, 1100])
def test_what_has_no_root_is_refused(change: float, message: str, size: int) -> None:
    precision = precision_of(size)
    precision[20, 20] = change
    with pytest.raises(NumericError, match=message):
        inverse_root(precision)


def test_a_signal_ends_it_between_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    left, total = [5], precision_of(1100)

    def poll(where: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted(signal.SIGTERM, where)

    monkeypatch.setattr(signals, "raise_if_interrupted", poll)
    with pytest.raises(Interrupted, match="a Cholesky factorisation"):
        inverse_root(total)


@pytest.mark.parametrize("size", [2049, 2500])
def test_products_with_a_large_root_leave_out_only_what_is_zero(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    root = torch.randn(size, size, dtype=torch.float64, generator=generator).tril_()
    z = torch.randn(3, size, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(Full(root).unwhiten(z), z @ root.T, rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(Full(root).pull_back(z), z @ root, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("size", [2049, 2500])
@pytest.mark.parametrize("num_vectors", [1, 16])
def test_a_root_laid_out_for_many_products_gives_those_of_the_dense_one(size: int, num_vectors: int) -> None:
    root = torch.randn(size, size, generator=seeded(), dtype=torch.float64).tril() / size**0.5
    for dtype, accuracy in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        laid_out = root_for_many(Full(root), torch.device("cpu"), dtype)
        vectors = torch.randn(num_vectors, size, generator=seeded(1), dtype=torch.float64)
        assert laid_out.unwhiten(vectors).dtype == dtype
        torch.testing.assert_close(laid_out.unwhiten(vectors).double(), vectors @ root.T, rtol=accuracy, atol=accuracy)
        torch.testing.assert_close(laid_out.pull_back(vectors).double(), vectors @ root, rtol=accuracy, atol=accuracy)


LAYOUTS = [
    HeadLayout(4, 3), HeadLayout(3, 30), HeadLayout(5, 4, has_bias=False), HeadLayout(1, 6),
    HeadLayout(3, 5, likelihood_name="multilabel"),
]  # fmt: skip


def labels(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    if layout.likelihood_name == "multilabel":
        return torch.randint(2, (len(features), layout.num_outputs), generator=generator)
    return at_random(features, layout, generator)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("step", [1, 4, 7, 1000])
def test_rows_are_those_of_the_whole(layout: HeadLayout, step: int) -> None:
    target = head_target(layout, 50, labels=labels, prior=1.0)
    theta = torch.linspace(-1, 1, layout.num_params, dtype=torch.float64)
    whole, rows = LastLayerFull.hessian(target, theta)["hessian.full"], LastLayerFull.rows(target, theta)
    for start in range(0, layout.num_params, step):
        stop = min(start + step, layout.num_params)
        assert torch.equal(rows(start, stop), whole[start:stop])
