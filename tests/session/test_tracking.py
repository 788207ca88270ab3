"""`--log-to`: each tracker's own reader finds the numbers of the result."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from problems.command_line import Cli
from problems.optional_libraries import library

import bnncli
from bnncli.errors import UsageError
from bnncli.session.tracking import list_numbers

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported


@pytest.fixture(autouse=True)
def local_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores and settings in the test's folder, and no network."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("DIR", "CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))


def one_run() -> Any:
    """The only run in MLflow's store, as its client has it."""
    (found,) = library("mlflow").MlflowClient().search_runs(["0"])
    return found


def finished_records(folder: Path) -> list[Any]:
    """The records of the only offline run in a folder, once its service has written the last one."""
    for _ in range(200):
        records = list(wandb_records(folder))
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.05)
    raise AssertionError("the run has no end")


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records that are in the file: a log of blocks, as of LevelDB, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<4xHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def without_time(numbers: dict[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if name != "seconds"}


@pytest.mark.libraries
def test_mlflow_has_numbers_options_digest_and_report(cli: Cli, small_run: Path) -> None:
    library("mlflow")
    document = (
        cli("fit-laplace", small_run, "--name", "kron", "--structure", "kron", "--log-to", "mlflow", "--json")
        .expect(0)
        .json
    )
    found = one_run()
    assert document["logged"] == [
        {"tracker": "mlflow", "place": f"{os.environ['MLFLOW_TRACKING_URI']}, run {found.info.run_id}"}
    ]
    assert without_time(found.data.metrics) == without_time(list_numbers(document))
    assert found.data.metrics["val/network/nll"] == document["metrics"]["val"]["network"]["nll"]
    assert found.data.params["fit-laplace.structure"] == "kron"
    assert found.data.tags["bnncli.digest.kron"] == document["outputs"][0]["content_digest"]
    assert (found.info.run_name, found.info.status) == ("fit-laplace kron", "FINISHED")


@pytest.mark.libraries
@pytest.mark.usefixtures("pictures_are_names")
def test_commands_share_the_run_of_mlflow_that_is_named(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = library("mlflow").MlflowClient()
    started = client.create_run("0")
    for words in (["evaluate", small_run], ["report", small_run], ["fit-laplace", small_run, "--name", "again"]):
        monkeypatch.setenv("MLFLOW_RUN_ID", started.info.run_id)
        cli(*words, "--log-to", "mlflow").expect(0)
    (row, *_) = json.loads((small_run.with_name("small.bnn") / "metrics" / "laplace.mc.json").read_text())["rows"]
    nll = next(one["value"] for one in row["metrics"] if one["name"] == "nll")
    assert one_run().data.metrics[f"{row['split']}/laplace/mc/nll"] == pytest.approx(nll)
    assert {"evaluate.bins", "fit-laplace.structure"} <= set(one_run().data.params)
    assert [one.path for one in client.list_artifacts(started.info.run_id)] == ["report.html"]


@pytest.mark.libraries
def test_weights_and_biases_has_numbers_and_options(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    library("wandb")
    done = cli("fit-temperature", small_run, "--log-to", "wandb", "--json", "-q").expect(0)
    assert done.stderr == ""
    records = finished_records(tmp_path)
    logged = [item for one in records if one.HasField("history") for item in one.history.item]
    found = {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in logged}
    numbers = without_time(list_numbers(done.json))
    assert {name: found[name] for name in numbers} == pytest.approx(numbers)
    (config,) = [item for one in records if one.HasField("config") for item in one.config.update]
    assert config.key == "fit-temperature"
    assert json.loads(config.value_json)["bnncli.digest.temperature"] == done.json["outputs"][0]["content_digest"]


@pytest.mark.libraries
def test_an_active_run_gets_the_numbers_and_stays_active(small_run: Path) -> None:
    wandb, mlflow = library("wandb"), library("mlflow")
    with mlflow.start_run() as ours, wandb.init(settings=wandb.Settings(silent=True)) as run:
        result = bnncli.open(small_run).fit_temperature(log_to=["wandb", "mlflow"])
        nll = result.document["metrics"]["val_nll_after"]["value"]
        assert run.summary["val_nll_after"] == nll
        assert mlflow.active_run() is ours
    assert one_run().data.metrics["val_nll_after"] == nll


@pytest.mark.libraries
@pytest.mark.usefixtures("pictures_are_names")
def test_tensorboard_has_numbers_below_the_run_or_in_a_folder(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    library("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    document = (
        cli("evaluate", small_run, "--log-to", "tensorboard", "--log-to", "tensorboard:logs", "--json").expect(0).json
    )
    for folder in (small_run.with_name("small.bnn") / "tensorboard", tmp_path / "logs"):
        events = EventAccumulator(str(folder / "evaluate"))
        events.Reload()
        found = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
        assert without_time(found) == pytest.approx(without_time(list_numbers(document)))
        (options,) = events.Tensors("options/text_summary")
        assert b"bins: `15`" in options.tensor_proto.string_val[0]
    scored = small_run.with_name("small.bnn") / "predictions" / "laplace.mc" / "test.h5"
    cli("score", scored, "--log-to", "tensorboard").expect(2, "score has no run folder; add a folder: tensorboard:DIR")


@pytest.mark.libraries
def test_a_tracker_that_fails_leaves_the_result_and_a_warning(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    library("tensorboard")
    (tmp_path / "file").write_text("")
    done = cli("fit-laplace", small_run, "--name", "new", "--log-to", "tensorboard:file", "--json").expect(0)
    assert Path(done.json["outputs"][0]["path"]).is_file()
    (warning,) = done.json["warnings"]
    assert warning.startswith("--log-to tensorboard:file failed, but the result is complete: ")
    assert done.json["logged"] == [{"tracker": "tensorboard", "place": None}]
    cli("fit-laplace", small_run, "--name", "later", "--dry-run", "--log-to", "tensorboard:none").expect(0)
    assert not (tmp_path / "none").exists()


@pytest.mark.libraries
def test_what_a_tracker_lacks_is_told_before_the_work(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "nothing")
    library("wandb").teardown()
    cli("fit-laplace", small_run, "--name", "new", "--log-to", "wandb").expect(2, "no API key", "WANDB_MODE=offline")
    library("wandb").teardown()
    library("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://store")
    cli("fit-laplace", small_run, "--name", "new", "--log-to", "mlflow").expect(2, "--log-to mlflow cannot be used")
    assert not (small_run.with_name("small.bnn") / "posteriors" / "new.safetensors").exists()


def test_a_missing_library_is_told_before_the_work(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mlflow" else found(name, *rest)
    )
    done = cli("fit-laplace", small_run, "--name", "new", "--log-to", "mlflow")
    done.expect(2, "--log-to mlflow needs mlflow, which is not installed", "pip install 'bnncli[mlflow]'")
    with pytest.raises(UsageError, match="log_to mlflow needs mlflow"):
        bnncli.open(small_run).fit_laplace(name="new", log_to="mlflow")
    assert not (small_run.with_name("small.bnn") / "posteriors" / "new.safetensors").exists()
    cli("fit-laplace", small_run, "--log-to", "other").expect(
        2, "expected mlflow, wandb, tensorboard or tensorboard:DIR"
    )


def test_names_tell_all_numbers_of_a_result_apart() -> None:
    score = {
        "name": "ece",
        "value": 0.1,
        "bins": 15,
        "strategy": "equal-width",
        "norm": "l1",
        "interval": {"low": 0.0, "high": 0.2},
    }
    rows = [
        {
            "split": "test",
            "posterior": "laplace",
            "integrator": "mc",
            "metrics": [score, {**score, "value": 0.3, "strategy": "equal-mass"}],
        }
    ]
    group = {
        "split": "test",
        "group": "../a b",
        "metrics": [{"name": "auroc", "value": 0.5, "ood": "far", "score": "max_prob"}],
    }
    document = {
        "rows": rows,
        "groups": [group],
        "metrics": {
            "gain": {"value": 1, "standard_error": None},
            "nan": float("nan"),
            "good": True,
            "curve": [[1.0, 2.0]],
        },
        "inputs": [{"bytes": 1}],
    }
    assert list_numbers(document) == {
        "test/laplace/mc/ece": 0.1,
        "test/laplace/mc/ece_low": 0.0,
        "test/laplace/mc/ece_high": 0.2,
        "test/laplace/mc/ece-equal-mass": 0.3,
        "test/laplace/mc/ece-equal-mass_low": 0.0,
        "test/laplace/mc/ece-equal-mass_high": 0.2,
        "test/-a-b/far/auroc": 0.5,
        "gain": 1.0,
    }
