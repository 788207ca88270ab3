"""Runs of fewer examples than features: what each command makes of a posterior that was fitted in the row space."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli
from torch import Tensor

from bnncli.artifacts.predictions import read_predictions
from bnncli.artifacts.samples import read_samples
from bnncli.cli.execute import run_command_line
from bnncli.inference import structure_choice
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.row_space import complete_draws
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.registry import has_attribute, names
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import open_posterior
from bnncli.structures.row_space import WithinRows
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace

pytestmark = pytest.mark.gpu

FEATURES, EXAMPLES, PRIOR = 30, 12, 4.0
LAYOUT = HeadLayout(3, FEATURES)


def save_few(path: Path, seed: int = 0) -> None:
    """A dozen examples of more features."""
    arrays = make_arrays(seed, num_features=FEATURES)
    few: dict[str, Any] = {
        part: values[:EXAMPLES] if part.endswith("train") else values for part, values in arrays.items()
    }
    np.savez(path, **few)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with features of a dozen examples as `run`, fitted with a given prior precision."""
    folder = tmp_path_factory.mktemp("fitted")
    save_few(folder / "run.npz")
    for line in (
        f"extract-features {folder}/run --from-npz {folder}/run.npz --ood far",
        f"fit-laplace {folder}/run --prior-precision {PRIOR}",
    ):
        assert run_command_line(line.split(), io.StringIO()) == 0
    return folder


