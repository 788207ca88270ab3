"""What Kronecker factors read of the data, counted in rows that pass through the network, and what random columns cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn, network_sums
from bnncli.targets.network import NetworkTarget

N = 60
ROWS: Counter[str] = Counter()


class Count(torch.autograd.Function):
    """The identity, which counts the rows that it sees, those of vmap with them."""

    @staticmethod
    def forward(rows: Tensor, name: str) -> Tensor:
        ROWS[name] += len(rows)
        return rows.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        return Count.apply(slopes, "back"), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], rows: Tensor, name: str) -> tuple[Tensor, int | None]:
        if in_dims[0] is None:
            return Count.apply(rows, name), None
        return Count.apply(rows.movedim(in_dims[0], 0).flatten(0, 1), name).view_as(rows.movedim(in_dims[0], 0)), 0


class Counted(nn.Module):
    """A network whose logits are counted, forward and back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        counted: Tensor = Count.apply(self.inner(x), "forward")
        return counted


class Attention(nn.Module):
    """Tokens with places, which are a bare parameter, one layer of attention, whose projection is no module's weight, and a norm."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(3, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)
        self.head = nn.Linear(4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 3, 4) + self.places).mean(dim=1))


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": lambda num_outputs: nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, num_outputs)),
    "conv": lambda num_outputs: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(12, num_outputs)
    ),
    "attention": Attention,
}  # fmt: skip


def make(name: str, num_outputs: int, likelihood: str | None = None) -> NetworkTarget:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ModuleNetwork(Counted(NETWORKS[name](num_outputs)).double().eval())
    layout = ModuleLayout.of(network, num_outputs=num_outputs, input_shape=(12,), likelihood_name=likelihood)
    inputs = torch.randn(N, 12, generator=seeded(1), dtype=torch.float64)
    size = (N,) if likelihood is None else (N, num_outputs)
    return NetworkTarget(inputs, torch.randint(0, 2, size, generator=seeded(2)), layout, Prior(1.0))


@pytest.mark.parametrize("num_outputs", [2, 3, 4, 10, 100])
@pytest.mark.parametrize("name", NETWORKS)
def test_kron_takes_at_most_four_passes_and_ekfac_eight(name: str, num_outputs: int) -> None:
    check_passes(make(name, num_outputs))


@pytest.mark.parametrize("num_outputs", [2, 3, 4])
def test_several_labels_take_no_more(num_outputs: int) -> None:
    check_passes(make("attention", num_outputs, "multilabel"))


def check_passes(target: NetworkTarget) -> None:
    """A pass is a gradient's: all rows forward, and, for twice as much, back."""
    for structure, most in (("kron", 4), ("ekfac", 8)):
        ROWS.clear()
        ggn(target, target.layout.trained(), structure)
        tries = 10  # the first two examples, on which gradients are tried
        assert ROWS["forward"] > N
        assert ROWS["back"] >= N
        assert (ROWS["forward"] + 2 * ROWS["back"]) / 3 <= most * N + tries


def test_a_gradient_is_one_pass_as_they_are_counted() -> None:
    target = make("conv", 10)
    theta = target.layout.trained().unsqueeze(0)
    _ = target.rows_at_once(1, torch.float64)  # measures activations
    ROWS.clear()
    target.log_joint_and_grad(theta)
    assert ROWS == {"forward": N, "back": N}
    ROWS.clear()
    torch.func.vmap(torch.func.jacrev(lambda x: target.layout.logits(x[None], theta)[0, 0]))(target.inputs)
    assert ROWS == {"forward": N, "back": 10 * N}


def test_random_columns_err_by_what_their_variance_says() -> None:
    target = make("mlp", 10)
    logits = 2 * torch.randn(N, 10, generator=seeded(3), dtype=torch.float64)
    p = logits.softmax(dim=1)
    exact = (p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)).sum(dim=0)
    root = target.likelihood.hessian_root(p.T)
    gram = torch.einsum("kmn,kln->nml", root, root)  # of pairs of different signs: A_mm A_ll + A_ml^2 each
    sizes = gram.diagonal(dim1=1, dim2=2)
    pairs = sizes.unsqueeze(1) * sizes.unsqueeze(2) + gram.square()
    expected = pairs.sum() - pairs.diagonal(dim1=1, dim2=2).sum()
    errors = []
    for seed in range(100):
        columns = network_sums.Columns(target, num_drawn=1, seed=seed).of(logits, slice(None))
        errors.append(sum(one.T @ one for one, _ in columns) - exact)
    squares = torch.stack([error.square().sum() for error in errors])
    assert float(squares.mean()) == pytest.approx(float(expected), abs=4 * float(squares.std()) / 10)
    relative = float(squares.mean().sqrt() / exact.norm())
    assert relative == pytest.approx(3 * N**-0.5, rel=0.2)  # as `ENOUGH` has it


def test_few_examples_have_more_random_columns() -> None:
    target = make("mlp", 10)
    told = target.curvature("kron").metrics(ggn(target, target.layout.trained(), "kron"))  # type: ignore[attr-defined]
    assert told["columns_drawn"] == network_sums.MOST_DRAWN > 1
    many = replace(target, inputs=target.inputs.repeat(100, 1), labels=target.labels.repeat(100))
    assert network_sums.num_drawn(many) == 1


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
