"""predict: which integrators and settings it takes, what it stores, and what it makes ready once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from scipy import special

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import PredictionFile, read_predictions
from bnncli.integrators import Ready, load_integrator, settings_of
from bnncli.integrators._moments import energy_and_max_logit, mean_theta
from bnncli.integrators.mc import Mc
from bnncli.integrators.probit import Probit
from bnncli.options.declaration import declaration, help_of, map_options
from bnncli.options.predict import PredictOptions
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.samples import Samples
from bnncli.registry import load_class, names
from bnncli.session import inputs as run_inputs
from bnncli.session.inputs import open_posterior

pytestmark = [pytest.mark.core, pytest.mark.gpu]


def read(run: Path, name: str, split: str = "test") -> PredictionFile:
    return read_predictions(run.with_name(f"{run.name}.bnn") / "predictions" / name / f"{split}.h5")


def meta(content: PredictionFile) -> dict[str, Any]:
    assert content.header is not None
    return dict(content.header.meta)


@pytest.mark.parametrize("name", names("integrators"))
def test_every_setting_of_an_integrator_is_an_option(name: str) -> None:
    assert set(settings_of(load_integrator(name))) <= set(map_options(PredictOptions))


@pytest.mark.parametrize("name", names("integrators"))
def test_the_help_of_a_setting_names_the_integrator_and_its_default(name: str) -> None:
    """That help and integrator have one default is how they are made: both take it from the declaration."""
    integrator, own = load_integrator(name), declaration("integrators", name, "SETTINGS") or {}
    assert {setting: spec.default for setting, spec in own.items()} == settings_of(integrator)
    for setting, spec in own.items():
        shown = help_of(map_options(PredictOptions)[setting][0])
        assert name in shown
        said = shown.partition(f"{name}: ")[2].partition(".")[0] if spec.own else shown
        assert spec.default is False or str(spec.default) in said
    if integrator.is_sampling:
        assert f"{name} {integrator.default_for(1)}" in help_of(map_options(PredictOptions)["samples"][0])


def test_all_takes_every_integrator_that_fits(cli: Cli, small_run: Path) -> None:
    done = cli("predict", small_run, "--integrator", "all", "--split", "test", "--json").expect(0)
    made = {tuple(output["role"].split(".")[1:3]) for output in done.json["outputs"]}
    for posterior, kind in (("map", "point"), ("laplace", "gaussian"), ("refine", "flow"), ("hmc", "samples")):
        for name in names("integrators"):
            integrator = load_integrator(name)
            fits = hasattr(load_class("posteriors", kind), integrator.needs)
            fits = fits and getattr(integrator, "max_classes", 3) >= 3
            assert ((posterior, name) in made) == fits, (posterior, name)


def test_unfit_posteriors_are_skipped_unless_named(cli: Cli, small_run: Path) -> None:
    done = cli("predict", small_run, "--integrator", "probit", "--split", "test", "--json")
    assert {output["role"].split(".")[1] for output in done.json["outputs"]} == {"map", "laplace"}
    assert any("skipping hmc: --integrator probit does not work" in warning for warning in done.json["warnings"])
    named = cli("predict", small_run, "--integrator", "probit", "--posterior", "hmc", "--json")
    assert (named.code, named.json["error"]["code"]) == (2, "unsupported_integrator")


def test_an_integrator_for_fewer_classes_is_unfit(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probit, "max_classes", 2, raising=False)
    done = cli("predict", small_run, "--integrator", "probit", "--posterior", "laplace", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "unsupported_integrator")
    assert "at most 2 classes; got 3" in done.json["error"]["message"]
    assert "probit" not in done.json["error"]["hint"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--integrator", "probit", "--samples", 5), "--samples: probit has no draws; these integrators draw: "),
        (("--posterior", "map", "--samples", 5), "--samples: plug-in has no draws"),
        (("--name", "x", "--posterior", "laplace", "--integrator", "all"), "--name applies to one"),
        (("--out", "x.h5", "--posterior", "laplace", "--integrator", "mc", "--integrator", "probit", "--split", "test"), "--out FILE holds one"),
        (("--integrator", "some"), "--integrator: expected one of .*, all; got 'some'"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_requests_are_refused(cli: Cli, small_run: Path, words: tuple[object, ...], message: str) -> None:
    assert re.search(message, cli("predict", small_run, *words).expect(2).stderr)


def test_samples_hold_for_those_that_draw_when_others_do_not(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--integrator", "mc", "--integrator", "plug-in")
    cli("predict", small_run, *words, "--samples", 7, "--force").expect(0)
    assert [meta(read(small_run, f"laplace.{name}"))["samples"] for name in ("mc", "plug-in")] == [7, None]


def test_all_integrators_leave_out_those_whose_draws_cannot_be_kept(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--keep-samples", "--force")
    cli("predict", small_run, "--integrator", "all", *words).expect(
        0, "skipping laplace with importance: --keep-samples"
    )
    assert read(small_run, "laplace.logit-mc").probs_samples is not None
    cli("predict", small_run, "--integrator", "importance", *words).expect(2)


def test_more_draws_than_there_are_is_all_of_them_and_is_told(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "hmc", "--split", "test", "--samples", 1000).expect(
        0, "1 file, 1 split: up to date", "hmc has only 128 draws, fewer than --samples 1000; using all of them"
    )
    done = cli("predict", small_run, "--posterior", "hmc", "--split", "test", "--samples", 100, "--name", "few")
    assert (meta(read(small_run, "few"))["samples"], "fewer than" in done.stderr) == (100, False)


def test_what_an_integrator_warns_of_is_stored_as_it_is_said(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--integrator", "mc", "--qmc", "--samples", 40, "--split", "test")
    done = cli("predict", small_run, *words)
    expected = "--qmc spreads 40 draws less evenly than 8 times a power of two: use --samples 32 or 64"
    assert f"WARNING predict laplace: {expected}\n" in done.stderr
    stored = read_predictions(small_run.with_name("small.bnn") / "predictions/laplace.mc-qmc/test.h5")
    assert stored.header is not None
    assert stored.header.meta["warning"] == expected


def test_a_setting_goes_to_the_integrators_that_have_it_and_into_their_name(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--integrator", "probit", "--integrator", "mean-field")
    done = cli("predict", small_run, *words, "--projection", "sum-zero", "--order", 2, "--json")
    assert [output["role"].split(".")[2] for output in done.json["outputs"]] == ["probit-sum-zero", "mean-field-2"]
    made = meta(read(small_run, "laplace.probit-sum-zero"))
    assert (made["integrator"], made["settings"]) == ("probit", {"projection": "sum-zero"})
    features = torch.from_numpy(read_features(small_run.with_name("small.bnn") / "features/test.h5").features)
    posterior, _ = open_posterior(small_run.with_name("small.bnn") / "posteriors/laplace.safetensors")
    expected = load_integrator("probit", projection="sum-zero").predict(
        posterior, features, num_samples=None, generator=torch.Generator()
    )
    np.testing.assert_allclose(read(small_run, "laplace.probit-sum-zero").probs, expected.probs, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--integrator", "mc", "--projection", "none"), "--projection: mc has no such setting; these integrators have it: bridge, .*probit"),
        (("--integrator", "probit", "--projection", "sideways"), "projection: expected .*; got 'sideways'"),
        (("--integrator", "mean-field", "--order", 7), "order: expected .*7"),
        (("--integrator", "quadrature", "--points", 3), "points: expected 8 to"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_refused(cli: Cli, small_run: Path, words: tuple[object, ...], message: str) -> None:
    done = cli("predict", small_run, "--posterior", "laplace", *words).expect(2)
    assert re.search(message, done.stderr)
    assert len(done.stderr.splitlines()) <= 2


class Warned(Ready):
    """What an integrator's prepare returns: with a warning, and a count of how often it was made."""

    made: ClassVar[list[dict[str, Any]]] = []

    def notes(self) -> dict[str, Any]:
        return {"pareto_k": 0.9, "warning": "the weights are uneven"}

    def predict(self, posterior: Any, features: torch.Tensor, **how: Any) -> Any:
        return Mc().predict(posterior, features, **{**how, "num_samples": 3})


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    def prepare(self: Mc, posterior: Any, **how: Any) -> Ready:
        Warned.made.append(how)
        monkeypatch.undo()  # Warned predicts by the true one
        return Warned()

    Warned.made.clear()
    monkeypatch.setattr(Mc, "prepare", prepare)
    monkeypatch.setattr(Mc, "needs_target", True, raising=False)
    return Warned.made


