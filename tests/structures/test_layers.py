"""Curvatures of several layers against the full Gauss-Newton matrix, and their covariances against dense inverses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pretend_cuda
import pytest
import torch
from problems.seeds import normal, seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork, module_places
from bnncli.parameters.prior import Prior
from bnncli.structures import Covariance, diag, ggn, network_sums
from bnncli.structures.directions import Subspace
from bnncli.structures.kron import FactorSum, InEigenbasis, LayerFactors
from bnncli.structures.kron import LastLayerKron as HeadKron
from bnncli.structures.network_sums import Matrix, find_checked, matrices_of, scales_of
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget

K = 3
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERED = ("block", "ekfac", "kron")
every_layered = pytest.mark.parametrize("structure", LAYERED)
RANKED = [*((one, None) for one in LAYERED), ("ekfac", 1), ("kron", 1), ("kron", 2)]
every_ranked = pytest.mark.parametrize(("structure", "rank"), RANKED)


class Twice(nn.Module):
    """One linear layer used twice, one whose weight another reads, a bare parameter and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, K)
        self.read, self.norm, self.scale = nn.Linear(4, 4), nn.LayerNorm(4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(self.again(self.first(x).tanh()).tanh())
        hidden = self.read(hidden) + hidden @ self.read.weight
        return self.last(self.norm(hidden) * self.scale)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, K)), (5,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(2, 4, (3, 1), padding="same", dilation=(2, 1), bias=False), nn.BatchNorm2d(4), nn.Tanh(),
            nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(36, K),
        ),
        (1, 5, 5),
    ),
    "sound": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(3, 4, 2, dilation=2), nn.Flatten(), nn.Linear(8, K)
        ),
        (2, 7),
    ),
    "volume": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 3, (2, 1, 3), stride=(1, 2, 1), padding=(0, 0, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(24, K)
        ),
        (1, 3, 4, 2),
    ),
    "sequence": (lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2), nn.Flatten(), nn.Linear(6, K)), (3, 2)),
    "twice": (Twice, (5,)),
}  # fmt: skip


def make_target(
    name: str = "mlp",
    pattern: str = "all",
    num_examples: int = 12,
    prior: Prior | None = None,
    rank: int | None = None,
) -> NetworkTarget:
    build, shape = MODULES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ModuleNetwork(build().eval())
    inputs = torch.randn(num_examples, *shape, generator=seeded(1), dtype=torch.float64)
    layout = ModuleLayout.of(network, pattern, num_outputs=K, input_shape=shape)
    labels = torch.randint(0, K, (num_examples,), generator=seeded(2))
    choice = CurvatureChoice(rank=rank)
    return NetworkTarget(inputs, labels, layout, prior or Prior(2.0), choice=choice)


def at(target: NetworkTarget) -> Tensor:
    center = target.layout.trained()
    return center + 0.3 * torch.randn(len(center), generator=seeded(3), dtype=torch.float64).to(center.device)


def matrices_in(target: NetworkTarget) -> list[Matrix]:
    found = find_checked(target.layout, at(target), target.inputs, matrices_of(target.layout))
    return [one for one in found if isinstance(one, Matrix)]


def hessian_of(target: NetworkTarget, structure: str) -> dict[str, Tensor]:
    return ggn(target, at(target), structure)


def covariance_of(target: NetworkTarget, structure: str) -> Covariance:
    kind = registry.load_class("covariances", structure)
    made: Covariance = kind.from_hessian(hessian_of(target, structure), target.prior, target.layout)
    return made


def dense(target: NetworkTarget, parts: dict[str, Tensor], structure: str) -> Tensor:
    """(P, P) of a Hessian's parts, written out in theta's order."""
    layout = target.layout
    total, taken = torch.zeros(layout.num_params, layout.num_params, dtype=torch.float64), 0
    if structure == "block":
        for module, place in module_places(layout).items():
            total[place, place] = parts[f"hessian.block.{module}"]
        return total
    index = 0
    while index < len(layout.parts):
        part = layout.parts[index]
        prefix = f"hessian.{structure}.{part.name}"
        index += 1
        if f"{prefix}.values" not in parts:
            size = math.prod(part.shape)
            total[part.place, part.place] = parts[f"hessian.{structure}.rest"][taken : taken + size].diag()
            taken += size
            continue
        values, outputs, features = (parts[f"{prefix}.{name}"] for name in ("values", "outputs", "features"))
        values = completed_values(completed_values(values, features).T, outputs).T
        basis = torch.kron(completed(outputs), completed(features))
        columns = torch.arange(part.offset, part.place.stop).view(part.shape[0], -1)
        if len(features) > columns.shape[1]:
            bias = layout.parts[index]
            columns = torch.cat([columns, torch.arange(bias.offset, bias.place.stop).unsqueeze(1)], dim=1)
            index += 1
        own = columns.flatten()
        total[own[:, None], own] = basis @ values.flatten().diag() @ basis.T
    return total


