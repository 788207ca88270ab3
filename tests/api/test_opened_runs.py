"""What an open run gives: splits, metrics, posteriors, predictions."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli
from safetensors.numpy import load_file

import bnncli
from bnncli.api.predictions import OpenedPosterior
from bnncli.api.run import OpenedRun
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import BnnError, BnnWarning, DataError, DeviceError, MissingInput, UsageError
from bnncli.system.devices import configure_torch, keep_settings

LIGHT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in heavy:
            raise AssertionError(f"{name} is imported")

heavy = {"torch", "numpy", "scipy", "sklearn", "h5py", "typer", "rich", "matplotlib", "pyro"}
sys.meta_path.insert(0, Refuse())
import bnncli
bnncli.errors.BnnError
heavy = {"torch", "scipy", "sklearn", "typer", "rich", "matplotlib", "pyro"}
run = bnncli.open(sys.argv[1])
print(run.splits, run.posteriors, len(run.metrics()))
"""


def test_nothing_heavy_is_imported_before_something_is_computed(finished_run: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, finished_run], capture_output=True, text=True, timeout=60)
    expected = "('train', 'far', 'test', 'val') ('map', 'laplace', 'refine', 'hmc') 8\n"
    assert (done.stdout, done.stderr) == (expected, "")


def test_a_split_is_what_was_extracted(finished_run: Path) -> None:
    arrays, run = make_arrays(), bnncli.open(finished_run)
    test, far = run.split("test"), run.split("far")
    assert np.array_equal(test.features, arrays["features_test"])
    assert test.labels is not None
    assert np.array_equal(test.labels, arrays["labels_test"])
    assert (test.classes, test.is_ood) == (("0", "1", "2"), False)
    assert (far.labels, far.is_ood) == (None, True)


def test_metrics_are_the_rows_that_evaluate_stored(finished_run: Path) -> None:
    run, folder = bnncli.open(finished_run), finished_run.with_name("small.bnn")
    files = sorted((folder / "metrics").glob("*.json"))
    stored = [row for file in files for row in json.loads(file.read_text())["rows"]]
    assert run.metrics() == stored
    chosen = [row for row in stored if (row["posterior"], row["split"]) == ("laplace", "val")]
    assert run.metrics(posterior="laplace", split="val") == chosen == run.metrics(posterior="laplace.mc", split="val")
    assert len(chosen) == 1


def test_a_run_folder_may_lie_elsewhere(small_run: Path) -> None:
    small_run.with_name("small.bnn").rename(small_run.with_name("moved"))
    run = bnncli.open(small_run, run_dir=small_run.with_name("moved"))
    assert run.folder == small_run.with_name("moved")
    assert run.posteriors == ("map", "laplace", "refine", "hmc")
    with pytest.raises(MissingInput, match=r"no checkpoint .*small, and no run folder .*small.bnn"):
        bnncli.open(small_run)


