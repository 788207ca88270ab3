"""--fit-on through the pipeline: which rows are fitted, val out of fold, and what may not be said of val."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_posterior, write_posterior
from bnncli.artifacts.predictions import read_predictions
from bnncli.artifacts.samples import read_samples
from bnncli.cli.execute import run_command_line
from bnncli.evaluation.temperature import LabelledLogits, fit_temperature
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators import load_integrator
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.session.inputs import open_posterior
from bnncli.session.out_of_fold import GaussianFolds
from bnncli.system import memory
from bnncli.targets.last_layer import LastLayerTarget

FITS = {
    "val": ("--fit-on", "val"),
    "val-about": ("--fit-on", "val", "--prior-mean", "checkpoint", "--prior-precision", "3"),
    "both": ("--fit-on", "train+val"),
    "both-about": ("--fit-on", "train+val", "--prior-mean", "checkpoint"),
    "by-evidence": ("--fit-on", "val", "--prior-precision", "marglik"),
}
DERIVED = {
    "refine": ("--epochs", "2", "--length", "2"),
    "hmc": ("--chains", "8", "--warmup", "8", "--draws", "16"),
    "fit-vi": ("--epochs", "2", "--elbo-draws", "8"),
    "fit-swag": ("--warmup", "1", "--epochs", "4", "--rank", "3"),
    "fit-sghmc": ("--chains", "2", "--epochs", "8"),
    "fit-temperature": (),
}
every_fit = pytest.mark.parametrize("name", FITS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with posteriors fitted to val, and others made from them; not to be changed."""
    folder = tmp_path_factory.mktemp("fit-on")
    path = folder / "small"
    np.savez(folder / "small.npz", **make_arrays())
    lines: list[tuple[object, ...]] = [("extract-features", path, "--from-npz", folder / "small.npz")]
    lines += [("fit-laplace", path, *words, "--name", name) for name, words in FITS.items()]
    lines += [(command, path, "--base", "val", *words, "--name", f"of-{command}") for command, words in DERIVED.items()]
    lines += [("predict", path, "--posterior", name, "--integrator", "all") for name in ("val", "both")]
    lines += [("predict", path, *(f"--posterior={name}" for name in FITS), "--integrator", "plug-in")]
    for words in lines:
        assert run_command_line([*(str(word) for word in words), "-q"], io.StringIO()) in (0, 3), words
    return path


def file_of(run: Path, name: str) -> Path:
    return next((run.with_name(f"{run.name}.bnn") / "posteriors").glob(f"{name}.*"))


def predicted(run: Path, label: str, split: str = "val") -> Any:
    return read_predictions(run.with_name(f"{run.name}.bnn") / "predictions" / label / f"{split}.h5")


def rows_of(run: Path, *splits: str) -> tuple[Tensor, Tensor]:
    arrays = np.load(run.with_name(f"{run.name}.npz"))
    parts = [[torch.from_numpy(arrays[f"{kind}_{split}"]) for split in splits] for kind in ("features", "labels")]
    return torch.cat(parts[0]).double(), torch.cat(parts[1])


def head_of(run: Path) -> Tensor:
    centre: Tensor = open_posterior(file_of(run, "map"))[0].theta
    return centre.double()


def fold_targets(run: Path, name: str) -> Iterator[tuple[LastLayerTarget, Tensor]]:
    """What each fold is fitted to, written out, with the mask of the val rows that it leaves out."""
    path = file_of(run, name)
    posterior, header = open_posterior(path)
    folds = read_posterior(path)[0]["folds.rows"]
    features, labels = rows_of(run, "val")
    for place in range(5):
        kept = folds != place
        prior = Prior(header.meta["prior_precision"])
        if "about" in name:
            logits = posterior.layout.logits(features, head_of(run)[None])[0]
            data = LabelledLogits(logits[kept], labels[kept], posterior.layout.likelihood)
            scale = 1 / fit_temperature(data).temperature
            prior = prior.with_mean(scale * head_of(run), scale)
        x, y = features[kept], labels[kept]
        if "both" in name:
            more = rows_of(run, "train")
            x, y = torch.cat([more[0], x]), torch.cat([more[1], y])
        yield LastLayerTarget(x, y, posterior.layout, prior), ~kept


def scipy_mode(target: LastLayerTarget) -> Tensor:
    centre = target.prior.center(target.layout)

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(values, requires_grad=True)
        nll = cross_entropy(linear(target.features, *target.layout.split(theta)), target.labels, reduction="sum")
        value = nll + 0.5 * target.prior.weight_precision * (theta - centre).square().sum()
        return value.item(), torch.autograd.grad(value, theta)[0].numpy()

    options = {"ftol": 0, "gtol": 1e-9, "maxiter": 5000}
    found = scipy.optimize.minimize(loss, centre.numpy(), jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x)