def completed(basis: Tensor) -> Tensor:
    """Orthonormal columns (F, k) and others, (F, F)."""
    beside = torch.linalg.svd(basis)[0][:, basis.shape[1] :]
    return torch.cat([basis, beside], dim=1)


def completed_values(values: Tensor, basis: Tensor) -> Tensor:
    """Values (n, k + 1) along a basis (F, k), the last for each of the others, (n, F)."""
    size, rank = basis.shape
    return torch.cat([values[:, :rank], values[:, rank:].expand(-1, size - rank)], dim=1)


class ChannelsFirst(nn.LayerNorm):
    """Of (n, C, ...), as those of ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Padding(nn.Conv2d):
    """Its inputs are larger than it is given, as those of EfficientNet."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


def test_modules_that_compute_otherwise_than_torchs_keep_their_exact_diagonal() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(Padding(1, 2, 2, stride=2), ChannelsFirst(2), nn.Flatten(), nn.Linear(18, K)).eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=K, input_shape=(1, 5, 5))
    inputs = torch.randn(6, 1, 5, 5, generator=seeded(1), dtype=torch.float64)
    target = NetworkTarget(inputs, torch.arange(6) % K, layout, Prior(2.0))
    exact = ggn(target, at(target), "full")["hessian.full"].diagonal()
    torch.testing.assert_close(ggn(target, at(target), "diag")["hessian.diag"], exact)
    assert [piece.module for piece in (*matrices_of(layout), *scales_of(layout))] == ["3"]


@pytest.mark.parametrize("name", MODULES)
def test_blocks_are_those_of_the_full_matrix(name: str) -> None:
    target = make_target(name)
    full = hessian_of(target, "full")["hessian.full"]
    for module, place in module_places(target.layout).items():
        block = hessian_of(target, "block")[f"hessian.block.{module}"]
        torch.testing.assert_close(block, full[place, place])


def test_kron_of_one_example_without_positions_is_the_block() -> None:
    target = make_target(num_examples=1)
    found, blocks = (dense(target, hessian_of(target, name), name) for name in ("kron", "block"))
    torch.testing.assert_close(found, blocks)


@pytest.mark.parametrize("name", MODULES)
def test_kron_of_the_last_layer_is_the_last_layers(name: str) -> None:
    target = make_target(name)
    module = target.layout.network.module  # type: ignore[union-attr]
    last = [key for key, one in module.named_modules() if isinstance(one, nn.Linear)][-1 if name != "twice" else 2]
    own = make_target(name, f"{last}")
    features: list[Tensor] = []
    handle = dict(own.layout.network.module.named_modules())[last].register_forward_hook(  # type: ignore[union-attr]
        lambda module, args, output: features.append(args[0].detach())
    )
    theta = own.layout.trained()
    own.layout.logits(own.inputs, theta.unsqueeze(0))
    handle.remove()
    head = HeadLayout(K, features[0].shape[1])
    expected = ggn(LastLayerTarget(features[0], own.labels, head, own.prior), theta, "kron")
    parts = ggn(own, theta, "kron")
    found = dense(own, parts, "kron")
    product = torch.kron(expected["hessian.kron.B"], expected["hessian.kron.A"])
    order = head.places(torch.device("cpu")).flatten()
    torch.testing.assert_close(found[order[:, None], order], product)
    assert HeadKron.num_elements(head) > 0


