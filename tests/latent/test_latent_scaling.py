"""Inputs of a latent binary fit: scaled by moments that NumPy gives too, wherever they lie."""

import numpy as np
import pytest
import torch
from problems.seeds import seeded

from bnncli.latent import fit
from bnncli.latent.factors import initial_factors, initial_model, num_params
from bnncli.latent.fit import Inputs, Plan, Scaling, fit_latent, nll_of_repeats
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.targets.blocks import FeatureBlocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("block_bytes", [8, 8 * 3 * 7, 2**26])
def test_moments_are_those_of_numpy_however_large_the_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(fit, "_BLOCK_BYTES", block_bytes)
    features = torch.randn(40, 3, generator=seeded(0)) * torch.tensor([1.0, 30.0, 0.01]) + 1000
    found = Scaling.of(features, CPU)
    doubled = features.double().numpy()
    np.testing.assert_allclose(found.shift.numpy(), doubled.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.scale.numpy(), doubled.std(axis=0), rtol=1e-6)


def test_a_column_that_never_varies_is_only_shifted() -> None:
    features = torch.full((7919, 2), 0.1)
    features[::2, 1] = 0.3
    found = Scaling.of(features, CPU)
    assert found.scale[0] == 1
    assert found(features).abs()[:, 0].max() < 1e-6


def test_a_column_that_varies_by_less_than_float32_resolves_does_not_blow_up() -> None:
    features = torch.zeros(700, 2)
    features[0] = torch.tensor([1e-42, 1e-44])
    found = Scaling.of(features, CPU)
    assert found.scale.tolist() == [1, 1]
    assert bool(found(features).isfinite().all())


def test_a_posterior_of_scaled_inputs_is_one_for_inputs_as_they_are() -> None:
    features = 100 + 3 * torch.randn(50, 6, generator=seeded(2))
    features[:, 4] = 250.5
    own, model = Scaling.of(features, CPU), _start()
    posterior = LatentBinary(model, shift=own.shift, scale=own.scale)
    theta = model.layout.join(*model.draw_weights(torch.arange(4) % 2, seeded(7)))
    found = posterior.layout.logits(features, posterior.sample(4, seeded(7)))
    torch.testing.assert_close(found, model.layout.logits(own(features), theta), rtol=1e-4, atol=1e-4)


def _start() -> LatentModel:
    layout = NetworkLayout((6, 5, 3))
    return LatentModel(layout, initial_factors(layout, 2, seeded(1)), SpikeAndSlab.constant(2))


def test_a_fit_scales_its_batches_as_if_they_had_been_scaled_before() -> None:
    features = 3 + 2 * torch.randn(50, 6, generator=seeded(2))
    labels = torch.randint(0, 3, (50,), generator=seeded(3))
    own, plan = Scaling.of(features, CPU), Plan(epochs=2, batch_size=20, learning_rate=0.01)
    one, _ = fit_latent(_start(), features, labels, plan, generator=seeded(4), scaling=own)
    other, _ = fit_latent(_start(), own(features), labels, plan, generator=seeded(4))
    plain, _ = fit_latent(_start(), features, labels, plan, generator=seeded(4))
    assert torch.equal(one.factors.mean, other.factors.mean)
    assert not torch.equal(one.factors.mean, plain.factors.mean)
    losses = [nll_of_repeats(one, features, labels, seeded(5), scaling=own)]
    losses.append(nll_of_repeats(one, own(features), labels, seeded(5)))
    assert torch.equal(*losses)


@pytest.mark.parametrize("rows", [slice(1, 4), torch.tensor([3, 0, 2])], ids=["slice", "index"])
def test_rows_are_taken_in_single_precision(rows: slice | torch.Tensor) -> None:
    features = torch.randn(5, 2, generator=seeded(6)).half()
    own = Scaling(torch.ones(2), torch.full((2,), 2.0))
    found = Inputs(FeatureBlocks(features, CPU), own).gather(rows)
    assert found.dtype == torch.float32
    assert torch.equal(found, (features[rows].float() - 1) / 2)


def test_the_nll_of_blocks_is_that_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(50, 6, generator=seeded(2))
    labels = torch.randint(0, 3, (50,), generator=seeded(3))
    whole = nll_of_repeats(_start(), features, labels, seeded(5))
    monkeypatch.setattr(fit, "_ROWS", {"cpu": 7, "cuda": 7})
    torch.testing.assert_close(nll_of_repeats(_start(), features, labels, seeded(5)), whole)


@pytest.mark.parametrize("hidden", [(4,), (7, 3)])
def test_the_parameters_of_a_multiplier_are_counted(hidden: tuple[int, ...]) -> None:
    model = initial_model(9, 1, seeded(0), length=3, hidden=hidden)
    assert num_params(9, length=3, hidden=hidden) == sum(part.numel() for part in model.parameters())
