"""Golden files: what was written under a released schema is read for ever, with the same numbers."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts import headers
from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.posteriors import read_decision
from bnncli.artifacts.predictions import read_predictions
from bnncli.artifacts.samples import read_samples
from bnncli.evaluation.decisions import SetRule
from bnncli.session.inputs import open_posterior
from bnncli.session.revisions import is_another

pytestmark = pytest.mark.core

SCHEMA = Path(__file__).parents[2] / "fixtures" / "schema"
VERSIONS = sorted(path for path in SCHEMA.iterdir() if path.is_dir() and path.name[0].isdigit())
KINDS = {"features", "posterior", "samples", "predictions", "metrics", "decision", "export"}


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def expected(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "expected.json").read_text())


def test_the_schema_that_is_written_has_its_golden_files() -> None:
    assert headers.SCHEMA in [path.name for path in VERSIONS]


def test_there_is_a_small_golden_file_of_every_kind(golden: Path) -> None:
    files = [path for path in golden.iterdir() if path.name != "expected.json"]
    assert {read_header(path).kind for path in files} == KINDS
    assert {read_header(path).schema for path in files} == {golden.name}
    assert sum(path.stat().st_size for path in golden.iterdir()) < 100_000


def test_golden_files_keep_their_digests(cli: Cli, golden: Path, expected: dict[str, Any]) -> None:
    paths = [golden / name for name in expected["digests"]]
    cli("verify", *paths).expect(0)
    assert {path.name: read_header(path).content_digest for path in paths} == expected["digests"]


def test_golden_features_are_read(golden: Path, expected: dict[str, Any]) -> None:
    split = read_features(golden / "features.h5", is_full_check=True)
    assert split.labels is not None
    assert split.labels.tolist() == expected["labels"]
    assert split.features.astype(np.float64).sum() == pytest.approx(expected["features_sum"], abs=1e-12)
    assert split.features.shape == (30, 2)


def test_golden_names_are_read(golden: Path, expected: dict[str, Any]) -> None:
    split = read_features(golden / "named-features.h5", is_full_check=True)
    assert split.names is not None
    assert split.names[0].decode() == "image 00.png"
    assert split.names[-1].decode() == expected["last_name"] == "last, \u732b.png"


def test_golden_posteriors_are_read_and_draw(golden: Path, expected: dict[str, Any]) -> None:
    laplace, _ = open_posterior(golden / "laplace.safetensors")
    flow, _ = open_posterior(golden / "posterior.safetensors")
    assert laplace.mean.tolist() == expected["laplace_mean"]
    assert flow.base.mean.tolist() == expected["flow_base_mean"]
    assert len(flow.layers) == expected["flow_length"] == 2
    assert torch.isfinite(flow.sample(5, torch.Generator().manual_seed(0))).all()


def test_golden_draws_predictions_and_metrics_are_read(golden: Path, expected: dict[str, Any]) -> None:
    samples = read_samples(golden / "samples.nc")
    assert samples.head_weight.shape == (2, 5, 3, 2)
    assert samples.head_weight.astype(np.float64).sum() == pytest.approx(expected["head_weight_sum"], abs=1e-12)
    content = read_predictions(golden / "predictions.h5")
    probs = content.probs
    if not expected.get("has_groups"):  # made before groups of draws were kept
        assert content.group_probs is content.group_rows is content.group_weights is None
    assert probs[0].tolist() == expected["first_probs"]
    labels = np.arange(30) % 3
    nll = -np.log(probs.astype(np.float64)[np.arange(30), labels]).mean()
    assert expected["nll"] == pytest.approx(nll, rel=1e-6)
    rows = read_metrics(golden / "metrics.json").meta["rows"]
    assert expected["nll"] in [metric["value"] for metric in rows[0]["metrics"]]


def test_golden_rules_are_read(golden: Path, expected: dict[str, Any]) -> None:
    rule = read_decision(golden / "decision.safetensors").rule
    assert isinstance(rule, SetRule)
    assert rule.thresholds.tolist() == expected["set_thresholds"]
    assert rule.sets(np.array([[0.98, 0.01, 0.01]])).tolist() == [[True, False, False]]


def maker_of_golden_files() -> Any:
    spec = importlib.util.spec_from_file_location("make_schema", SCHEMA / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_golden_exports_predict_by_the_module_that_they_hold(golden: Path) -> None:
    meta = read_header(golden / "export.safetensors").meta
    module: dict[str, Any] = {}
    exec(meta["code"], module)
    features = np.array(read_features(golden / "named-features.h5").features)
    outputs = module["load"](str(golden / "export.safetensors"))(torch.from_numpy(features))
    assert [output["name"] for output in meta["outputs"]] == list(outputs)
    parity, probs = meta["metrics"]["nll"], outputs["probs"].double().numpy()
    assert -np.log(probs[np.arange(30), np.arange(30) % 3]).mean() == pytest.approx(parity["export"], rel=1e-5)
    assert outputs["set"].sum(dim=1).double().mean().item() == meta["metrics"]["sets"]["size"]


def test_exports_say_of_themselves_what_the_golden_one_says(
    golden: Path, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = maker_of_golden_files()
    assert maker.types_of(dict(read_header(golden / "export.safetensors").meta)) == expected["export_meta"]
    if golden.name != headers.SCHEMA:
        return
    monkeypatch.chdir(tmp_path)
    maker.make_run(tmp_path)
    own = read_header(tmp_path / "tiny.bnn" / maker.FILES["export.safetensors"])
    assert maker.types_of(dict(own.meta)) == expected["export_meta"]


def test_golden_files_work_as_a_run(cli: Cli, golden: Path, tmp_path: Path) -> None:
    places = {"features.h5": "features/train.h5", "laplace.safetensors": "posteriors/laplace.safetensors"}
    for name, place in places.items():
        (tmp_path / "tiny.bnn" / place).parent.mkdir(parents=True)
        shutil.copy(golden / name, tmp_path / "tiny.bnn" / place)
    request: tuple[object, ...] = ("refine", tmp_path / "tiny", "--epochs", 1, "--length", 1)
    if is_another(read_header(golden / "laplace.safetensors")):
        cli(*request).expect(65, "is stale: made by another revision of the algorithm")
        request += ("--allow-stale",)
    cli(*request).expect(0)
