"""Runs from features or a torch module in memory."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bnncli
from bnncli.api.run import OpenedRun
from bnncli.artifacts.files import read_header
from bnncli.errors import BnnError, DataError, UsageError

NAMES = ("train", "val", "test")


def splits_of(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: (arrays[f"features_{name}"], arrays[f"labels_{name}"]) for name in NAMES}


def test_features_in_memory_make_the_run_of_their_file(tmp_path: Path, cli: Cli) -> None:
    arrays = make_arrays()
    head, far = (arrays["head_weight"], arrays["head_bias"]), {"far": (torch.tensor(arrays["features_far"]), [-1] * 60)}
    run = bnncli.from_features(**splits_of(arrays), ood=far, head=head, folder=tmp_path / "python")
    run.fit_laplace(prior_precision=3)
    new_run(cli, tmp_path / "small", arrays, "--ood", "far")
    cli("fit-laplace", tmp_path / "small", "--prior-precision", 3).expect(0)
    for path in (
        "features/train.h5",
        "features/far.h5",
        "posteriors/map.safetensors",
        "posteriors/laplace.safetensors",
    ):
        digests = {read_header(folder / path).content_digest for folder in (run.folder, tmp_path / "small.bnn")}
        assert len(digests) == 1
    again = bnncli.open(tmp_path / "python" / "run")
    assert again.posteriors == ("map", "laplace")
    cli("predict", tmp_path / "python" / "run", "--split", "test").expect(0)


def test_a_temporary_run_is_deleted_with_what_was_made_of_it() -> None:
    run = bnncli.from_features(splits_of(make_arrays())["train"])
    run.fit_laplace(prior_precision=1)
    folder, posterior = run.folder, run.posterior("laplace")
    del run
    gc.collect()
    assert folder.is_dir()
    posterior.sample(2)
    del posterior
    gc.collect()
    assert not folder.parent.exists()


def test_a_classifier_of_scikit_learn_is_a_head() -> None:
    arrays = make_arrays()
    base = LogisticRegression().fit(arrays["features_train"], arrays["labels_train"])
    run = bnncli.from_features(**splits_of(arrays), head=base)
    found = run.predict(arrays["features_test"], posterior="map").probs
    assert np.allclose(found, base.predict_proba(arrays["features_test"]), atol=1e-6)
    base.fit(arrays["features_train"], arrays["labels_train"] + 1)
    with pytest.raises(UsageError, match=r"head: expected classes 0 to K - 1"):
        bnncli.from_features(**splits_of(arrays), head=base)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def test_a_module_gives_the_features_of_its_forward_pass() -> None:
    module, x = make_module(), torch.randn(90, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    module[3].eval()
    with torch.no_grad():
        y = module.eval()(x).argmax(1)
        features = module[:5](x).numpy()
    module.train()
    module[3].eval()
    data = TensorDataset(x, y)
    far, loader = {"far": (x[:20], y[:20] - 9)}, DataLoader(data, 33)
    run = bnncli.from_torch(module, (x.numpy(), y.tolist()), val=data, test=loader, ood=far, batch_size=40)
    assert [part.training for part in module] == [True, True, True, False, True, True]
    assert all(one.requires_grad and one.grad is None for one in module.parameters())
    for name in NAMES:
        split = run.split(name)
        assert np.allclose(split.features, features, atol=1e-6)
        assert np.array_equal(split.labels, y)
    assert run.split("far").labels is None
    run.fit_laplace(prior_precision=1, structure="kron")
    found = run.predict(x, integrator="probit").probs
    assert np.allclose(found, run.predict(features, integrator="probit").probs, atol=1e-6)
    assert np.array_equal(run.predictor("laplace", integrator="probit")(loader).probs, found)
    with pytest.raises(DataError) as caught:
        run.fit_laplace(layers="all")
    assert "layers other than the last need a checkpoint" in caught.value.__notes__[0]
    with torch.no_grad():
        module[1].weight.add_(1)
    with pytest.raises(DataError, match="the module's weights have changed since the run was made"):
        run.predict(x)


@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_module_and_its_fits_run_on_a_gpu(where: str) -> None:
    torch.manual_seed(0)
    arrays, module = make_arrays(), nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    data = {name: (arrays[f"features_{name}"], arrays[f"labels_{name}"]) for name in ("train", "val")}
    expected = bnncli.from_torch(module, **data, device="cpu")
    expected.fit_laplace(prior_precision=3)
    with pretend_cuda.pretend():  # which refuses tensors of two devices in one call
        run = bnncli.from_torch(module.to(where), **data, device="cuda")
        assert {one.device.type for one in module.parameters()} == {where}
        assert run.fit_laplace(prior_precision=3).to_dict()["device"] == "cuda:0"
        found, own = (one.predict(arrays["features_test"][:5], integrator="probit").probs for one in (run, expected))
    np.testing.assert_allclose(found, own, atol=1e-5)


def test_a_module_may_return_probabilities_or_have_several_labels() -> None:
    module, x = make_module(), torch.randn(40, 1, 4, 4)
    y = (torch.arange(120).reshape(40, 3) % 2 == 0).int()
    several = bnncli.from_torch(nn.Sequential(module, nn.Sigmoid()), (x, y))
    assert np.allclose(several.predict(x, posterior="map").probs, module.eval()(x).sigmoid().detach(), atol=1e-6)
    softmax = bnncli.from_torch(nn.Sequential(module, nn.Softmax(1)), (x, y[:, 0]))
    assert np.allclose(softmax.predict(x, posterior="map").probs, module(x).softmax(1).detach(), atol=1e-6)


def test_labels_of_two_classes_may_be_floats_in_a_column_and_targets_are_refused() -> None:
    module, x = nn.Linear(5, 1), torch.randn(40, 5)
    y = (x[:, :1] > 0).float()
    runs = [bnncli.from_torch(module, (x, one)) for one in (y, y[:, 0], y[:, 0].int())]
    assert all(np.array_equal(run.split("train").labels, y[:, 0]) for run in runs)
    with pytest.raises(DataError, match=r"train: labels must be classes, or zeros and ones; got 0\.5 \(regression"):
        bnncli.from_torch(module, (x, y / 2))


def test_bytes_are_scaled_and_dicts_go_in_by_name() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 2)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.last(pixels.flatten(1))

    module, x = ByName(), torch.arange(48, dtype=torch.uint8).reshape(12, 1, 2, 2)
    rows = [{"pixels": one / 255, "labels": row % 2} for row, one in enumerate(x)]
    by_name = bnncli.from_torch(module, DataLoader(rows, 5)).split("train")
    assert np.array_equal(by_name.features, bnncli.from_torch(module, x).split("train").features)
    assert np.allclose(by_name.features, x.flatten(1).numpy() / 255)
    assert by_name.labels is not None
    assert by_name.labels.tolist() == [0, 1] * 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, y: bnncli.from_torch(make_module()), "^train: give at least one split"),
        (lambda x, y: bnncli.from_torch(make_module(), 3), r"^train: expected \(x, y\), a Dataset or a DataLoader; got int"),
        (lambda x, y: bnncli.from_torch(make_module(), (x, y), foo=1), "^from_torch: unexpected keyword 'foo'"),
        (lambda x, y: bnncli.from_torch(make_module(), (x, y), folder=__file__), "File exists"),
        (lambda x, y: bnncli.from_torch(nn.Sequential(make_module(), nn.Sigmoid()), (x, y)), "^the network returns a sigmoid"),
        (lambda x, y: bnncli.from_torch("net", (x, y)), "^model: expected a torch.nn.Module; got str"),
        (lambda x, y: bnncli.from_torch(make_module(), (x, y[:3])), r"labels_train: .*got shape \(3,\) for 20 rows"),
        (lambda x, y: bnncli.from_torch(make_module(), (x, y + 3)), "labels_train row 0 is 3, expected 0 to 2"),
        (lambda x, y: bnncli.from_torch(make_module(), (x[:, :, 1:], y)), "^the network failed on inputs of shape"),
        (lambda x, y: bnncli.from_torch(nn.Sequential(make_module(), nn.Tanh()), (x, y)), "linear"),
        (lambda x, y: bnncli.from_features((x[:, 0, 0] * np.nan, y)), "features_train has 80 values that are not finite"),
        (lambda x, y: bnncli.from_features((x[:, 0, 0], y), head=3), r"^head: expected \(weight, bias\)"),
        (lambda x, y: bnncli.from_features((["a"], y)), "^train: features: expected an array of numbers"),
        (lambda x, y: bnncli.from_features((x[:, 0, 0], y), ood={"train": x}), "^ood: 'train' is the name of another split"),
    ],
)  # fmt: skip
def test_wrong_data_are_one_clear_error(make: Callable[[Any, Any], object], message: str) -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 1, 4, 4)).astype(np.float32), np.arange(20) % 3 * 0
    with pytest.raises(BnnError, match=message):
        make(x, y)


@pytest.fixture(scope="module")
def fitted() -> OpenedRun:
    arrays = make_arrays()
    head = arrays["head_weight"], arrays["head_bias"]
    run = bnncli.from_features(**splits_of(arrays), head=head)
    run.fit_laplace(prior_precision=3)
    return run


@pytest.mark.parametrize("integrator", ["plug-in", "probit", "mc", "mean-field", "bridge"])
def test_a_module_predicts_as_the_run(fitted: OpenedRun, integrator: str) -> None:
    x = np.array(fitted.split("test").features)
    module, expected = (
        fitted.module("laplace", integrator),
        fitted.predict(x, posterior="laplace", integrator=integrator),
    )
    found = pickle.loads(pickle.dumps(module))(torch.from_numpy(x))
    assert np.allclose(found["probs"], expected.probs, atol=1e-5)
    assert np.allclose(found["entropy"], expected.entropy, atol=1e-5)
    assert (expected.mutual_info is None) == ("mutual_information" not in found)


@pytest.mark.long
def test_a_module_is_compiled_and_exported(fitted: OpenedRun) -> None:
    x, module = torch.tensor(fitted.split("test").features), fitted.module("laplace", "probit")
    expected = module(x)["probs"]
    assert torch.allclose(torch.compile(module, backend="aot_eager", fullgraph=True)(x)["probs"], expected)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.allclose(program.module()(x[:7])["probs"], expected[:7])


def test_a_module_of_inputs_is_a_copy_of_the_whole_network() -> None:
    network, x = make_module(), torch.randn(40, 1, 4, 4)
    run = bnncli.from_torch(network, (x, torch.arange(40) % 3))
    run.fit_laplace(prior_precision=1)
    module, expected = run.module("laplace", "probit", inputs=True), run.predict(x, integrator="probit").probs
    assert np.allclose(module(x)["probs"], expected, atol=1e-6)
    assert network.training
    with torch.no_grad():
        network[1].weight.add_(1)
    assert np.allclose(module(x)["probs"], expected, atol=1e-6)


def test_a_pickled_run_is_the_same_run(fitted: OpenedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array(fitted.split("test").features)
    expected = fitted.predict(x).probs
    monkeypatch.chdir(fitted.folder.parent)
    relative = bnncli.open("run", seed=0)
    monkeypatch.chdir(tmp_path)
    for stored in (pickle.dumps(fitted), pickle.dumps(relative)):
        again = pickle.loads(stored)
        assert np.array_equal(again.predict(x).probs, expected)
        del again
        gc.collect()
    assert fitted.folder.is_dir()


def test_a_posterior_and_a_predictor_are_pickled_as_they_are_loaded_again(tmp_path: Path) -> None:
    run = bnncli.from_torch(make_module(), (torch.randn(40, 1, 4, 4), torch.arange(40) % 3), folder=tmp_path)
    run.fit_laplace(prior_precision=1)
    x = torch.randn(5, 1, 4, 4)
    predictor, posterior = run.predictor("laplace", integrator="mc", samples=20), run.posterior("laplace")
    stored = pickle.dumps(predictor), pickle.dumps(posterior)
    again, weights = map(pickle.loads, stored)
    assert np.array_equal(again(x).probs, predictor(x).probs)
    assert again(x).draws == 20
    assert torch.equal(weights.sample(3), posterior.sample(3))
    run.fit_laplace(prior_precision=2, force=True)
    for one in stored:
        with pytest.raises(DataError, match="has changed since it was pickled"):
            pickle.loads(one)


def test_one_example_needs_no_axis_of_examples(tmp_path: Path) -> None:
    x = torch.randn(40, 1, 4, 4)
    run = bnncli.from_torch(make_module(), (x, torch.arange(40) % 3), folder=tmp_path)
    run.fit_laplace(prior_precision=1)
    expected, load = run.predict(x[:1]).probs, run.predictor("laplace")
    for one in (x[0], x[0, 0], x[0, 0].numpy(), x[0].movedim(0, -1)):
        for predict in (run.predict, load):
            assert np.allclose(predict(one).probs, expected, atol=1e-6), one.shape
    features = run.features(x[0])
    assert features.shape == (1, run.split("train").features.shape[1])
    assert np.allclose(run.predict(features[0]).probs, expected, atol=1e-6)
    for other in (x[0, 0, 0], x[0, :, :3], features[0][:-1]):
        with pytest.raises(DataError):
            run.predict(other)


def test_the_forward_passes_show_their_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.console.FIRST_LOG_SECONDS", 0.0)  # shorter loops are not logged
    x = torch.randn(40, 1, 4, 4)
    for progress in (False, True):
        bnncli.from_torch(make_module(), (x, torch.arange(40) % 3), test=(x, torch.arange(40) % 3), progress=progress)
        said = capsys.readouterr().err
        assert ("extract train 40/40" in said) == ("extract test 40/40" in said) == progress


@pytest.mark.long
def test_a_run_predicts_in_worker_processes(fitted: OpenedRun) -> None:
    x = np.array(fitted.split("test").features)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(fitted.predict, (x[:60], x[60:])))
    assert np.allclose(np.concatenate([one.probs for one in parts]), fitted.predict(x).probs, atol=1e-6)


def test_predictions_are_scored_as_by_the_command(tmp_path: Path, cli: Cli) -> None:
    generator = np.random.default_rng(0)
    probs, far = (generator.dirichlet(np.ones(3), size=size) for size in (50, 20))
    labels = generator.integers(3, size=50)
    np.savez(tmp_path / "own.npz", probs=probs, labels=labels)
    np.savez(tmp_path / "far.npz", probs=far)
    words = ("score", tmp_path / "own.npz", "--ood", f"far={tmp_path / 'far.npz'}", "--per-class", "--json")
    expected = cli(*words).expect(0).json["rows"]
    found = bnncli.from_predictions(probs, labels, ood={"far": torch.tensor(far)}).evaluate(per_class=True)
    assert [row["metrics"] for row in found.to_dict()["rows"]] == [row["metrics"] for row in expected]
    logits = bnncli.from_predictions(logits=np.log(probs), labels=labels).evaluate(metric="nll")
    nlls = [one["value"] for one in expected[0]["metrics"] if one["name"] == "nll"]
    assert logits.to_pandas()["NLL"].tolist() == pytest.approx(nlls, abs=1e-4)
    with pytest.raises(UsageError, match="give either probs or logits"):
        bnncli.from_predictions(labels=labels)


def test_predictions_are_calibrated(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(scale=4, size=(200, 3))
    labels = (logits / 4 + generator.gumbel(size=(200, 3))).argmax(axis=1)
    given = bnncli.from_predictions(logits=logits, labels=labels)
    fitted = given.fit_calibration("temperature")
    assert fitted.name == "temperature"
    beta = float(read_map_weight(fitted, tmp_path / "map.safetensors"))
    probs = np.exp(beta * logits)
    np.testing.assert_allclose(fitted(logits=logits), probs / probs.sum(axis=1, keepdims=True), atol=1e-6)
    assert {one["map"] for one in given.fit_calibration().metrics["maps"]} >= {"temperature", "isotonic"}
    with pytest.raises(bnncli.errors.UsageError, match="either probs or logits"):
        fitted()
    with pytest.raises(bnncli.errors.DataError, match=r"expected \(N, 3\)"):
        fitted(np.ones((2, 4)) / 4)


def read_map_weight(fitted: Any, path: Path) -> Any:
    from safetensors.numpy import load_file

    fitted.save(path)
    return load_file(path)["map_weight"][0]
