"""Kronecker factors of networks, and the diagonal in their eigenbasis, against curvlinops, where that is installed."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.targets.network import NetworkTarget

curvlinops = pytest.importorskip("curvlinops")

MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "wide": (lambda: nn.Sequential(nn.Linear(70, 4), nn.Tanh(), nn.Linear(4, 3)), (70,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
        ),
        (1, 5, 5),
    ),
    "sequence": (lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2), nn.Flatten(), nn.Linear(6, 3)), (3, 2)),
}  # fmt: skip
OPERATORS = {"kron": "KFACLinearOperator", "ekfac": "EKFACLinearOperator"}


@pytest.mark.parametrize("structure", OPERATORS)
@pytest.mark.parametrize("name", MODULES)
def test_kron_and_ekfac_are_curvlinops(name: str, structure: str) -> None:
    build, shape = MODULES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build().double().eval()
    inputs = torch.randn(10, *shape, generator=seeded(1), dtype=torch.float64)
    labels = torch.randint(0, 3, (10,), generator=seeded(2))
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=3, input_shape=shape)
    target = NetworkTarget(inputs, labels, layout, Prior(1.0))
    operator = getattr(curvlinops, OPERATORS[structure])(
        module, nn.CrossEntropyLoss(reduction="sum"), list(module.parameters()), [(inputs, labels)],
        fisher_type="type-2", kfac_approx="expand", separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    expected: Tensor = operator @ torch.eye(layout.num_params, dtype=torch.float64)
    parts = ggn(target, layout.trained(), structure)
    kind = registry.load_class("covariances", structure)
    white = kind.from_hessian(parts, Prior(1.0), layout).whiten(torch.eye(layout.num_params, dtype=torch.float64))
    found = white @ white.T - torch.eye(layout.num_params)  # the precision, less the prior's
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
