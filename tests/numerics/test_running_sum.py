"""Running sums against float64's, and on a pretend GPU that refuses what deterministic kernels leave out."""

from __future__ import annotations

from collections.abc import Iterator

import pretend_cuda
import pytest
import torch

from bnncli.evaluation.feature_scores import Mahalanobis
from bnncli.flows import build_layers
from bnncli.integrators._partitions import central_interval
from bnncli.numerics.running_sum import by_products, running_sum
from bnncli.parameters.layouts import HeadLayout


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1, 2, 64, 65, 128, 1000, 64 * 64 + 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_products_add_up_as_float64_does(size: int, dtype: torch.dtype, tolerance: float) -> None:
    values = torch.rand(3, 2, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    exact = values.double().cumsum(dim=-1)
    torch.testing.assert_close(by_products(values).double(), exact, rtol=tolerance, atol=0)
    assert torch.equal(running_sum(values), values.cumsum(dim=-1))


def test_products_have_the_gradient_of_a_running_sum() -> None:
    values = torch.rand(2, 130, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 130, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((sums * weights).sum(), values)[0] for sums in (by_products(values), values.cumsum(-1))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("deterministic")
def test_splines_are_the_cpus_where_kernels_must_be_deterministic() -> None:
    layout, generator = HeadLayout(3, 4), torch.Generator().manual_seed(0)
    (layer,) = build_layers("spline", layout, generator, length=1)
    torch.nn.init.normal_(layer.network.weight, generator=generator)
    z = torch.randn(5, layout.num_params, generator=generator, dtype=torch.float64)
    image, log_det = layer(z)
    with pretend_cuda.pretend() as gpu:
        there, log_det_there = layer.to(device="cuda")(z.to("cuda"))
        (there.sum() + log_det_there.sum()).backward()
        there, log_det_there = there.detach().cpu(), log_det_there.detach().cpu()
    assert gpu.problems() == []
    torch.testing.assert_close(there, image, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(log_det_there, log_det, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("deterministic")
def test_weighted_intervals_are_the_cpus_where_kernels_must_be_deterministic() -> None:
    generator = torch.Generator().manual_seed(0)
    draws, weights = torch.randn(4, 200, generator=generator), torch.rand(200, generator=generator)
    ends = central_interval(draws, weights)
    with pretend_cuda.pretend() as gpu:
        there = central_interval(draws.to("cuda"), weights.to("cuda")).cpu()
    assert gpu.problems() == []
    torch.testing.assert_close(there, ends)


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_class_means_of_features_are_the_cpus_in_one_order(
    is_deterministic: bool, request: pytest.FixtureRequest
) -> None:
    if is_deterministic:
        request.getfixturevalue("deterministic")
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(50, 4, generator=generator), torch.arange(50) % 3 * 2
    scores = Mahalanobis.fit(features, labels, device=torch.device("cpu")).scores(features)
    with pretend_cuda.pretend() as gpu:
        fitted = Mahalanobis.fit(features.to("cuda"), labels.to("cuda"), device=torch.device("cuda:0"))
        there = fitted.scores(features.to("cuda"))
    assert gpu.problems() == []
    for name, score in scores.items():
        torch.testing.assert_close(there[name], score)