def naive_factors(target: NetworkTarget, module_name: str) -> tuple[Tensor, Tensor]:
    """Mean of x x^T and sum of g g^T over examples and positions of one layer, an example and a column at a time."""
    layout, theta = target.layout, at(target)
    module = dict(layout.network.module.named_modules())[module_name]  # type: ignore[union-attr]
    rows, slopes = [], []
    for x in target.inputs:
        calls: list[tuple[Tensor, Tensor]] = []

        def note(module: nn.Module, args: tuple[Tensor], output: Tensor, calls: list = calls) -> Tensor:  # type: ignore[type-arg]
            output = output.detach().requires_grad_() if not calls else output
            calls.append((args[0].detach(), output))
            return output.clone()

        handle = module.register_forward_hook(note)
        logits = layout.logits(x.unsqueeze(0), theta.unsqueeze(0))[0]
        handle.remove()
        p = logits.detach().softmax(1)[0]
        for k in range(K):
            column = p[k].sqrt() * (torch.eye(K, dtype=p.dtype)[k] - p)
            for _, output in calls:
                (g,) = torch.autograd.grad(logits[0] @ column, output, retain_graph=True)
                slopes.append(g[0].flatten(1).T if isinstance(module, CONVOLUTIONS) else g.reshape(-1, g.shape[-1]))
        for inputs, _ in calls:
            if isinstance(module, CONVOLUTIONS):
                rows.append(patches(module, inputs[0]))
            else:
                rows.append(inputs.reshape(-1, inputs.shape[-1]))
    a = torch.cat(rows)
    if module.bias is not None:
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    g = torch.cat(slopes)
    return a.T @ a / len(a), g.T @ g


def patches(module: nn.Module, image: Tensor) -> Tensor:
    """(T, D): what a convolution multiplies at each position, cut out one by one."""
    assert isinstance(module, CONVOLUTIONS)
    padded = torch.nn.functional.pad(image, module._reversed_padding_repeated_twice)
    sizes = zip(module.dilation, module.kernel_size, strict=True)
    reach = [rate * (size - 1) + 1 for rate, size in sizes]
    steps = zip(padded.shape[1:], reach, module.stride, strict=True)
    starts = itertools.product(*(range(0, size - far + 1, step) for size, far, step in steps))
    cuts = [
        [slice(at, at + far, rate) for at, far, rate in zip(start, reach, module.dilation, strict=True)]
        for start in starts
    ]
    return torch.stack([padded[:, *cut].flatten() for cut in cuts])


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("mlp", "0"), ("conv", "0"), ("conv", "2"), ("sound", "0"), ("sound", "2"), ("volume", "0"),
        ("sequence", "0"), ("twice", "first"),
    ],
)  # fmt: skip
def test_kron_is_the_product_of_factors_over_examples_and_positions(name: str, layer: str) -> None:
    target = make_target(name)
    parts = hessian_of(target, "kron")
    features, outputs = naive_factors(target, layer)
    values, along, across = (parts[f"hessian.kron.{layer}.weight.{key}"] for key in ("values", "outputs", "features"))
    basis = torch.kron(along, across)
    torch.testing.assert_close(basis @ values.flatten().diag() @ basis.T, torch.kron(outputs, features))


def test_a_layer_used_twice_has_its_calls_as_positions() -> None:
    target = make_target("twice")
    names = [matrix.name for matrix in matrices_in(target)]
    assert names == ["first.weight", "again.weight", "last.weight"]  # the gradient of `read` is more than its module's


def test_grouped_convolutions_norms_and_bare_parameters_have_their_diagonal() -> None:
    for name in ("conv", "twice"):
        target = make_target(name)
        parts = hessian_of(target, "kron")
        full = hessian_of(target, "full")["hessian.full"].diagonal()
        matrices = {part for one in matrices_in(target) for part in one.parts}
        rest = [full[part.place] for part in target.layout.parts if part not in matrices]
        assert rest
        torch.testing.assert_close(parts["hessian.kron.rest"], torch.cat(rest))


def test_norms_are_found_and_their_gradients_are_theirs() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4, eps=0.1), nn.GroupNorm(2, 4, eps=0.2), nn.LayerNorm((3, 2), eps=0.3), nn.LayerNorm(2, bias=False),
        nn.Flatten(), nn.Linear(24, K), nn.BatchNorm1d(K), nn.LayerNorm(K),
    )  # fmt: skip
    layout = ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=K, input_shape=(1, 4, 3))
    inputs = torch.randn(6, 1, 4, 3, generator=seeded(1), dtype=torch.float64)
    target = NetworkTarget(inputs, torch.arange(6) % K, layout, Prior(1.0))
    found = find_checked(layout, at(target), inputs, scales_of(layout))
    assert [piece.module for piece in found] == ["1", "2", "3", "4", "7", "8"]
    full = hessian_of(target, "full")["hessian.full"].diagonal()
    rest = torch.cat([full[part.place] for piece in found for part in piece.parts])
    torch.testing.assert_close(hessian_of(target, "kron")["hessian.kron.rest"], rest)