@every_fit
def test_every_row_of_val_is_predicted_by_a_fit_that_has_not_seen_it(run: Path, name: str) -> None:
    found = predicted(run, f"{name}.plug-in")
    features, _ = rows_of(run, "val")
    expected = torch.empty(len(features), 3, dtype=torch.float64)
    for target, rows in fold_targets(run, name):
        expected[rows] = linear(features[rows], *target.layout.split(scipy_mode(target))).softmax(dim=1)
    np.testing.assert_allclose(found.probs, expected.numpy(), atol=3e-4)
    assert found.header.meta["num_folds"] == 5
    assert "num_folds" not in predicted(run, f"{name}.plug-in", "test").header.meta


@pytest.mark.parametrize("name", ["val", "both"])
@pytest.mark.parametrize("integrator", ["probit", "mean-field"])
def test_the_folds_have_covariances_of_their_own(run: Path, name: str, integrator: str) -> None:
    found = predicted(run, f"{name}.{integrator}")
    features, _ = rows_of(run, "val")
    expected = torch.empty(len(features), 3)
    for target, rows in fold_targets(run, name):
        fit = fit_gaussian(target, start=head_of(run), structure=read_header(file_of(run, name)).meta["structure"])
        predict = load_integrator(integrator).predict
        some = features[rows].float()
        expected[rows] = predict(fit.gaussian, some, num_samples=None, generator=torch.Generator()).probs.float()
    np.testing.assert_allclose(found.probs, expected.numpy(), atol=1e-3)


@every_fit
def test_the_whole_fit_is_to_the_rows_that_were_asked_for(run: Path, name: str) -> None:
    fitted, header = open_posterior(file_of(run, name))
    splits = ("val",) if "both" not in name else ("train", "val")
    distances = []  # to the mode, in posterior standard deviations
    for rows in (splits, ("train",)):
        target = LastLayerTarget(*rows_of(run, *rows), fitted.layout, fitted.require_prior())
        _, gradient = target.log_joint_and_grad(fitted.mean.unsqueeze(0), dtype=torch.float64)
        distances.append(float(fitted.covariance.pull_back(gradient).norm()))
    assert distances[0] < 2e-3
    assert distances[1] > 0.01
    assert header.meta["num_examples"] == len(rows_of(run, *splits)[1])
    assert {entry["role"] for entry in header.inputs} == {f"features.{split}" for split in splits}


@pytest.mark.parametrize("name", ["val", "both"])
def test_the_numbers_on_val_are_those_of_the_predictions_out_of_fold(run: Path, name: str) -> None:
    metrics = read_header(file_of(run, name)).meta["metrics"]
    labels = rows_of(run, "val")[1].numpy()
    for integrator in ("mc", "plug-in", "probit"):
        probs = predicted(run, f"{name}.{integrator}").probs
        nll = -np.log(probs[np.arange(len(labels)), labels]).mean()
        key = "laplace" if integrator == metrics["recommended_integrator"] else integrator
        assert metrics["val"][key]["nll"] == pytest.approx(nll, abs=1e-5), key


def test_what_is_stored_of_val_is_in_its_order(run: Path) -> None:
    found, whole = predicted(run, "val.mc"), predicted(run, "val.mc", "test")
    assert found.sample_id.tolist() == list(range(80))
    assert found.group_probs.shape[1:] == (80, 3)
    assert found.group_rows.tolist() == list(range(80))
    mean = np.tensordot(found.group_weights, found.group_probs, axes=1)
    np.testing.assert_allclose(mean, found.probs[found.group_rows], atol=1e-3)
    assert found.group_probs.shape[0] == whole.group_probs.shape[0]


def test_a_fold_of_few_of_all_rows_has_the_covariance_of_the_whole(run: Path) -> None:
    posterior, _ = open_posterior(file_of(run, "val"))
    tensors = read_posterior(file_of(run, "val"))[0]

    def never() -> LastLayerTarget:
        raise AssertionError

    folds = GaussianFolds.of(posterior, tensors["folds.theta"], tensors["folds.rows"], num_fitted=800, target=never)
    for place, (gaussian, rows) in enumerate(folds.parts()):
        assert isinstance(gaussian, Gaussian)
        assert gaussian.covariance is posterior.covariance
        assert torch.equal(gaussian.mean, tensors["folds.theta"][place])
        assert (tensors["folds.rows"][rows] == place).all()