def test_integrator_is_prepared_once_with_the_target(cli: Cli, small_run: Path, prepared: list[dict[str, Any]]) -> None:
    done = cli("predict", small_run, "--posterior", "laplace", "--integrator", "mc", "--force", "--json")
    assert (done.code, len(done.json["outputs"]), len(prepared)) == (0, 3, 1)
    assert {entry["role"] for entry in done.json["inputs"]} >= {"features.train", "posterior"}
    target = prepared[0]["target"]
    assert (target.prior.weight_precision, target.num_examples, prepared[0]["num_samples"]) == (10.0, 240, 1000)
    assert done.json["warnings"] == ["laplace: the weights are uneven"]
    assert meta(read(small_run, "laplace.mc"))["pareto_k"] == 0.9


def test_integrator_names_missing_training_split(cli: Cli, small_run: Path, prepared: list[dict[str, Any]]) -> None:
    (small_run.with_name("small.bnn") / "features/train.h5").unlink()
    done = cli("predict", small_run, "--allow-stale", "--posterior", "laplace", "--integrator", "mc", "--json")
    assert (done.code, done.json["error"]["code"]) == (66, "missing_input")
    assert "extract-features" in done.json["error"]["hint"]


def test_energy_and_the_largest_logit_are_stored_for_every_posterior(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    cli("predict", small_run, "--split", "test", "--force").expect(0)
    features = read_features(folder / "features/test.h5").features.astype(np.float64)
    for name, made in (("laplace", "laplace.mc"), ("hmc", "hmc.mc"), ("map", "map.plug-in")):
        posterior, _ = open_posterior(next((folder / "posteriors").glob(f"{name}.*")))
        theta = posterior.draws.double().mean((0, 1)) if name == "hmc" else posterior.center
        weight, bias = posterior.layout.split(theta.double())
        logits = features @ weight.numpy().T + bias.numpy()
        content = read(small_run, made)
        np.testing.assert_allclose(content.energy, -special.logsumexp(logits, axis=1), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(content.max_logit, logits.max(axis=1), rtol=1e-5, atol=1e-5)
    assert np.isfinite(read(small_run, "refine.mc").energy).all()


def test_a_single_logit_has_the_energy_of_two_opposite_ones() -> None:
    one, two = HeadLayout(1, 3), HeadLayout(2, 3)
    generator = torch.Generator().manual_seed(0)
    theta, features = torch.randn(4, generator=generator), torch.randn(50, 3, generator=generator)
    doubled = two.flatten(torch.stack([-theta / 2, theta / 2]))
    for ours, theirs in zip(
        energy_and_max_logit(features, theta, one), energy_and_max_logit(features, doubled, two), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_posterior_without_a_center_has_the_mean_of_its_draws(small_run: Path) -> None:
    flow, _ = open_posterior(small_run.with_name("small.bnn") / "posteriors/refine.safetensors")
    mean = mean_theta(flow, torch.Generator().manual_seed(0))
    draws = flow.sample(20_000, torch.Generator().manual_seed(1)).double()
    error = draws.std(dim=0) * (1 / 256 + 1 / 20_000) ** 0.5
    assert ((mean - draws.mean(dim=0)).abs() < 5 * error).all()
    layout = HeadLayout(2, 1)
    stored = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(mean_theta(Samples(stored, layout), torch.Generator()), stored.mean(dim=(0, 1)))


@pytest.mark.parametrize("name", names("integrators"))
def test_blocks_predict_as_the_whole(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if getattr(load_integrator(name), "max_classes", 3) < 3:
        pytest.skip("for two classes")
    whole, blocks, halves = (small_run.with_name(part) for part in ("whole.h5", "blocks.h5", "halves.h5"))
    posterior = "lbbnn" if name == "mean" else "laplace"
    if posterior == "lbbnn":
        cli("fit-lbbnn", small_run, "--epochs", 1).expect(0)
    common = ("predict", small_run, "--posterior", posterior, "--split", "test", "--integrator", name)
    cli(*common, "--out", whole).expect(0)
    monkeypatch.setattr(run_inputs, "PREDICTION_BYTES", 7 * 5 * 4)
    cli(*common, "--out", blocks).expect(0)

    def refuse(block: torch.Tensor, *words: Any) -> Any:
        if len(block) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return energy_and_max_logit(block, *words)

    monkeypatch.setattr("bnncli.session.predictor.energy_and_max_logit", refuse)
    cli(*common, "--out", halves).expect(0)
    for array in ("probs", "entropy", "mutual_info", "interval", "log_concentration", "energy", "max_logit"):
        expected, *found = (getattr(read_predictions(path), array) for path in (whole, blocks, halves))
        assert all(one is expected is None or np.allclose(one, expected, rtol=1e-5, atol=1e-6) for one in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("integrator", "words"),
    [
        ("probit", ("fit-laplace", "--prior-precision", 10)),
        ("mc", ("refine", "--epochs", 1, "--length", 2)),
        ("mean", ("fit-lbbnn", "--epochs", 1)),
    ],
)
def test_cpu_predicts_with_gpu_posterior(cli: Cli, small_run: Path, integrator: str, words: tuple[object, ...]) -> None:
    command, *own = words
    cli(command, small_run, *own, "--name", "from-gpu", "--device", "cuda:0").expect(0)
    probs = []
    for device in ("cuda:0", "cpu"):
        file = small_run.with_name(f"{device[:3]}.h5")
        settings = ("--posterior", "from-gpu", "--split", "test", "--integrator", integrator, "--out", file)
        cli("predict", small_run, *settings, "--device", device).expect(0)
        probs.append(read_predictions(file).probs)
    np.testing.assert_allclose(probs[1], probs[0], atol=1e-5)