@pytest.mark.parametrize("name", MODULES)
def test_the_diagonal_is_the_full_matrixs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(name)
    monkeypatch.setitem(diag._GRADIENT_ELEMENTS, "cpu", 100)
    monkeypatch.setattr("bnncli.targets.network._MOST_BYTES", {"cpu": 8_000})
    expected = hessian_of(target, "full")["hessian.full"].diagonal()
    torch.testing.assert_close(hessian_of(make_target(name), "diag")["hessian.diag"], expected)


def test_tied_weights_have_their_diagonal() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    layout = ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=4, input_shape=(4,))
    inputs = torch.randn(6, 4, generator=seeded(1), dtype=torch.float64)
    target = NetworkTarget(inputs, torch.arange(6) % 4, layout, Prior(1.0))
    full = hessian_of(target, "full")["hessian.full"]
    torch.testing.assert_close(hessian_of(target, "kron")["hessian.kron.rest"], full.diagonal())


@pytest.mark.parametrize("bias_precision", [1e-2, 1e-6, 1e-11, 1e-13])
def test_nearly_free_biases_of_outputs_without_curvature_have_the_priors_variance(bias_precision: float) -> None:
    basis = torch.linalg.qr(torch.randn(5, 5, generator=seeded(0), dtype=torch.float64))[0]
    layout, eye = HeadLayout(2, 4), torch.eye(2, dtype=torch.float64)
    values = torch.tensor([[0.0] * 5, [3.0] * 5], dtype=torch.float64)
    covariance = InEigenbasis(values, eye, basis, 1e5, bias_precision, layout)
    variances = covariance.unwhiten(torch.eye(10, dtype=torch.float64)).square().sum(dim=0)
    precisions = Prior(1e5, bias_precision).diagonal(layout)
    expected = 1 / (precisions + layout.flatten(values.unsqueeze(0))[0])
    torch.testing.assert_close(variances, expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(covariance.log_det_scale(), float(expected.log().sum() / 2))


@pytest.mark.parametrize("prior", [Prior(2.0), Prior(2.0, 0.3), Prior(0.5, 4.0)], ids=str)
@every_ranked
def test_the_root_squares_to_the_inverse_precision(structure: str, rank: int | None, prior: Prior) -> None:
    target = make_target("conv", prior=prior, rank=rank)
    parts = hessian_of(target, structure)
    sigma = covariance_of(target, structure)
    precision = dense(target, parts, structure) + prior.diagonal(target.layout).diag()
    root = sigma.unwhiten(torch.eye(target.layout.num_params)).T
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(precision), rtol=1e-9, atol=1e-11)
    assert sigma.log_det_scale() == pytest.approx(-0.5 * float(torch.linalg.slogdet(precision)[1]), rel=1e-10)


