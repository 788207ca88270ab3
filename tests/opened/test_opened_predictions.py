"""Predictions from Python are those that the command stores, bit for bit; draws are the posterior's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.command_line import Cli
from safetensors.numpy import load_file

import bnncli
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import BnnError, BnnWarning, DataError, UsageError
from bnncli.system.devices import configure_torch, settings_kept

ARRAYS = ("probs", "entropy", "mutual_info", "interval")


def same(one: Any, other: Any) -> bool:
    return (one is None and other is None) or (one is not None and other is not None and np.array_equal(one, other))


def check_stored(folder: Path, run: Any, x: Any) -> set[str]:
    """Every stored prediction of the split test is what `run` gives for x; the names of those that were compared."""
    found = set()
    for path in sorted(folder.glob("predictions/*/test.h5")):
        stored = read_predictions(path)
        assert stored.header is not None
        meta = stored.header.meta
        request = {"posterior": meta["posterior"], "integrator": meta["integrator"], "samples": meta["samples"]}
        given = run.predict(x, **request, **meta["settings"])
        assert all(same(getattr(given, name), getattr(stored, name)) for name in ARRAYS), path
        assert (given.draws, given.interval_level) == (meta["draws"], meta["interval_level"])
        assert (list(given.classes), given.posterior) == (stored.classes, meta["posterior"])
        assert f"{given.posterior}.{given.integrator}" == path.parent.name
        found.add(path.parent.name)
    return found


def test_predictions_of_every_posterior_are_what_the_command_stored(finished_run: Path) -> None:
    run = bnncli.open(finished_run)
    found = check_stored(finished_run.with_name("small.bnn"), run, run.split("test").features)
    assert found == {"map.plug-in", "laplace.mc", "refine.mc", "hmc.mc"}


@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
def test_predictions_of_every_integrator_are_what_the_command_stored(small_run: Path, cli: Cli) -> None:
    chosen = ("--posterior", "laplace", "--split", "test", "--seed", 3, "--samples", 40)
    assert cli("predict", small_run, *chosen, "--integrator", "all", "--force").code == 0
    assert cli("predict", small_run, *chosen, "--integrator", "mc", "--qmc").code == 0
    run, folder = bnncli.open(small_run, seed=3), small_run.with_name("small.bnn")
    for other in ("map", "refine", "hmc"):
        for path in folder.glob(f"predictions/{other}.*/test.h5"):
            path.unlink()
    found = check_stored(folder, run, run.split("test").features)
    expected = {"bridge", "importance", "logit-mc", "mc", "mc-qmc", "mean-field", "plug-in", "probit"}
    assert found == {f"laplace.{name}" for name in expected}


def test_arrays_of_any_floating_type_and_home_are_features(finished_run: Path) -> None:
    run = bnncli.open(finished_run)
    features = run.split("test").features
    expected = run.predict(features, posterior="map").probs
    frozen = features.copy()
    frozen.flags.writeable = False
    forms = [
        torch.from_numpy(features.copy()).requires_grad_(),
        features.astype(np.float64),
        features.astype(">f4"),
        np.asfortranarray(features),
        frozen,
        features.tolist(),
    ]
    for form in forms:
        assert np.array_equal(run.predict(form, posterior="map").probs, expected)
    assert not np.array_equal(run.predict(features.astype(np.float16), posterior="map").probs, expected)


def test_draws_are_those_that_predict_with_the_softmax_averaged(finished_run: Path) -> None:
    run = bnncli.open(finished_run, seed=5)
    features = run.split("test").features
    posterior = run.posterior("laplace")
    draws = posterior.sample(200)
    assert (draws.shape, draws.dtype) == ((200, 18), torch.float32)
    parts = posterior.by_name(draws)
    logits = np.einsum("skd,nd->snk", parts["head.weight"].numpy().astype(float), features.astype(float))
    logits += parts["head.bias"].numpy()[:, None]
    softmax = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    given = run.predict(features, integrator="mc", samples=200)
    assert np.allclose(given.probs, softmax.mean(axis=0), atol=1e-6)


def test_a_seed_gives_the_same_draws_and_another_others(finished_run: Path) -> None:
    posterior = bnncli.open(finished_run, seed=5).posterior("refine")
    assert torch.equal(posterior.sample(7), posterior.sample(7, seed=5))
    assert torch.equal(posterior.sample(7, seed=6), bnncli.open(finished_run, seed=6).posterior("refine").sample(7))
    assert not torch.equal(posterior.sample(7), posterior.sample(7, seed=6))


def test_a_run_predicts_with_as_many_draws_as_each_call_asks_for(finished_run: Path) -> None:
    run = bnncli.open(finished_run)
    features = run.split("test").features
    found = [run.predict(features, integrator="mc", samples=size) for size in (5, 9, 5)]
    assert [one.draws for one in found] == [5, 9, 5]
    assert np.array_equal(found[0].probs, found[2].probs)
    assert not np.array_equal(found[0].probs, found[1].probs)


def test_the_mean_is_that_of_the_file(finished_run: Path) -> None:
    run, folder = bnncli.open(finished_run), finished_run.with_name("small.bnn")
    for name in ("map", "laplace"):
        stored = load_file(folder / f"posteriors/{name}.safetensors")["mean"]
        assert np.array_equal(run.posterior(name).mean.numpy(), stored)
    posterior = run.posterior("hmc")
    assert torch.allclose(posterior.mean, posterior.sample(128).mean(dim=0), atol=1e-6)
    assert (posterior.type, posterior.method, posterior.layout.num_params) == ("samples", "hmc", 18)


def test_what_a_caller_does_to_draws_does_not_change_the_posterior(finished_run: Path) -> None:
    posterior = bnncli.open(finished_run).posterior("hmc")
    draws = posterior.sample(128)
    kept = draws.clone()
    draws.zero_()
    posterior.mean.zero_()
    assert torch.equal(posterior.sample(128), kept)
    assert posterior.mean.abs().max() > 0


def test_more_draws_than_there_are_give_all_with_a_warning(finished_run: Path) -> None:
    run = bnncli.open(finished_run)
    with pytest.warns(BnnWarning, match=r"^asked for 129 draws, but hmc has only 128; returning all of them$"):
        assert len(run.posterior("hmc").sample(129)) == 128
    with pytest.warns(
        BnnWarning, match=r"^hmc has only 128 draws, fewer than samples 500; using all of them$"
    ) as caught:
        assert run.predict(run.split("test").features, posterior="hmc", samples=500).draws == 128
    assert caught[0].filename == __file__


def test_inside_a_call_torch_is_as_in_a_command_and_afterwards_as_it_was() -> None:
    def found() -> tuple[object, ...]:
        tf32 = torch.backends.cudnn.allow_tf32
        return torch.get_default_dtype(), torch.get_float32_matmul_precision(), tf32, torch.is_grad_enabled()

    before = found()
    torch.set_default_dtype(torch.float64)  # sparse posteriors are not read under it
    try:
        with settings_kept():
            configure_torch(threads=None, deterministic=False)
            assert found() == (torch.float32, "highest", False, False)
        assert found() == (torch.float64, *before[1:])
    finally:
        torch.set_default_dtype(torch.float32)


def test_torch_is_left_as_it_was(finished_run: Path) -> None:
    run = bnncli.open(finished_run)
    features = run.split("test").features
    expected = run.predict(features, posterior="refine").probs
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    try:
        assert np.array_equal(bnncli.open(finished_run).predict(features, posterior="refine").probs, expected)
        after = (torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.is_grad_enabled())
        assert after == ("medium", torch.float64, True)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore::bnncli.errors.BnnWarning")
def test_a_gpu_gives_what_the_cpu_gives(finished_run: Path) -> None:
    cpu = bnncli.open(finished_run, device="cpu")
    features = torch.from_numpy(np.array(cpu.split("test").features))
    expected = {name: cpu.predict(features, posterior=name).probs for name in cpu.posteriors}
    with pretend_cuda.pretend("cuda:0"):
        run = bnncli.open(finished_run)
        for name in run.posteriors:
            assert np.allclose(run.predict(features, posterior=name).probs, expected[name], atol=1e-5)
            posterior = run.posterior(name)
            assert {posterior.sample(2).device.type, posterior.mean.device.type} == {"cuda"}
        assert np.allclose(run.predict(features.to("cuda"), posterior="map").probs, expected["map"], atol=1e-5)
        assert np.array_equal(cpu.predict(features.to("cuda"), posterior="map").probs, expected["map"])


REFUSED = [
    (
        {"posterior": "laplac"},
        "no posterior 'laplac' .*available: map, laplace, refine, hmc",
        "did you mean 'laplace'?",
    ),
    ({"posterior": 1}, "^posterior: expected a string; got 1$", None),
    ({"integrator": "mcc"}, "^integrator: expected one of bridge, .*; got 'mcc'", "did you mean 'mc'?"),
    ({"integrator": "all"}, "^integrator: expected one of bridge, .*; got 'all'$", None),
    ({"integrator": "mean"}, "^integrator mean does not work for a gaussian posterior", "integrators for a gaussian"),
    (
        {"posterior": "hmc", "qmc": True},
        "^integrator mc-qmc does not work for a samples posterior",
        "integrators for a",
    ),
    ({"samples": 0}, "^samples: expected a whole number of at least 1; got 0$", None),
    ({"samples": 10**30}, "^samples: expected a whole number of at most 2147483647; got 1000", None),
    ({"samples": 2.5}, "^samples: expected a whole number; got 2.5$", None),
    ({"integrator": "probit", "samples": 9}, "^samples: probit has no draws; these integrators draw: ", None),
    ({"heat": 3}, r"^expected an integrator setting \(qmc, .*\); got 'heat'$", None),
    ({"qmc": 1}, "^qmc: expected True or False; got 1$", None),
    ({"order": 1}, "^order: mc has no such setting", "add integrator mean-field"),
    ({"integrator": "mean-field", "order": 1.5}, "^order: expected a whole number; got 1.5$", None),
    ({"integrator": "mean-field", "order": 9}, "order: expected one of 0, 1, 2; got 9$", None),
]


@pytest.mark.parametrize(("request_", "message", "note"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_predict_does_not_take_is_one_line_with_keywords(
    finished_run: Path, request_: dict[str, Any], message: str, note: str | None
) -> None:
    run = bnncli.open(finished_run)
    with pytest.raises(BnnError, match=message) as caught:
        run.predict(np.zeros((2, 5), np.float32), **request_)
    assert "--" not in str(caught.value)
    assert "\0" not in str(caught.value)
    notes = getattr(caught.value, "__notes__", [])
    assert notes == [] if note is None else notes[0].startswith(note)


FEATURES = np.zeros((4, 5), np.float32)
CHANGES: list[tuple[Callable[[np.ndarray], Any], str]] = [
    (
        lambda x: x[:, :3],
        r"^x: expected floating-point features \(N, 5\); got float32 of shape \(4, 3\); the run .* has no network",
    ),
    (lambda x: x.astype(np.int64), r"^x: expected floating-point features \(N, 5\); got int64 of shape \(4, 5\)"),
    (lambda x: x[0], r"^x: expected features \(N, D\) or inputs \(N, \.\.\.\); got shape \(5,\)\n"),
    (lambda x: x[:0], "^x: no examples$"),
    (lambda x: x.astype(complex), "^x: expected a numeric array or tensor; got ndarray of type complex128$"),
    (lambda x: torch.zeros(4, 5, dtype=torch.bool), "^x: .*; got a tensor of type bool$"),
    (lambda x: torch.zeros(4, 5).to_sparse(), "^x: .*; got a sparse, nested, quantized or meta tensor$"),
    (lambda x: "test", r"^x: expected a list of texts; got a single item\ngive \[x\]$"),
    (lambda x: [[1.0, 2.0], [3.0]], "^x: expected a numeric array or tensor; got list$"),
    (
        lambda x: np.ma.masked_array(x, mask=x == 0),
        "^x: expected a numeric array or tensor; got a masked array: fill it",
    ),
    (lambda x: x + np.float32([[0], [0], [np.nan], [np.inf]]), "^x: 2 rows are not finite; the first is row 2\n"),
    (lambda x: x.astype(np.float64) + 1e300, "^x: 4 rows are not finite; the first is row 0\n"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_arrays_that_are_no_features_are_refused(
    finished_run: Path, change: Callable[[np.ndarray], Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        bnncli.open(finished_run).predict(change(FEATURES), posterior="map")


def test_numbers_of_draws_and_seeds_are_checked(finished_run: Path) -> None:
    posterior = bnncli.open(finished_run).posterior("laplace")
    assert len(posterior.sample(np.int64(3))) == 3
    with pytest.raises(UsageError, match=r"^num: expected a whole number of at least 1; got 0$"):
        posterior.sample(0)
    with pytest.raises(UsageError, match=r"^num: expected a whole number of at most 2147483647; got 1000"):
        posterior.sample(10**30)
    with pytest.raises(DataError, match=r"^theta: expected a tensor \(..., 18\); got shape \(3,\)$"):
        posterior.by_name(torch.zeros(3))
    with pytest.raises(UsageError, match=r"^seed: expected a whole number; got 1.5$"):
        posterior.sample(1, seed=1.5)
