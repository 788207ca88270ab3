"""Runs that Python opens: what they say is what lies in the folder, and nothing heavy is imported for it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.arrays import make_arrays
from problems.command_line import Cli

import bnncli
from bnncli.api.predictions import OpenedPosterior
from bnncli.api.run import OpenedRun
from bnncli.errors import BnnWarning, DataError, DeviceError, MissingInput, UsageError

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


def test_predictions_of_another_name_are_of_their_posterior(small_run: Path, cli: Cli) -> None:
    assert cli("predict", small_run, "--posterior", "map", "--split", "test", "--name", "other").code == 0
    assert cli("evaluate", small_run, "--posterior", "other", "--bootstrap", 20).code == 0
    rows = bnncli.open(small_run).metrics(posterior="map", split="test")
    assert [row["name"] for row in rows] == ["map.plug-in", "other"]


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
    with pytest.raises(UsageError, match=r"^device: expected auto, cpu, cuda or cuda:N; got 'gpu'$"):
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
    assert cli(*again).code == 0
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
    assert cli("fit-laplace", small_run, "--prior-precision", 0.1, "--force").code == 0
    after = run.predict(features, posterior="laplace", integrator="plug-in").probs
    assert np.abs(after - before).max() > 0.01
    assert np.array_equal(after, bnncli.open(small_run).predict(features, integrator="plug-in").probs)


def test_every_public_method_says_its_types_and_the_package_that_it_does() -> None:
    functions: list[Any] = [bnncli.open]
    for one in (OpenedRun, OpenedPosterior):
        members = [value for name, value in vars(one).items() if not name.startswith("_")]
        functions += [member.fget if isinstance(member, property) else member for member in members]
    assert len(functions) > 12
    for function in functions:
        signature = inspect.signature(function)
        said = [one.annotation for one in signature.parameters.values() if one.name != "self"]
        assert inspect.Signature.empty not in [*said, signature.return_annotation], function
    assert (Path(bnncli.__file__).parent / "py.typed").is_file()