@pytest.mark.parametrize("prior", [Prior(2.0), Prior(2.0, 0.3)], ids=str)
@every_ranked
def test_whitening_pulling_back_and_storage_belong_to_the_root(structure: str, rank: int | None, prior: Prior) -> None:
    target = make_target("twice", prior=prior, rank=rank)
    sigma = covariance_of(target, structure)
    z = torch.randn(3, target.layout.num_params, generator=seeded(4), dtype=torch.float64)
    root = sigma.unwhiten(torch.eye(target.layout.num_params)).T
    torch.testing.assert_close(sigma.whiten(sigma.unwhiten(z)), z)
    torch.testing.assert_close(sigma.pull_back(z), z @ root)
    again = type(sigma).from_tensors(sigma.to_tensors(), ModuleLayout.from_meta(target.layout.to_meta()))  # type: ignore[attr-defined]
    assert torch.equal(again.unwhiten(z), sigma.unwhiten(z))
    single = sigma.to(dtype=torch.float32)
    assert single.unwhiten(z).dtype == torch.float32
    torch.testing.assert_close(single.unwhiten(z).double(), sigma.unwhiten(z), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("name", MODULES)
def test_ekfac_is_the_blocks_diagonal_in_the_factors_eigenbasis(name: str, rank: int | None) -> None:
    target = make_target(name, rank=rank)
    parts = hessian_of(target, "ekfac")
    full = hessian_of(target, "full")["hessian.full"]
    for matrix in matrices_in(target):
        values, outputs, features = (
            parts[f"hessian.ekfac.{matrix.name}.{key}"] for key in ("values", "outputs", "features")
        )
        own = in_matrix_order(matrix)
        basis = torch.kron(completed(outputs), completed(features))
        expected = (basis.T @ full[own[:, None], own] @ basis).diagonal().view(matrix.num_outputs, -1)
        expected = with_mean_of_rest(with_mean_of_rest(expected, features).T, outputs).T
        torch.testing.assert_close(values, expected)
    kron = hessian_of(target, "kron")
    if "hessian.kron.rest" in kron:
        torch.testing.assert_close(parts["hessian.ekfac.rest"], kron["hessian.kron.rest"])


def with_mean_of_rest(values: Tensor, basis: Tensor) -> Tensor:
    """Values (n, F) along a completed basis (F, k), with the mean of those that completed it, (n, k + 1)."""
    size, rank = basis.shape
    return values if size == rank else torch.cat([values[:, :rank], values[:, rank:].mean(dim=1, keepdim=True)], dim=1)


def in_matrix_order(matrix: Matrix) -> Tensor:
    """Where the entries of (K, F) lie in theta, row by row."""
    places = [torch.arange(part.place.start, part.place.stop).view(matrix.num_outputs, -1) for part in matrix.parts]
    return torch.cat(places, dim=1).flatten()


def test_curvatures_are_of_other_random_columns_than_their_basis() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(3, 6).eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=6, input_shape=(3,))
    target = NetworkTarget(torch.ones(1, 3, dtype=torch.float64), torch.tensor([0]), layout, Prior(1.0))
    found = ggn(target, layout.trained(), "ekfac")
    values = found["hessian.ekfac.weight.values"][:, -1]  # along the one input, of outputs from the least to the most
    assert int(found["hessian.ekfac.drawn"]) == 2
    assert float(values[:-2].sum()) > 1e-3 * float(values.sum()), "those two columns alone have nothing there"


def test_random_columns_are_unbiased_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("conv")
    exact = dense(target, hessian_of(target, "kron"), "kron")
    monkeypatch.setattr(network_sums, "MOST_EXACT", 0)
    first, again = hessian_of(target, "ekfac"), hessian_of(target, "ekfac")
    assert all(torch.equal(first[name], again[name]) for name in first)
    monkeypatch.setattr(network_sums, "MOST_DRAWN", 60)
    drawn = dense(target, hessian_of(target, "kron"), "kron")
    assert 1e-4 < float((drawn - exact).norm() / exact.norm()) < 0.1  # 60 signs of 12 examples


@pytest.mark.parametrize("name", [None, "multilabel"])
def test_outer_products_of_random_columns_average_to_the_hessian(name: str | None) -> None:
    layout = ModuleLayout.of(ModuleNetwork(nn.Linear(1, 4)), num_outputs=4, input_shape=(1,), likelihood_name=name)
    logits = torch.tensor([3.0, 0.0, -1.0, 0.5], dtype=torch.float64).repeat(20_000, 1)
    labels = torch.zeros((len(logits), 4) if name else len(logits), dtype=torch.long)
    target = NetworkTarget(logits[:, :1], labels, layout, Prior(1.0))
    every, drawn = (list(network_sums.Columns(target, num_drawn=s, seed=0).of(logits, slice(None))) for s in (0, 2))
    assert [is_last for _, is_last in drawn] == [False, True]
    expected, found = (sum(one.T @ one for one, _ in columns) / len(logits) for columns in (every, drawn))
    # A product of two entries has a standard deviation below a half; there are two an example.
    torch.testing.assert_close(found, expected, rtol=0, atol=5 * 0.5 / (2 * len(logits)) ** 0.5)