@pytest.mark.parametrize("command", DERIVED)
def test_what_is_made_from_it_has_the_same_rows_and_does_not_predict_val(cli: Cli, run: Path, command: str) -> None:
    name = f"of-{command}"
    header = read_header(file_of(run, name))
    assert header.meta["fit_on"] == "val"
    assert header.meta["num_examples"] == 80
    assert header.meta["metrics"].get("val") is None
    cli("predict", run, "--posterior", name, "--split", "val").expect(
        65, f"{name} was fitted to val", "hint: predict on another split"
    )
    rest = cli("predict", run, "--posterior", name).expect(0, f"skipping {name} on val")
    assert [Path(line).name for line in rest.stdout.split()] == ["far.h5", "test.h5"]


def test_draws_are_of_the_log_posterior_of_val_rows(run: Path) -> None:
    posterior, header = open_posterior(file_of(run, "of-hmc"))
    target = LastLayerTarget(*rows_of(run, "val"), posterior.layout, Prior(header.meta["prior_precision"]))
    samples = read_samples(file_of(run, "of-hmc"))
    np.testing.assert_allclose(samples.stats["lp"][0], target.log_joint(posterior.draws[0]).numpy(), atol=1e-3)


def test_diagnose_judges_each_on_its_own_rows_and_val_out_of_fold(cli: Cli, run: Path) -> None:
    cli("fit-laplace", run, "--prior-precision", "7", "--name", "seven").expect(0)
    cli("fit-laplace", run, "--prior-precision", "7", "--fit-on", "val", "--name", "seven-val").expect(0)
    names = ("seven", "seven-val", "of-hmc", "val")
    found = cli("diagnose", run, *(f"--posterior={name}" for name in names), "--json").json
    same = {tuple(pair["posteriors"]): pair["is_same_target"] for pair in found["pairs"]}
    assert [names for names, is_same in same.items() if is_same] == [("of-hmc", "val")]
    assert found["posteriors"]["of-hmc"]["val_nll"]["value"] is None
    nll = read_header(file_of(run, "val")).meta["metrics"]["val"]["laplace"]["nll"]
    assert found["posteriors"]["val"]["val_nll"]["value"] == pytest.approx(nll, abs=0.03)
    evidence = found["posteriors"]["seven-val"]["log_evidence"]
    assert evidence["value"] == pytest.approx(evidence["laplace"], abs=1.0)


def test_val_calibrates_nothing_that_was_fitted_to_it(cli: Cli, run: Path) -> None:
    cli("calibrate", run, "--posterior", "val", "--integrator", "mc", "--sets", "lac", "--split", "val").expect(
        65, "split 'val' cannot calibrate val.mc", "the posterior 'val' was fitted or chosen with this split"
    )


def test_weighing_draws_by_all_rows_is_refused_out_of_fold(cli: Cli, run: Path) -> None:
    cli("predict", run, "--posterior", "val", "--integrator", "importance", "--split", "val").expect(
        2, "importance weights its draws using all rows that val was fitted to"
    )
    cli("predict", run, "--posterior", "val", "--integrator", "importance", "--split", "test").expect(0)


def test_val_alone_needs_no_train(cli: Cli, tmp_path: Path) -> None:
    arrays = {name: part for name, part in make_arrays().items() if "train" not in name}
    run = new_run(cli, tmp_path / "alone", arrays)
    cli("fit-laplace", run, "--fit-on", "val", "--prior-mean", "checkpoint").expect(0)
    cli("predict", run, "--posterior", "laplace", "--split", "val").expect(0)


def test_fewer_rows_than_features_are_fitted_in_their_span(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays(num_features=40)
    arrays |= {f"{kind}_val": arrays[f"{kind}_val"][:25] for kind in ("features", "labels")}
    run = new_run(cli, tmp_path / "wide", arrays)
    for name in ("val", "val-about"):
        words = ("--prior-mean", "checkpoint") if name == "val-about" else ()
        cli("fit-laplace", run, "--fit-on", "val", *words, "--name", name).expect(0)
        assert "row_space_rank" in read_header(file_of(run, name)).meta
        cli("predict", run, "--posterior", name, "--integrator", "plug-in", "--integrator", "probit").expect(0)
        features, _ = rows_of(run, "val")
        plug_in, probit = (np.array(predicted(run, f"{name}.{by}").probs) for by in ("plug-in", "probit"))
        for target, rows in fold_targets(run, name):
            mode = scipy_mode(target)
            expected = linear(features[rows], *target.layout.split(mode)).softmax(dim=1)
            np.testing.assert_allclose(plug_in[rows.numpy()], expected.numpy(), atol=1e-3)
            whole = fit_gaussian(target, start=mode, structure="full").gaussian  # over all of theta
            by_whole = load_integrator("probit").predict(whole, features[rows].float(), num_samples=None, generator=torch.Generator())  # fmt: skip
            np.testing.assert_allclose(probit[rows.numpy()], by_whole.probs.numpy(), atol=2e-3)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--layers", "all"), 2, "--fit-on val is for --layers last at --center mode"),
        (("--center", "checkpoint"), 2, "--fit-on val is for --layers last at --center mode"),
    ],
)
def test_what_has_no_folds_is_refused(cli: Cli, run: Path, words: tuple[str, ...], code: int, message: str) -> None:
    cli("fit-laplace", run, "--fit-on", "val", *words).expect(code, message)