def test_a_checkpoint_without_a_run_says_how_one_is_made(tmp_path: Path) -> None:
    (tmp_path / "ckpt.pt").write_bytes(b"x")
    with pytest.raises(MissingInput, match=r"ckpt.pt has no run folder") as caught:
        bnncli.open(tmp_path / "ckpt.pt")
    command = f"bnncli extract-features {tmp_path}/ckpt.pt --model MODEL --data train=SPEC --data test=SPEC"
    assert caught.value.__notes__ == [f"run: {command}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ckpt": 3}, "ckpt: expected a path; got 3"),
        ({"ckpt": "a" * 5000}, "ckpt: expected a path; got a name of 5000 bytes, more than 255"),
        ({"run_dir": "a\0b"}, r"run_dir: expected a path; got 'a.x00b'"),
        ({"seed": "1"}, "seed: expected a whole number; got '1'"),
        ({"seed": -1}, "seed: expected a whole number of at least 0; got -1"),
        ({"model": Path("net.py:make")}, r"model: expected a string; got PosixPath\('net.py:make'\)"),
        ({"device": 0}, "device: expected a string; got 0"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(finished_run: Path, arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        bnncli.open(**{"ckpt": finished_run, **arguments})


def test_a_device_that_is_not_there_is_refused_when_it_is_named(finished_run: Path) -> None:
    with pytest.raises(UsageError, match=r"^device: expected auto, cpu, cuda, cuda:N or mps; got 'gpu'$"):
        bnncli.open(finished_run, device="gpu")
    with pytest.raises(DeviceError, match=r"^device cuda:99: ") as caught:
        bnncli.open(finished_run, device="cuda:99")
    assert caught.value.__notes__ == ["use device auto or device cpu"]


def test_a_folder_is_no_checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingInput, match=r"^expected a checkpoint file; . is a folder"):
        bnncli.open(".")
    done = cli("fit-laplace", ".")
    assert (done.code, "Traceback" in done.stderr) == (66, False)
    assert "expected a checkpoint file; . is a folder" in done.stderr


def test_a_folder_in_place_of_metrics_hides_no_others(small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "metrics" / "laplace.mc.json"
    path.unlink()
    path.mkdir()
    run = bnncli.open(small_run)
    with pytest.warns(BnnWarning, match=r"skipping laplace.mc: .* is not a regular file"):
        assert {row["posterior"] for row in run.metrics()} == {"map", "refine", "hmc"}
    with pytest.raises(UsageError, match=r"^posterior: expected a string; got 5$"):
        run.metrics(posterior=5)  # type: ignore[arg-type]


def test_an_import_of_all_leaves_the_open_of_python() -> None:
    names: dict[str, Any] = {}
    exec("from bnncli import *", names)
    assert "open" not in names


def test_what_is_not_there_is_named_with_what_is(finished_run: Path) -> None:
    run = bnncli.open(finished_run)
    with pytest.raises(MissingInput, match=r"no features of split 'tets' .* did you mean 'test'"):
        run.split("tets")
    with pytest.raises(MissingInput, match=r"no posterior 'zz' .* available: map, laplace, refine, hmc"):
        run.posterior("zz")
    with pytest.raises(MissingInput, match=r"no metrics for posterior 'zz' .have: hmc, hmc.mc, laplace"):
        run.metrics(posterior="zz")
    with pytest.raises(MissingInput, match=r"no metrics for split 'far' .have: test, val"):
        run.metrics(split="far")


@pytest.mark.filterwarnings("ignore:skipping:bnncli.errors.BnnWarning")
def test_what_is_stale_is_an_error_unless_it_is_allowed(small_run: Path, cli: Cli) -> None:
    run = bnncli.open(small_run)
    features = np.array(run.split("test").features)
    before = run.predict(features, posterior="hmc").probs
    arrays = make_arrays()
    arrays["features_train"][0] += 1
    np.savez(small_run.with_name("features.npz"), **arrays)
    again = ("extract-features", small_run, "--from-npz", small_run.with_name("features.npz"), "--ood", "far")
    cli(*again).expect(0)
    with pytest.raises(DataError, match=r"hmc.nc is stale: features.train .* has changed") as caught:
        run.predict(features, posterior="hmc")
    assert caught.value.code == "stale_input"
    assert caught.value.__notes__[0].startswith(f"run: bnncli hmc {small_run} ")
    with pytest.warns(BnnWarning, match=r"hmc.nc is stale.*using it anyway \(allow_stale\)") as warned:
        after = run.predict(features, posterior="hmc", allow_stale=True).probs
    assert np.array_equal(after, before)
    assert {one.filename for one in warned} == {__file__}
    with pytest.raises(DataError, match=r"hmc.mc.json is stale"):
        run.metrics(posterior="hmc")
    with (
        pytest.warns(BnnWarning, match=r"skipping hmc.mc"),
        pytest.raises(DataError, match=r"all metrics files of the run are stale"),
    ):
        run.metrics()


def test_an_open_run_sees_what_a_command_makes_anew(small_run: Path, cli: Cli) -> None:
    run = bnncli.open(small_run)
    features = run.split("test").features
    before = run.predict(features, posterior="laplace", integrator="plug-in").probs
    cli("fit-laplace", small_run, "--prior-precision", 0.1, "--force").expect(0)
    after = run.predict(features, posterior="laplace", integrator="plug-in").probs
    assert np.abs(after - before).max() > 0.01
    assert np.array_equal(after, bnncli.open(small_run).predict(features, integrator="plug-in").probs)


def test_every_public_method_says_its_types_and_the_package_that_it_does() -> None:
    functions: list[Any] = [bnncli.open, bnncli.from_torch, bnncli.from_features, bnncli.from_predictions]
    for one in (OpenedRun, OpenedPosterior):
        members = [getattr(one, name) for name in vars(one) if not name.startswith("_")]
        functions += [member.fget if isinstance(member, property) else member for member in members]
    assert len(functions) > 12
    for function in functions:
        signature = inspect.signature(function)
        said = [one.annotation for one in signature.parameters.values() if one.name != "self"]
        assert inspect.Signature.empty not in [*said, signature.return_annotation], function
    assert (Path(bnncli.__file__).parent / "py.typed").is_file()


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
    cli("predict", small_run, *chosen, "--integrator", "all", "--force").expect(0)
    cli("predict", small_run, *chosen, "--integrator", "mc", "--qmc").expect(0)
    run, folder = bnncli.open(small_run, seed=3), small_run.with_name("small.bnn")
    for other in ("map", "refine", "hmc"):
        for path in folder.glob(f"predictions/{other}.*/test.h5"):
            path.unlink()
    found = check_stored(folder, run, run.split("test").features)
    expected = {"bridge", "importance", "logit-mc", "mc", "mc-qmc", "mean-field", "plug-in", "probit"}
    assert found == {f"laplace.{name}" for name in expected}


def test_outlier_scores_are_those_that_predict_stored_and_need_val(small_run: Path) -> None:
    run, folder = bnncli.open(small_run), small_run.with_name("small.bnn")
    for split in ("test", "far"):
        stored = read_predictions(folder / "predictions/laplace.mc" / f"{split}.h5").combined
        assert np.array_equal(run.ood_scores(run.split(split).features), -stored)
    (folder / "features/val.h5").unlink()
    with pytest.raises(DataError, match="of val"):
        bnncli.open(small_run).ood_scores(run.split("test").features)


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
        with keep_settings():
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
def test_bad_predict_options(finished_run: Path, request_: dict[str, Any], message: str, note: str | None) -> None:
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
    (lambda x: x[0, :4], r"^x: expected features \(N, D\) or inputs \(N, \.\.\.\); got shape \(4,\)\n"),
    (lambda x: x[:0], "^x: no examples$"),
    (lambda x: x.astype(complex), "^x: expected a numeric array or tensor; got ndarray of type complex128$"),
    (lambda x: torch.zeros(4, 5, dtype=torch.bool), "^x: .*; got a tensor of type bool$"),
    (lambda x: torch.zeros(4, 5).to_sparse(), "^x: .*; got a sparse, nested, quantized or meta tensor$"),
    (lambda x: "a text", r"^x: expected floating-point features \(N, 5\); got 1 text; the run .* has no network"),
    (lambda x: [[1.0, 2.0], [3.0]], "^x: expected a numeric array or tensor; got list$"),
    (
        lambda x: np.ma.masked_array(x, mask=x == 0),
        "^x: expected a numeric array or tensor; got a masked array: fill it",
    ),
    (lambda x: x + np.float32([[0], [0], [np.nan], [np.inf]]), "^x: 2 rows are not finite; the first is row 2\n"),
    (lambda x: x.astype(np.float64) + 1e300, "^x: 4 rows are not finite; the first is row 0\n"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_wrong_features_are_refused(finished_run: Path, change: Callable[[np.ndarray], Any], message: str) -> None:
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