@pytest.mark.parametrize("name", ["conv", "twice"])
def test_fisher_matrices_are_of_the_gradients_at_the_labels(name: str) -> None:
    target = make_target(name).with_choice(CurvatureChoice("fisher"))
    full = hessian_of(target, "full")["hessian.full"]
    ekfac = hessian_of(target, "ekfac")
    for module, place in module_places(target.layout).items():
        torch.testing.assert_close(hessian_of(target, "block")[f"hessian.block.{module}"], full[place, place])
    for matrix in matrices_in(target):
        own = in_matrix_order(matrix)
        basis = torch.kron(*(ekfac[f"hessian.ekfac.{matrix.name}.{key}"] for key in ("outputs", "features")))
        expected = (basis.T @ full[own[:, None], own] @ basis).diagonal()
        torch.testing.assert_close(ekfac[f"hessian.ekfac.{matrix.name}.values"].flatten(), expected)
    rest = dense(target, ekfac, "ekfac").diagonal()
    others = [part for part in target.layout.parts if not any(part in one.parts for one in matrices_in(target))]
    for part in others:
        torch.testing.assert_close(rest[part.place], full.diagonal()[part.place])


def test_what_was_drawn_and_what_has_a_diagonal_is_told() -> None:
    target = make_target("conv")
    told = target.curvature("kron").metrics(hessian_of(target, "kron"))  # type: ignore[attr-defined]
    assert told == {"columns_drawn": 0, "num_diagonal_params": 4 + 4 + 8 + 4}  # a norm, a grouped convolution


def test_blocks_of_examples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("conv")
    whole = {structure: hessian_of(target, structure) for structure in LAYERED}
    whole["ranked"] = hessian_of(make_target("conv", rank=1), "kron")
    monkeypatch.setattr("bnncli.targets.network._MOST_BYTES", {"cpu": 8_000})
    monkeypatch.setattr("bnncli.structures.network_sums._PATCHES", 100)
    target = make_target("conv")
    assert target.rows_at_once(1, torch.float64) < 6
    for name, parts in whole.items():
        own, structure = (make_target("conv", rank=1), "kron") if name == "ranked" else (target, name)
        again = hessian_of(own, structure)
        torch.testing.assert_close(dense(own, again, structure), dense(own, parts, structure))


@every_ranked
def test_on_a_gpu_it_is_made_and_kept_there(structure: str, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_sums, "MOST_EXACT", 0)
    chosen = (
        ("sequence", "all") if structure == "block" else ("conv", "0+2+3+7")
    )  # vmap's own batch norm is not seen there
    target = make_target(*chosen, rank=rank)
    expected = covariance_of(target, structure).unwhiten(torch.ones(1, target.layout.num_params))
    with pretend_cuda.pretend() as gpu:
        there = make_target(*chosen, rank=rank)
        there.layout.network.module.to(gpu.device)
        there = replace(there, labels=there.labels.to(gpu.device))
        found = covariance_of(there, structure).unwhiten(torch.ones(1, target.layout.num_params, device=gpu.device))
        assert found.device == gpu.device
        torch.testing.assert_close(found.cpu(), expected)
    assert not gpu.problems(), "\n".join(gpu.problems())


WIDE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    **{f"linear {size}": (nn.Linear(size, K), (size,)) for size in (63, 64, 65, 70)},
    "without bias": (nn.Linear(80, K, bias=False), (80,)),
    "convolution": (nn.Sequential(nn.Conv2d(8, K, 3), nn.Flatten()), (8, 3, 3)),
}


@pytest.mark.parametrize("name", WIDE)
def test_factors_of_many_inputs_are_exact_for_a_single_example(name: str) -> None:
    """H = x x^T (x) B of one example: the Kronecker product of its factors is all of J^T (diag p - p p^T) J, by autograd."""
    module, shape = WIDE[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for one in module.modules():
            if hasattr(one, "reset_parameters"):
                one.reset_parameters()
    layout = ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=K, input_shape=shape)
    target = NetworkTarget(normal(1, *shape, seed=4), torch.tensor([1]), layout, Prior(1.0))
    theta = layout.trained()
    jacobian = torch.autograd.functional.jacobian(lambda one: layout.logits(target.inputs, one[None])[0, 0], theta)
    probs = layout.logits(target.inputs, theta[None])[0, 0].softmax(0)
    expected = jacobian.T @ (probs.diag() - probs.outer(probs)) @ jacobian
    torch.testing.assert_close(dense(target, ggn(target, theta, "kron"), "kron"), expected)