@pytest.mark.parametrize(
    ("rows", "has_labels", "code", "message"),
    [
        (0, True, 66, "no features of split 'val'"),
        (1, True, 65, "--fit-on: cross-validation needs at least 2 rows of val; got 1"),
        (80, False, 65, "split 'val' has no labels"),
    ],
)
def test_unusable_val_is_refused(
    cli: Cli, tmp_path: Path, rows: int, has_labels: bool, code: int, message: str
) -> None:
    arrays = {name: part[:rows] if name.endswith("_val") else part for name, part in make_arrays().items()}
    dropped = [name for name in arrays if (rows == 0 and "_val" in name) or (not has_labels and name == "labels_val")]
    run = new_run(cli, tmp_path / "few", {name: part for name, part in arrays.items() if name not in dropped})
    cli("fit-laplace", run, "--fit-on", "val").expect(code, message)


def test_a_network_that_has_memorised_train_is_told_so(cli: Cli, tmp_path: Path, small_run: Path) -> None:
    arrays = make_arrays()
    scores = arrays["features_train"] @ arrays["head_weight"].T + arrays["head_bias"]
    arrays["labels_train"] = scores.argmax(axis=1)  # as a network that has learnt them says
    for name in ("features_val", "labels_val"):
        arrays[name] = np.concatenate([arrays[name]] * 3)  # enough of them to be sure of what they say
    arrays["head_weight"], arrays["head_bias"] = 2 * arrays["head_weight"], 2 * arrays["head_bias"]
    run = new_run(cli, tmp_path / "sure", arrays)
    said = cli("fit-laplace", run, "--prior-precision", 3).stderr
    assert "the network has memorised train" in said
    assert "--fit-on train+val or with --fit-on val --prior-mean checkpoint" in said
    assert "memorised" not in cli("fit-laplace", run, "--prior-precision", 3, "--fit-on", "val", "--name", "v").stderr
    assert "memorised" not in cli("fit-laplace", small_run, "--prior-precision", 3, "--name", "other").stderr


def test_folds_of_another_val_are_refused_even_where_stale_inputs_are_allowed(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    run = new_run(cli, tmp_path / "changed", arrays)
    cli("fit-laplace", run, "--fit-on", "val", "--prior-precision", 3).expect(0)
    shorter = {name: part[:70] if name.endswith("_val") else part for name, part in arrays.items()}
    new_run(cli, run, shorter, "--force")
    cli("predict", run, "--posterior", "laplace", "--split", "val", "--allow-stale").expect(
        65, "laplace has folds for 80 rows of val, which now has 70"
    )


@pytest.mark.parametrize(
    ("tensors", "meta", "message"),
    [
        ({}, {"fit_on": "../val"}, "expected fit_on to be one of train, val, train+val; got '../val'"),
        ({"folds.theta": torch.zeros(5, 3)}, {}, "folds.theta has shape (5, 3)"),
        ({"folds.rows": torch.full((80,), 7, dtype=torch.uint8)}, {}, "folds.rows names 1"),
    ],
    ids=["rows", "theta", "folds"],
)
def test_folds_that_are_none_are_refused(
    cli: Cli, run: Path, tmp_path: Path, tensors: dict[str, Tensor], meta: dict[str, Any], message: str
) -> None:
    shutil.copytree(run.with_name("small.bnn"), tmp_path / "small.bnn")
    path = file_of(tmp_path / "small", "val")
    own, header = read_posterior(path)
    words: dict[str, Any] = {"provenance": header.provenance, "may_replace": True}
    write_posterior(path, {**own, **tensors}, meta={**header.meta, **meta}, **words)
    cli("predict", tmp_path / "small", "--posterior", "val", "--integrator", "probit", "--force").expect(65, message)


def test_folds_without_room_are_refused_before_any_work(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "budget", lambda device: 5000)
    cli("fit-laplace", run, "--fit-on", "val", "--structure", "diag", "--name", "none").expect(
        69, "5 folds of 80 rows of 5 features"
    )