@pytest.fixture
def run(fitted: Path, tmp_path: Path) -> Path:
    """A copy of the fitted run that a test may change."""
    shutil.copytree(fitted, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def stored(run: Path, name: str) -> Any:
    return open_posterior(run.with_name(f"{run.name}.bnn") / "posteriors" / name)[0]


def arrays_of(run: Path) -> dict[str, np.ndarray]:
    return dict(np.load(run.with_name("run.npz")))


def target_of(run: Path, prior: Prior | None = None) -> LastLayerTarget:
    arrays = arrays_of(run)
    features, labels = torch.from_numpy(arrays["features_train"]), torch.from_numpy(arrays["labels_train"])
    return LastLayerTarget(features, labels, LAYOUT, prior or Prior(PRIOR))


def rows_of(run: Path) -> RowSpace:
    return RowSpace.of(target_of(run).features, LAYOUT)


def outside(run: Path, theta: Tensor) -> Tensor:
    """theta (S, P) less what of it lies in the row space."""
    rows = rows_of(run)
    return theta.double() - rows.lift(rows.reduce(theta.double()))


def is_prior_outside(run: Path, draws: Tensor, precision: float) -> bool:
    """Whether the mean square of what draws (S, P) have outside the row space is the prior's, to 4.5 standard errors."""
    count = len(draws) * rows_of(run).num_outside
    mean = float(outside(run, draws).square().sum()) / count
    return abs(mean * precision - 1) < 4.5 * (2 / count) ** 0.5


def test_the_fit_is_that_over_all_of_theta_and_says_where_it_was_made(cli: Cli, run: Path) -> None:
    fitted, target = stored(run, "laplace.safetensors"), target_of(run)
    assert isinstance(fitted.covariance, WithinRows)
    whole = fit_gaussian(target, start=torch.zeros(LAYOUT.num_params)).gaussian
    features = torch.from_numpy(arrays_of(run)["features_far"]).double()
    for ours, theirs in zip(fitted.logit_moments(features), whole.logit_moments(features), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    done = cli("fit-laplace", run, "--prior-precision", PRIOR, "--json")
    assert (done.json["metrics"]["row_space_rank"], done.json["metrics"]["num_features"]) == (EXAMPLES, FEATURES)
    evidence = fit_gaussian(target, start=torch.zeros(LAYOUT.num_params)).log_marginal_likelihood
    assert done.json["metrics"]["log_marginal_likelihood"] == pytest.approx(evidence, abs=1e-3)
    assert (
        "span 12 of 30 directions: the fit is exact in these directions, and all others keep the prior" in done.stderr
    )


@pytest.mark.parametrize(
    ("words", "is_within"),
    [
        (("--structure", "full"), True),
        (("--structure", "block"), True),
        (("--structure", "kron"), False),
        (("--structure", "diag"), False),
        (("--center", "checkpoint"), False),
        (("--prior-precision", "marglik"), True),
        (("--prior-precision", "val", "--bias-precision", "0.1"), True),
    ],
    ids=str,
)
@pytest.mark.long
def test_full_and_block_are_fitted_there(cli: Cli, run: Path, words: tuple[str, ...], is_within: bool) -> None:
    given = () if "--prior-precision" in words else ("--prior-precision", PRIOR)
    done = cli("fit-laplace", run, *given, *words, "--name", "other", "--json").expect(0)
    assert isinstance(stored(run, "other.safetensors").covariance, WithinRows) == is_within
    assert ("row_space_rank" in done.json["metrics"]) == is_within


def test_as_many_examples_as_features_are_fitted_over_all_of_theta(small_run: Path) -> None:
    fitted, _ = open_posterior(small_run.with_name("small.bnn") / "posteriors" / "laplace.safetensors")
    assert not isinstance(fitted.covariance, WithinRows)


def test_every_integrator_predicts_what_it_does_over_all_of_theta(cli: Cli, run: Path) -> None:
    whole = fit_gaussian(target_of(run), start=torch.zeros(LAYOUT.num_params)).gaussian
    fitted = stored(run, "laplace.safetensors")
    features = torch.from_numpy(arrays_of(run)["features_test"])
    from bnncli.integrators import load_integrator, supports

    checked = []
    for name in names("integrators"):
        if not (has_attribute("posteriors", "gaussian", load_integrator(name).needs) and supports(name, fitted)):
            continue
        done = cli("predict", run, "--posterior", "laplace", "--integrator", name, "--split", "test").expect(0)
        ours = read_predictions(Path(done.stdout.strip())).probs
        if name in ("mc", "importance"):  # other draws of the same: their roots differ
            continue
        integrator = load_integrator(name)
        generator = torch.Generator().manual_seed(0)
        found = []
        for posterior in (whole, fitted):
            ready = integrator.prepare(posterior, num_samples=64, generator=generator.manual_seed(0))
            found.append(ready.predict(posterior, features, num_samples=64, generator=generator.manual_seed(0)).probs)
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
        if name != "logit-mc":  # the command has a seed of its own
            np.testing.assert_allclose(ours, found[1].numpy(), atol=1e-5)
        checked.append(name)
    assert {"plug-in", "mean-field", "bridge", "logit-mc"} <= set(checked)


def test_refined_draws_are_the_prior_outside_whatever_the_base_had(cli: Cli, run: Path) -> None:
    for name, words, precision in (("same", (), PRIOR), ("other", ("--prior-precision", 9.0), 9.0)):
        done = cli("refine", run, "--epochs", 3, "--length", 2, "--name", name, *words, "--json").expect(0)
        flow = stored(run, f"{name}.safetensors")
        assert isinstance(flow, Flow)
        assert flow.layer_layout == HeadLayout(3, EXAMPLES)
        assert is_prior_outside(run, flow.sample(200, torch.Generator().manual_seed(0)), precision)
        # ELBO of the whole posterior on the whole target: what the artifact says of itself.
        assert done.json["metrics"]["elbo_gain"]["value"] > -1
        cli("predict", run, "--posterior", name, "--split", "test").expect(0)


def test_a_base_of_other_features_is_not_refined(cli: Cli, run: Path, tmp_path: Path) -> None:
    save_few(tmp_path / "another.npz", seed=1)
    cli("extract-features", tmp_path / "another", "--from-npz", tmp_path / "another.npz").expect(0)
    base = run.with_name("run.bnn") / "posteriors" / "laplace.safetensors"
    done = cli("refine", tmp_path / "another", "--base", base, "--epochs", 1, "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "wrong_row_space")
    assert "row space of other training features" in done.json["error"]["message"]


@pytest.mark.parametrize("sampler", ["hmc", "nuts"])
@pytest.mark.long
def test_draws_are_the_prior_outside_and_know_their_log_joint(cli: Cli, run: Path, sampler: str) -> None:
    words = ("--chains", 2, "--warmup", 8, "--draws", 20, "--sampler", sampler)
    cli("hmc", run, *words, "--name", sampler, "--json").expect(0)
    content = read_samples(run.with_name("run.bnn") / "posteriors" / f"{sampler}.nc")
    draws = stored(run, f"{sampler}.nc").draws.flatten(0, 1)
    log_joint = target_of(run).log_joint(draws)
    np.testing.assert_allclose(content.stats["lp"].ravel(), log_joint.numpy(), atol=2e-2)
    assert is_prior_outside(run, draws, PRIOR)
    inside = draws.double() - outside(run, draws)
    assert inside.std(dim=0).max() > 0


def test_interrupted_chains_continue_to_the_same_draws(cli: Cli, run: Path) -> None:
    from bnncli.session.produce import ResumableDraws
    from bnncli.system import signals

    words = ("hmc", run, "--chains", 2, "--warmup", 4, "--draws", 8, "--save-every", 0)
    through = cli(*words, "--name", "through", "--json").json["outputs"][0]["content_digest"]
    offer, left = ResumableDraws.offer, [9]

    def counted(self: ResumableDraws, tensors: Any, *, is_last: bool = False) -> None:
        offer(self, tensors, is_last=is_last)
        left[0] -= not is_last
        if left[0] == 0 and not is_last:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableDraws, "offer", counted)
        cli(*words, "--name", "through", "--force").expect(143)
        signals.forget_received()
        again = cli(*words, "--name", "through", "--force", "--resume", "--json")
    assert again.json["outputs"][0]["content_digest"] == through


def test_completed_draws_are_what_they_were_inside_and_the_prior_outside(run: Path) -> None:
    rows, generator = rows_of(run), torch.Generator().manual_seed(0)
    inside = torch.randn(500, rows.reduced.num_params, generator=generator, dtype=torch.float64)
    theta, log_density = complete_draws(inside, generator, rows=rows, prior=Prior(PRIOR))
    torch.testing.assert_close(rows.reduce(theta), inside)
    assert is_prior_outside(run, theta, PRIOR)
    prior = Prior(PRIOR)
    torch.testing.assert_close(
        log_density, prior.log_density(theta, LAYOUT) - prior.log_density(rows.reduce(theta), rows.reduced)
    )


@pytest.mark.parametrize("command", ["fit-laplace", "hmc", "refine"])
def test_outside_the_row_space_a_prior_about_the_checkpoint_is_about_it(cli: Cli, run: Path, command: str) -> None:
    """The network's own last layer lies in no such span; there each posterior is the prior, its mean included."""
    cli("fit-laplace", run, "--prior-precision", PRIOR, "--prior-mean", "checkpoint", "--name", "about").expect(0)
    words = {
        "hmc": ["--chains", 50, "--warmup", 10, "--draws", 20, "--prior-precision", "inherit"],
        "refine": ["--epochs", 2, "--length", 2],
    }
    if command != "fit-laplace":
        assert cli(command, run, "--base", "about", *words[command]).code in (0, 3)
    base = stored(run, "about.safetensors")
    mean = base.require_prior().mean
    assert float(outside(run, mean).norm()) > 1
    name = {"fit-laplace": "about.safetensors", "hmc": "hmc.nc", "refine": "refine.safetensors"}[command]
    drawn = stored(run, name).sample(1000, torch.Generator().manual_seed(1)).double()
    assert is_prior_outside(run, drawn - mean, PRIOR)
    assert not is_prior_outside(run, drawn, PRIOR)


def test_the_other_commands_take_it(cli: Cli, run: Path) -> None:
    cli("hmc", run, "--chains", 4, "--warmup", 10, "--draws", 20).expect(0)
    for posterior in ("laplace", "hmc"):
        cli("predict", run, "--posterior", posterior).expect(0)
    assert {row["posterior"] for row in cli("evaluate", run, "--json").expect(0).json["rows"]} == {"laplace", "hmc"}
    found = cli("diagnose", run, "--posterior", "laplace", "--json")
    assert found.code in (0, 3), found.stderr
    elbo = found.json["posteriors"]["laplace"]["elbo"]
    laplace = stored(run, "laplace.safetensors")
    assert isinstance(laplace, Gaussian)
    assert elbo["value"] == pytest.approx(_elbo_inside(run, laplace), abs=5 * elbo["standard_error"] + 1e-3)
    assert cli("compare", run).code in (0, 3)
    cli("verify", run.with_name("run.bnn")).expect(0)
    assert "cov.basis" in cli("inspect", run.with_name("run.bnn") / "posteriors" / "laplace.safetensors").stdout


def _elbo_inside(run: Path, laplace: Gaussian) -> float:
    """The ELBO in the row space alone, of many draws."""
    rows, target = rows_of(run), target_of(run)
    assert isinstance(laplace.covariance, WithinRows)
    rows = laplace.covariance.rows
    inner = Gaussian(rows.reduce(laplace.mean), laplace.covariance.inner, rows.reduced, laplace.prior)
    theta, log_density = inner.from_noise(inner.noise(4000, torch.Generator().manual_seed(3)))
    return float((rows.target(target).log_joint(theta) - log_density).mean())


@pytest.mark.parametrize(
    ("examples", "features", "outputs", "chosen"),
    [(200, 1280, 10, "full"), (500, 2048, 10, "full"), (1200, 1280, 10, "block"), (500, 2048, 100, "block")],
)
def test_the_automatic_structure_of_few_examples(
    monkeypatch: pytest.MonkeyPatch, examples: int, features: int, outputs: int, chosen: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    whole, span = HeadLayout(outputs, features), HeadLayout(outputs, examples)
    assert structure_choice.automatic_structure(whole, 16 << 30, device="cpu") == "kron"
    assert structure_choice.automatic_structure(span, 16 << 30, device="cpu", whole=whole) == chosen


def test_a_file_whose_basis_is_cut_is_damaged(run: Path) -> None:
    tensors, meta = stored(run, "laplace.safetensors").to_tensors()
    json.dumps(meta)
    with pytest.raises(ValueError, match="the row space has"):
        Gaussian.from_tensors({**tensors, "cov.basis": tensors["cov.basis"][:, :-1]}, meta)


def test_status_knows_fits_in_the_row_space(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a revision of their own: none is told to be of another, until there is another."""
    for structure in names("curvature"):
        words = ("--structure", structure, "--name", structure, "--prior-precision", PRIOR)
        cli("fit-laplace", run, *words).expect(0)
    cli("hmc", run, "--chains", 2, "--warmup", 4, "--draws", 8).expect(0)
    cli("refine", run, "--flow", "radial", "--epochs", 1, "--length", 1).expect(0)
    cli("status", run, "--check").expect(0)
    today = _revisions.of_laplace
    monkeypatch.setattr(_revisions, "of_laplace", lambda *, in_span, **more: today(in_span=in_span, **more) + in_span)
    told = {Path(entry["path"]).stem: entry["state"] for entry in cli("status", run, "--json").json["artifacts"]}
    assert {told[name] for name in ("laplace", "full", "block")} == {"stale"}
    assert {told[name] for name in ("kron", "diag")} == {"fresh"}
