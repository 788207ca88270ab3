"""The target of a whole network: against autograd, and against the last layer's where that is all that is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.errors import Interrupted, UsageError
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators.mc import Mc
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork, activation_bytes, choose_parameters
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.structures.network_sums import Columns, diagonal_of
from bnncli.system import signals
from bnncli.targets.curvature_choice import FISHER, GGN, HESSIAN, CurvatureChoice
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget

K, N = 3, 40
PRIOR = Prior(2.0, 0.5)


def make_module(seed: int = 0, outputs: int = K) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(12, outputs),
        )  # fmt: skip
        for value in (module[1].running_mean, module[1].running_var):
            value.uniform_(0.5, 1.5)
    return module.eval()


def make_target(
    pattern: str = "all", outputs: int = K, dtype: torch.dtype = torch.float64, **choices: object
) -> NetworkTarget:
    network = ModuleNetwork(make_module(outputs=outputs))
    inputs = torch.randn(N, 1, 6, 6, generator=seeded(1), dtype=dtype)
    layout = ModuleLayout.of(network, pattern, num_outputs=outputs, input_shape=(1, 6, 6))
    labels = torch.randint(0, max(2, outputs), (N,), generator=seeded(2))
    return NetworkTarget(inputs, labels, layout, PRIOR)


def make_label_target() -> NetworkTarget:
    """Several labels an example, each there or not."""
    plain = make_target()
    layout = replace(plain.layout, likelihood_name="multilabel")
    labels = torch.randint(0, 2, (N, K), generator=seeded(4), dtype=torch.uint8)
    return NetworkTarget(plain.inputs, labels, layout, PRIOR)


def around(target: NetworkTarget, count: int = 4) -> Tensor:
    center = target.layout.trained()
    return center + 0.1 * torch.randn(count, len(center), generator=seeded(3), dtype=torch.float64)


def brute_log_joint(target: NetworkTarget, theta: Tensor) -> Tensor:
    """Each parameter put into a copy of the module, in float64."""
    module = make_module(outputs=target.layout.num_outputs).double()
    params = dict(module.named_parameters())
    value = torch.zeros((), dtype=torch.float64)
    for part in target.layout.parts:
        one = theta[part.place].view(part.shape)
        precision = 0.5 if part.name.endswith("bias") else 2.0
        value = value + torch.distributions.Normal(0, precision**-0.5).log_prob(one).sum()
        params[part.name] = one
    logits = torch.func.functional_call(module, params, target.inputs.double())
    if logits.shape[1] == 1:
        return value + torch.distributions.Bernoulli(logits=logits[:, 0]).log_prob(target.labels.double()).sum()
    return value + logits.log_softmax(1)[torch.arange(N), target.labels].sum()


@pytest.mark.parametrize("outputs", [K, 1])
@pytest.mark.parametrize("pattern", ["all", "0+6.bias", "*.weight"])
def test_value_and_gradient_are_autograds(pattern: str, outputs: int) -> None:
    target = make_target(pattern, outputs)
    theta = around(target)
    value, gradient = target.log_joint_and_grad(theta)
    for one, expected, slope in zip(theta, value, gradient, strict=True):
        leaf = one.clone().requires_grad_()
        brute = brute_log_joint(target, leaf)
        torch.testing.assert_close(expected, brute.detach())
        torch.testing.assert_close(slope, torch.autograd.grad(brute, leaf)[0])
    torch.testing.assert_close(target.log_joint(theta), value)


def test_float32_is_near_and_its_sums_are_float64() -> None:
    single, double = make_target(dtype=torch.float32), make_target()
    theta = around(double)
    value, gradient = single.log_joint_and_grad(theta)
    assert value.dtype == gradient.dtype == torch.float64
    expected = NetworkTarget(single.inputs.double(), single.labels, double.layout, PRIOR).log_joint_and_grad(theta)
    torch.testing.assert_close(value, expected[0], rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(single.log_joint_and_grad(theta, dtype=torch.float64)[0], expected[0])


@pytest.mark.parametrize("bytes_at_once", [1, 4096])
def test_blocks_of_examples_and_draws_change_nothing(bytes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_target()
    theta = around(whole)
    expected = whole.log_joint_and_grad(theta), whole.hessian_operator(theta[0])(theta[1:3])
    monkeypatch.setattr("bnncli.targets.network._MOST_BYTES", {"cpu": bytes_at_once})
    blocks = make_target()
    assert blocks.rows_at_once(1, torch.float64) < N
    torch.testing.assert_close(blocks.log_joint_and_grad(theta), expected[0])
    torch.testing.assert_close(blocks.hessian_operator(theta[0])(theta[1:3]), expected[1])


def test_the_last_layer_alone_is_the_last_layer_target() -> None:
    target = make_target("6")
    module = make_module().double()
    features = module[:6](target.inputs)
    last = LastLayerTarget(features.detach(), target.labels, HeadLayout(K, 12), PRIOR)
    theta = around(target)
    torch.testing.assert_close(target.log_joint_and_grad(theta), last.log_joint_and_grad(theta), rtol=1e-10, atol=1e-10)
    vectors = around(target, 3)
    torch.testing.assert_close(target.hessian_operator(theta[0])(vectors), last.hessian_operator(theta[0])(vectors))


@pytest.mark.parametrize("outputs", [K, 1])
def test_the_operator_is_the_gauss_newton_matrix(outputs: int) -> None:
    target = make_target(outputs=outputs)
    theta = around(target, 1)[0]
    jacobian = torch.autograd.functional.jacobian(lambda one: target.layout.logits(target.inputs, one[None])[0], theta)
    logits = target.layout.logits(target.inputs, theta[None])[0]
    probs = logits.softmax(1) if outputs > 1 else logits.sigmoid()
    middle = probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)
    matrix = torch.einsum("nkp,nkl,nlq->pq", jacobian, middle, jacobian)
    matrix = matrix + PRIOR.diagonal(target.layout).diag()
    vectors = around(target, 2)
    torch.testing.assert_close(target.hessian_operator(theta)(vectors), vectors @ matrix)
    torch.testing.assert_close(target.layout.jacobian(target.inputs, theta), jacobian)


def test_minibatches_are_without_bias() -> None:
    target = make_target()
    theta = around(target, 2)
    parts = [target.minibatch(*target.examples(torch.arange(start, start + 10))) for start in range(0, N, 10)]
    averaged = torch.stack([part.log_joint_and_grad(theta)[1] for part in parts]).mean(0)
    torch.testing.assert_close(averaged, target.log_joint_and_grad(theta)[1])


def test_a_likelihood_counted_twice_is_that_of_the_data_twice() -> None:
    plain, theta = make_target(), around(make_target(), 2)
    scaled = replace(plain, likelihood_scale=2.0)
    twice = replace(plain, inputs=plain.inputs.repeat(2, 1, 1, 1), labels=plain.labels.repeat(2))
    near = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    near(scaled.log_joint_and_grad(theta), twice.log_joint_and_grad(theta))
    near(scaled.log_joint(theta), twice.log_joint(theta))
    near(scaled.hessian_operator(theta[0])(theta), twice.hessian_operator(theta[0])(theta))
    near(scaled.second_derivatives(theta[0])(theta), twice.second_derivatives(theta[0])(theta))
    for structure, choice in (("full", GGN), ("diag", GGN), ("diag", FISHER), ("full", HESSIAN)):
        of_both = [one.with_choice(CurvatureChoice(choice)) for one in (scaled, twice)]
        near(*(ggn(one, theta[0], structure) for one in of_both))
    every = scaled.minibatch(*scaled.examples(torch.arange(N)))
    near(every.log_joint_and_grad(theta), scaled.log_joint_and_grad(theta))


def test_several_labels_are_as_many_likelihoods() -> None:
    target = make_label_target()
    theta, labels = around(target, 2), target.labels.double()

    def log_joint(one: Tensor) -> Tensor:
        logits = target.layout.logits(target.inputs, one[None])[0]
        ours = -torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return ours + PRIOR.log_density(one[None], target.layout)[0]

    value, gradient = target.log_joint_and_grad(theta)
    torch.testing.assert_close(value, torch.stack([log_joint(one) for one in theta]))
    torch.testing.assert_close(gradient[0], torch.autograd.functional.jacobian(log_joint, theta[0]))
    probs = target.layout.logits(target.inputs, theta[:1])[0].sigmoid()
    rows = target.layout.jacobian(target.inputs, theta[0])
    expected = torch.einsum("nk,nkp,nkq->pq", probs * (1 - probs), rows, rows)
    torch.testing.assert_close(ggn(target, theta[0], "full")["hessian.full"], expected)
    exact = ggn(target.with_choice(CurvatureChoice(HESSIAN)), theta[0], "full")["hessian.full"]
    prior = PRIOR.diagonal(target.layout).diag()
    torch.testing.assert_close(exact + prior, -torch.autograd.functional.hessian(log_joint, theta[0]))


def test_held_out_labels_have_their_own_probabilities() -> None:
    target = make_label_target()
    theta, held = around(target), target.held_out(target.inputs, target.labels)
    probs = target.layout.logits(target.inputs, theta).sigmoid()
    right = torch.where(target.labels != 0, probs, 1 - probs)
    torch.testing.assert_close(held.log_probabilities(theta), right.log().sum(dim=2))
    torch.testing.assert_close(held.losses(theta), -right.mean(dim=0).log().mean(dim=1))
    logits = target.layout.logits(target.inputs, theta).permute(2, 0, 1)
    places = iter(range(N))  # blocks come in order

    def drawn(inputs: Tensor) -> list[Tensor]:
        some = logits[:, :, [next(places) for _ in range(len(inputs))]]
        return [some, torch.zeros_like(some)]

    found = held.losses_of(drawn, num_draws=4, width=10**6)
    torch.testing.assert_close(found[0], held.losses(theta))
    torch.testing.assert_close(found[1], torch.full_like(found[1], math.log(2)))


def test_held_out_losses_are_of_the_average_probability() -> None:
    target = make_target()
    inputs = torch.randn(7, 1, 6, 6, generator=seeded(5), dtype=torch.float64)
    labels = torch.arange(7) % K
    theta = around(target)
    probs = target.layout.logits(inputs, theta).softmax(2).mean(0)[torch.arange(7), labels]
    held = target.held_out(inputs, labels)
    torch.testing.assert_close(held.losses(theta), -probs.log())
    torch.testing.assert_close(held.log_probabilities(theta).exp().mean(dim=0), probs)
    scaled = replace(target, likelihood_scale=3.0)
    torch.testing.assert_close(scaled.held_out(inputs, labels).log_probabilities(theta), held.log_probabilities(theta))


def test_a_pattern_that_names_nothing_lists_the_names() -> None:
    with pytest.raises(UsageError, match=r"'fc\.\*' matches none of '0\.weight'"):
        make_target("fc.*")


def test_a_weight_that_modules_share_is_named_by_each_of_them() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    assert list(choose_parameters(module, "2.weight")) == ["0.weight"]
    assert list(choose_parameters(module, "2")) == ["0.weight", "2.bias"]
    assert list(choose_parameters(module, "all")) == ["0.weight", "0.bias", "2.bias"]


def test_the_layout_is_read_as_it_was_written() -> None:
    layout = make_target("0").layout
    again = ModuleLayout.from_meta(layout.to_meta())
    assert again == layout
    assert again.network is None
    network = layout.network
    assert network is not None
    bound = again.bound_to(network)
    assert torch.equal(bound.trained(), layout.trained())
    assert torch.equal(bound.join(bound.split(bound.trained())), bound.trained())
    with pytest.raises(ValueError, match=r"no parameters '0\.weight'"):
        again.bound_to(ModuleNetwork(nn.Sequential(nn.Linear(2, 3))))


def test_packed_inputs_are_arguments_by_name() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, K)

        def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
            weights = mask.unsqueeze(2).to(self.out.weight)
            return {"logits": self.out((self.embed(ids) * weights).sum(1))}

    module = Text().eval()
    network = ModuleNetwork(module, lambda run: run()["logits"], ("ids", "mask"), takes_tokens=True)
    inputs = torch.randint(0, 2, (6, 2, 3), generator=seeded(0))
    layout = ModuleLayout.of(network, num_outputs=K, input_shape=(2, 3))
    theta = layout.trained().float()
    expected = module(ids=inputs[:, 0], mask=inputs[:, 1])["logits"]
    torch.testing.assert_close(layout.logits(inputs, theta[None])[0], expected)
    flat = inputs.flatten(1).float()  # as splits have them
    torch.testing.assert_close(layout.logits(flat, torch.stack([theta, theta]))[1], expected)
    assert layout.takes_any_length


def test_activations_are_measured_per_example() -> None:
    module = nn.Sequential(nn.Linear(10, 100), nn.Tanh(), nn.Linear(100, K)).eval()
    measured = activation_bytes(ModuleNetwork(module), (10,))
    assert measured == 4 * (10 + 100 + K)  # the input, what tanh gives, the logits


@pytest.mark.parametrize("structure", registry.names("network_curvature"))
def test_a_signal_ends_work_on_a_network_between_blocks(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    theta = around(target, 2)
    gaussian = fit_gaussian(target, start=theta[0], structure=structure, center="checkpoint").gaussian
    monkeypatch.setattr(signals, "_received", [15])
    for work in (
        lambda: target.log_joint(theta),
        lambda: target.log_joint_and_grad(theta),
        lambda: target.hessian_operator(theta[0])(theta),
        lambda: target.held_out(target.inputs, target.labels).losses(theta),
        lambda: target.curvature(structure).hessian(target, theta[0]),
        lambda: diagonal_of(target, theta[0], target.layout.parts, Columns(target, num_drawn=1, seed=0)),
        lambda: gaussian.logit_root(target.inputs),
        lambda: Mc().prepare(gaussian, num_samples=2, generator=seeded(0)).predict(gaussian, target.inputs.flatten(1)),
    ):
        with pytest.raises(Interrupted, match="SIGTERM"):
            work()


@pytest.mark.parametrize("name", ["log_joint", "log_joint_and_grad", "products", "second derivatives", "H", "losses"])
def test_a_gpu_without_memory_for_a_block_gets_smaller_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(target: NetworkTarget) -> Tensor:
        theta = around(target, 2)
        works: dict[str, Callable[[], Tensor]] = {
            "log_joint": lambda: target.log_joint(theta),
            "log_joint_and_grad": lambda: target.log_joint_and_grad(theta)[1],
            "products": lambda: target.hessian_operator(theta[0])(theta),
            "second derivatives": lambda: target.second_derivatives(theta[0])(theta),
            "H": lambda: ggn(target, theta[0], "full")["hessian.full"],
            "losses": lambda: target.held_out(target.inputs, target.labels).losses(theta),
        }
        return works[name]()

    expected, most, plain = work(make_target()), [5], ModuleLayout.logits

    def refuse(self: ModuleLayout, features: Tensor, theta: Tensor) -> Tensor:
        if len(features) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, features, theta)

    monkeypatch.setattr(ModuleLayout, "logits", refuse)
    torch.testing.assert_close(work(make_target()), expected, rtol=1e-9, atol=1e-9)
    most[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        work(make_target())


def test_draws_go_through_convolutions_a_few_at_once_and_each_has_its_own_logits() -> None:
    network = ModuleNetwork(make_module())
    layout = ModuleLayout.of(network, num_outputs=K, input_shape=(1, 6, 6))
    theta = layout.trained() + 0.1 * torch.randn(7, layout.num_params, generator=seeded(1), dtype=torch.float64)
    inputs = torch.randn(100, 1, 6, 6, generator=seeded(2), dtype=torch.float64)
    assert network.draws_at_once(len(inputs), theta.device) == 2
    leaf = theta.clone().requires_grad_()
    together = layout.logits(inputs, leaf)
    alone = torch.cat([layout.logits(inputs, leaf[draw : draw + 1]) for draw in range(7)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    found, expected = (torch.autograd.grad(one.logsumexp(2).sum(), leaf)[0] for one in (together, alone))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_draws_go_together_where_nothing_convolves_or_the_device_is_no_cpu() -> None:
    linear = ModuleNetwork(nn.Sequential(nn.Flatten(), nn.Linear(36, K)).eval())
    assert linear.draws_at_once(100, torch.device("cpu")) is None
    network = ModuleNetwork(make_module())
    assert network.draws_at_once(100, torch.device("cuda")) is None
    assert network.draws_at_once(1000, torch.device("cpu")) == 1
    assert network.draws_at_once(0, torch.device("cpu")) == 256