def test_the_factor_of_many_inputs_is_their_mean_square() -> None:
    """Of several examples and positions, but for a factor."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(9, 2, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(72, K)
        ).eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=K, input_shape=(9, 11, 11))
    inputs = normal(5, 9, 11, 11, seed=5)
    parts = ggn(NetworkTarget(inputs, torch.arange(5) % K, layout, Prior(1.0)), layout.trained(), "kron")
    patches = nn.functional.unfold(inputs, 3, stride=2, padding=1).transpose(1, 2).reshape(-1, 81)
    hidden = module[:3].double()(inputs).detach()
    for name, rows in (("0.weight", patches), ("3.weight", hidden)):
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        basis, values = parts[f"hessian.kron.{name}.features"], parts[f"hessian.kron.{name}.values"].sum(dim=0)
        found, expected = basis @ values.diag() @ basis.T, rows.T @ rows
        torch.testing.assert_close(found / found.trace(), expected / expected.trace())


@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
def test_the_leading_eigenvectors_of_a_large_factor_are_nearly_the_best(decay: float) -> None:
    size, rank = 300, 20
    basis = torch.linalg.qr(normal(size, size, seed=1))[0]
    factor = basis @ torch.arange(1, size + 1).double().pow(-decay).diag() @ basis.T
    columns = torch.linalg.cholesky(factor)
    total = FactorSum.empty(size, rank, torch.device("cpu"))
    for some in columns.split(70, dim=1):
        total.add(some)
    values, vectors = total.eigenvectors("these")
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(rank, dtype=torch.float64))
    assert float(values @ torch.tensor([1.0] * rank + [size - rank]).double()) == pytest.approx(float(factor.trace()))
    found = completed(vectors) @ completed_values(values[None], vectors)[0].diag() @ completed(vectors).T
    exact, own = torch.linalg.eigh(factor)
    best = factor - own[:, -rank:] @ (exact[-rank:] - exact[:-rank].mean()).diag() @ own[:, -rank:].T
    best -= exact[:-rank].mean() * torch.eye(size, dtype=torch.float64)
    assert float((factor - found).norm()) < 1.5 * float(best.norm())


def test_the_sum_over_inputs_and_test_vectors_is_that_of_their_factor() -> None:
    whole, sketched = (make_target("conv", num_examples=40, rank=rank) for rank in (None, 1))
    factors = [LayerFactors.of(target, at(target)) for target in (whole, sketched)]
    for name, factor in factors[0].features.items():
        found = factors[1].features[name]
        assert found.test is not None
        torch.testing.assert_close(found.total, factor.total @ found.test)
        torch.testing.assert_close(found.trace, factor.total.trace())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_factor_of_patches_sums_over_each_position(dims: int, stride: int) -> None:
    inputs = normal(5, 3, *(9, 8, 7)[:dims], seed=8)
    for size, dilation, padding, bias in itertools.product((1, 3, (3, 2, 1)), (1, (1, 2, 1)), (0, 1), (False, True)):
        kernel, rate = (one[:dims] if isinstance(one, tuple) else one for one in (size, dilation))
        module = CONVOLUTIONS[dims - 1](3, 4, kernel, stride=stride, dilation=rate, padding=padding, bias=bias)
        use = network_sums.PatchesUse(module, bias, inputs)
        columns, (gram, count) = use.columns(), use.gram()
        assert count == columns.shape[0] * columns.shape[2]
        torch.testing.assert_close(gram, torch.einsum("nft,ngt->fg", columns, columns))


@every_layered
def test_twice_the_data_or_the_scale_is_twice_the_hessian(structure: str) -> None:
    plain = make_target("sequence")
    twice = replace(plain, inputs=plain.inputs.repeat(2, 1, 1), labels=plain.labels.repeat(2))
    once = dense(plain, hessian_of(plain, structure), structure)
    for target in (twice, replace(plain, likelihood_scale=2.0)):
        torch.testing.assert_close(dense(target, hessian_of(target, structure), structure), 2 * once)


@every_layered
@pytest.mark.parametrize("prior", [Prior(2.0), Prior(2.0, 0.1)])
def test_directions_of_several_layers_have_the_largest_variances(structure: str, prior: Prior) -> None:
    covariance = covariance_of(make_target("twice", prior=prior), structure)
    basis = Subspace.widest(covariance, 9, seeded()).basis
    torch.testing.assert_close(basis.T @ basis, torch.eye(9, dtype=torch.float64))
    root = covariance.unwhiten(torch.eye(covariance.num_params, dtype=torch.float64)).T
    moved = root @ basis
    values = torch.linalg.eigvalsh(root @ root.T).flip(0)
    torch.testing.assert_close(moved.T @ moved, values[:9].diag())
