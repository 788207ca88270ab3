"""Exported heads and graphs."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.heads import ONE, THREE, TWO, at_random, gaussian_at_mode, head_target
from problems.optional_libraries import library
from torch import Tensor, nn

from bnncli.artifacts.exports import check_export, write_export
from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.export import EXPORTED_SCORES
from bnncli.errors import DataError, UsageError
from bnncli.evaluation.feature_scores import FittedViews
from bnncli.export import parts as exported_parts
from bnncli.export import parts as spreads
from bnncli.export.graphs import FEATURES, INPUTS, ExportedModel, export_onnx, export_program
from bnncli.export.network import HalfPrecisionStorage, WholeNetwork
from bnncli.export.parts import HeadParts, add_combined_score, add_ood_score, add_sets, head_parts, thin_to_budget
from bnncli.export.steps import PortableHead
from bnncli.integrators import Integrator, Prediction, load_integrator
from bnncli.integrators._moments import energy_and_max_logit
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.registry import names
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget

pytestmark = pytest.mark.libraries


LABELS = HeadLayout(3, 4, likelihood_name="multilabel")
LAYOUTS = [ONE, TWO, THREE, HeadLayout(3, 4, has_bias=False), LABELS]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "probit": [{}, {"projection": "sum-zero"}],
    "mean-field": [{}, {"projection": "none"}, {"order": 1}],
    "bridge": [{}, {"projection": "none"}, {"normalize": True}],
    "mc": [{}, {"qmc": True}],
    "quadrature": [{}, {"rule": "gauss-hermite"}],
}
PRIORS = [Prior(0.3), Prior(0.3, 2.0)]


def labels_of(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    if layout.likelihood.is_exclusive:
        return at_random(features, layout, generator)
    return torch.randint(2, (len(features), layout.num_classes), generator=generator).to(torch.uint8)


def fitted(layout: HeadLayout, structure: str, prior: Prior = PRIORS[0]) -> tuple[LastLayerTarget, Gaussian[Any]]:
    target = head_target(layout, labels=labels_of, prior=prior)
    return target, gaussian_at_mode(target, structure)


def prepared(integrator: Integrator, posterior: Any, target: Any = None, num_samples: int = 50) -> Any:
    generator = torch.Generator().manual_seed(2)
    ready: Any = integrator.prepare(posterior, num_samples=num_samples, generator=generator, target=target)
    return thin_to_budget(ready, num_samples, generator)


def both(
    name: str, posterior: Any, *, target: Any = None, count: int = 7, **settings: Any
) -> tuple[dict[str, Tensor], Prediction]:
    """What the exported head gives for standard normal features three times as large, and what the integrator does."""
    integrator = load_integrator(name, **settings)
    ready = prepared(integrator, posterior, target)
    features = 3 * torch.randn(count, posterior.layout.num_features, generator=torch.Generator().manual_seed(5))
    found = add_ood_score(head_parts(posterior, integrator, ready), "max_prob", posterior.layout, posterior.center)
    with torch.no_grad():
        outputs = found.module()(features)
    expected = ready.predict(posterior, features, num_samples=50, generator=torch.Generator().manual_seed(2))
    return outputs, expected


def assert_same(outputs: dict[str, Tensor], expected: Prediction, *, tolerance: float = 3e-6) -> None:
    assert (outputs["probs"] - expected.probs).abs().max() < tolerance
    assert (outputs["entropy"] - expected.entropy).abs().max() < 3 * tolerance
    assert ("mutual_information" in outputs) == (expected.mutual_info is not None)
    if expected.mutual_info is not None:
        assert (outputs["mutual_information"] - expected.mutual_info).abs().max() < 3 * tolerance


def does(name: str, layout: HeadLayout) -> bool:
    integrator = load_integrator(name)
    if not layout.likelihood.is_exclusive:
        return integrator.takes_labels and name != "bridge"
    return layout.num_classes <= integrator.max_classes


CASES = [
    pytest.param(name, settings, structure, layout, id=f"{name}-{settings}-{structure}-{layout}")
    for name in names("integrators")
    for settings, structure, layout in product(SETTINGS.get(name, [{}]), names("curvature"), LAYOUTS)
    if does(name, layout) and name != "mean" and ((name, structure) != ("logit-mc", "full") or layout is ONE)
]


@pytest.mark.parametrize(("name", "settings", "structure", "layout"), CASES)
def test_head_equals_its_integrator(name: str, settings: dict[str, Any], structure: str, layout: HeadLayout) -> None:
    for prior in PRIORS:
        target, posterior = fitted(layout, structure, prior if layout.has_bias else PRIORS[0])
        assert_same(*both(name, posterior, target=target, **settings))


def test_every_integrator_is_exported_or_says_what_is() -> None:
    """Those of the tables are all that there are; what cannot be written down names an integrator that can."""
    assert {name for name in names("integrators") if type(load_integrator(name)) not in exported_parts.MAKERS} == set()
    for name, settings, layout, structure in (
        ("mean-field", {"order": 2}, THREE, "kron"),
        ("bridge", {"projection": "conditional"}, THREE, "kron"),
        ("bridge", {}, LABELS, "kron"),
        ("logit-mc", {}, THREE, "full"),
    ):
        with pytest.raises(UsageError, match="cannot be exported") as caught:
            both(name, fitted(layout, structure)[1], **settings)
        assert "\0integrator\0" in str(caught.value.hint)


def test_variances_too_large_for_a_file_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreads, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match="variances of 3 logits over 4 features would need 0 KiB"):
        both("probit", fitted(THREE, "full")[1])


@pytest.mark.parametrize("name", ["plug-in", "probit", "bridge", "mc", "logit-mc"])
@pytest.mark.parametrize("layout", [ONE, TWO, THREE], ids=str)
def test_a_point_has_no_variance(name: str, layout: HeadLayout) -> None:
    assert_same(*both(name, Point(torch.randn(layout.num_params, dtype=torch.float64), layout)))


def test_two_logits_are_one_difference() -> None:
    assert_same(*both("probit", fitted(TWO, "full")[1], projection="difference"))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_bridge_is_right_for_tiny_and_huge_variances(scale: float) -> None:
    """Where float32 has next to no digits of the concentration left, the mutual information goes to 0, or the entropy."""
    posterior = fitted(THREE, "diag")[1]
    covariance = Diag(posterior.covariance.variances * scale)
    outputs, expected = both("bridge", Gaussian(posterior.mean, covariance, posterior.layout))
    assert_same(outputs, expected, tolerance=1e-5)


@pytest.mark.parametrize("layout", [ONE, THREE, HeadLayout(3, 4, has_bias=False)], ids=str)
def test_scores_of_the_centre_are_those_of_predict(layout: HeadLayout) -> None:
    posterior = fitted(layout, "kron", PRIORS[0])[1]
    integrator, features = load_integrator("probit"), 3 * torch.randn(9, 4)
    energy, max_logit = energy_and_max_logit(features, posterior.mean, layout)
    for name, expected in (("energy", energy), ("max_logit", -max_logit)):
        found = add_ood_score(head_parts(posterior, integrator, integrator), name, layout, posterior.mean)
        assert torch.allclose(found.module()(features)["ood_score"], expected, atol=1e-5)


def test_every_score_of_the_option_is_a_detector_with_its_sign_turned() -> None:
    from bnncli.evaluation import detectors

    assert set(EXPORTED_SCORES) == {*exported_parts.SCORES, "combined"}
    assert set(EXPORTED_SCORES) <= set(detectors.prediction_detectors())
    outputs, expected = both("mc", fitted(THREE, "kron")[1])
    assert torch.allclose(outputs["ood_score"], -expected.probs.amax(1), atol=1e-6)
    for name, wanted in (("entropy", expected.entropy), ("mutual_info", expected.mutual_info)):
        integrator, posterior = load_integrator("mc"), fitted(THREE, "kron")[1]
        parts = head_parts(posterior, integrator, prepared(integrator, posterior))
        features = 3 * torch.randn(7, 4, generator=torch.Generator().manual_seed(5))
        found = add_ood_score(parts, name, THREE, posterior.mean).module()(features)
        assert torch.allclose(found["ood_score"], wanted, atol=1e-5)


@pytest.mark.parametrize("layout", [ONE, THREE, HeadLayout(3, 4, has_bias=False), LABELS], ids=str)
@pytest.mark.parametrize("has_labels", [True, False])
def test_the_combined_score_is_that_of_predict(layout: HeadLayout, has_labels: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    train, labels = torch.randn(400, 4, generator=generator), torch.arange(400) % 3
    train[:, :3] += 3 * torch.nn.functional.one_hot(labels, 3)
    theta = torch.randn(layout.num_params, generator=generator, dtype=torch.float64)
    detector = FittedViews.fit(
        train[:300], labels[:300] if has_labels else None, train[300:], layout=layout, theta=theta,
        device=torch.device("cpu"), generator=generator,
    )  # fmt: skip
    posterior, features = Point(theta, layout), 3 * torch.randn(200, 4, generator=generator)
    features[0] = 0
    integrator = load_integrator("plug-in")
    found = add_combined_score(head_parts(posterior, integrator, prepared(integrator, posterior)), detector)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.float16, 0.2)):
        outputs = found.module(dtype=dtype)(features)
        assert torch.allclose(outputs["ood_score"].double(), -detector.scores(features), atol=tolerance, rtol=tolerance)


def test_mutual_information_is_no_score_where_there_is_none() -> None:
    posterior, integrator = fitted(THREE, "kron")[1], load_integrator("probit")
    with pytest.raises(UsageError, match="provides no mutual information"):
        add_ood_score(head_parts(posterior, integrator, integrator), "mutual_info", THREE, posterior.mean)


def test_labels_have_no_energy() -> None:
    posterior, integrator = fitted(LABELS, "diag")[1], load_integrator("probit")
    with pytest.raises(UsageError, match="multi-label"):
        add_ood_score(head_parts(posterior, integrator, integrator), "energy", LABELS, posterior.mean)


def naive_set(probs: Tensor, thresholds: Tensor, penalty: Tensor | None) -> list[list[bool]]:
    """By the definitions, a class at a time."""
    found = []
    for row in probs.double().tolist():
        order = sorted(range(len(row)), key=lambda k: -row[k])
        scores = [1 - p for p in row]
        if penalty is not None:
            used = 0.0
            for rank, k in enumerate(order):
                used += row[k]
                scores[k] = used + float(penalty[rank])
        limits = thresholds.expand(len(row)).tolist()
        found.append([score <= limit for score, limit in zip(scores, limits, strict=True)])
    return found


@pytest.mark.parametrize("thresholds", [torch.tensor([0.83]), torch.tensor([0.5, 0.9, 0.7])], ids=["one", "each"])
@pytest.mark.parametrize("penalty", [None, torch.zeros(3), torch.tensor([0.0, 0.1, 0.2])], ids=["lac", "aps", "raps"])
def test_sets_are_those_of_their_definitions(thresholds: Tensor, penalty: Tensor | None) -> None:
    posterior, integrator = fitted(THREE, "kron")[1], load_integrator("probit")
    parts = add_sets(head_parts(posterior, integrator, integrator), thresholds, penalty)
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
    outputs = parts.module()(features)
    assert outputs["set"].dtype == torch.bool
    assert outputs["set"].tolist() == naive_set(outputs["probs"], thresholds, penalty)
    assert 40 < int(outputs["set"].sum()) < 120


def test_halved_tensors_are_near_and_small_ones_and_tiny_numbers_stay_whole() -> None:
    tensors = {
        "drawn_weight": torch.randn(20, 3, 4),
        "directions": torch.full((8, 9), 1e-9),
        "weights": torch.full((100,), 0.01),
        "bias": torch.randn(3),
    }
    halved = HeadParts((), tensors).module(dtype=torch.float16)
    kinds = {name: buffer.dtype for name, buffer in halved.named_buffers()}
    assert [name for name, kind in kinds.items() if kind == torch.float16] == ["drawn_weight"]
    assert float(halved.weights.sum()) == pytest.approx(1)


def test_thinned_draws_are_among_the_draws_and_spread_over_them() -> None:
    posterior = fitted(THREE, "kron")[1]
    drawn = prepared(load_integrator("mc"), posterior, num_samples=1000)
    kept = thin_to_budget(drawn, 100, torch.Generator().manual_seed(1))
    places = [int((drawn.theta == theta).all(1).nonzero()) for theta in kept.theta]
    assert [place // 10 for place in places] == list(range(100))
    assert len({place % 10 for place in places}) == 10  # at a fixed distance repeats or chains would be left out
    assert thin_to_budget(drawn, 1000, torch.Generator()) is drawn
    weighted = replace(drawn, weights=torch.softmax(torch.randn(1000, dtype=torch.float64), 0))
    kept = thin_to_budget(weighted, 100, torch.Generator().manual_seed(1))
    assert float(kept.weights.sum()) == pytest.approx(1)
    assert torch.allclose(kept.weights / kept.weights[0], weighted.weights[places] / weighted.weights[places[0]])


Writer = Callable[..., ExportedModel]
# Every step once.
HEADS = [
    ("plug-in", "diag"), ("probit", "kron"), ("probit", "block"), ("mean-field", "diag"), ("bridge", "kron"), ("mc", "full"),
    ("logit-mc", "kron"), ("logit-mc", "diag"),
]  # fmt: skip


def written_by(form: str) -> Writer:
    if form == "pt2":
        return export_program
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name)
    return export_onnx


def head(integrator: str = "probit", *, structure: str = "kron", **dtype: torch.dtype) -> PortableHead:
    posterior, chosen = gaussian_at_mode(head_target(THREE), structure), load_integrator(integrator)
    ready = chosen.prepare(posterior, num_samples=20, generator=torch.Generator().manual_seed(0))
    parts = add_ood_score(head_parts(posterior, chosen, ready), "energy", THREE, posterior.mean)
    return add_sets(parts, torch.tensor([0.9]), torch.tensor([0.0, 0.05, 0.1]), is_filled=True).module(**dtype)


@cache
def written(form: str, integrator: str = "probit", structure: str = "kron") -> ExportedModel:
    """The graph of a head, the same for all tests."""
    return written_by(form)(head(integrator, structure=structure), inputs(2), input_name=FEATURES)


def inputs(count: int, *shape: int) -> Tensor:
    return 2 * torch.randn(count, *(shape or (4,)), generator=torch.Generator().manual_seed(count))


every_form = pytest.mark.parametrize("form", ["pt2", "onnx"])


@every_form
@pytest.mark.parametrize(("integrator", "structure"), HEADS)
def test_a_graph_gives_what_the_module_does_for_batches_of_any_size(form: str, integrator: str, structure: str) -> None:
    module, model = head(integrator, structure=structure), written(form, integrator, structure)
    for count in (1, 7):
        expected = module(inputs(count))
        found = model.run(inputs(count))
        assert list(found) == list(expected)
        for name, values in expected.items():
            assert torch.allclose(found[name].double(), values.double(), atol=2e-6), name


@every_form
def test_the_same_module_gives_the_same_bytes_and_nothing_of_the_machine(form: str) -> None:
    content = written(form, "mc", "full").content
    assert written_by(form)(head("mc", structure="full"), inputs(2), input_name=FEATURES).content == content
    for place in (str(Path(__file__).parents[2]), str(Path.cwd()), sys.prefix):
        assert place.encode() not in content
    assert b"steps.py" not in content
    assert b"bnncli.export" not in content
    assert b"pkg.torch.onnx" not in content


@every_form
def test_a_network_stored_as_float16_computes_with_float32(form: str) -> None:
    write = written_by(form)
    torch.manual_seed(0)
    trunk = (
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 40), nn.Linear(40, 4))
        .eval()
        .requires_grad_(False)
    )
    whole = WholeNetwork(HalfPrecisionStorage(trunk).eval(), head(dtype=torch.float16)).eval()
    model = write(whole, inputs(2, 1, 8, 8), input_name=INPUTS)
    found = model.run(inputs(5, 1, 8, 8))["probs"]
    exact = WholeNetwork(trunk, head()).eval()(inputs(5, 1, 8, 8))["probs"]
    assert 1e-7 < float((found - exact).abs().max()) < 1e-2
    full = write(WholeNetwork(trunk, head()).eval(), inputs(2, 1, 8, 8), input_name=INPUTS)
    assert len(model.content) < len(full.content) - 1.5 * 8 * 36 * 40


class Stubborn(nn.Module):
    """What goes on depends on the numbers: no graph has it."""

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"probs": features if float(features.sum()) > 0 else -features}


@every_form
def test_a_network_that_no_graph_can_have_is_refused_in_one_line(form: str) -> None:
    with pytest.raises(DataError, match="cannot export the network") as caught:
        written_by(form)(Stubborn(), inputs(2), input_name=FEATURES)
    assert "\n" not in str(caught.value)
    assert "head_only" in str(caught.value.hint)


def test_a_graph_too_large_for_one_file_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    write = written_by("onnx")
    monkeypatch.setattr("bnncli.export.graphs.MOST_ONNX_BYTES", 300)
    with pytest.raises(DataError, match=r"the graph has \d+ KiB, but one ONNX file holds at most 0 KiB"):
        write(head("mc"), inputs(2), input_name=FEATURES)


PROVENANCE = {"params_hash": "x", "params": {}, "algo_rev": 1, "command": [], "inputs": []}
META = {"posterior": "laplace", "variant": "probit", "format": "onnx", "metrics": {}, "classes": ["a", "b", "c"]}


@every_form
def test_a_file_says_what_it_is_and_still_runs(form: str, tmp_path: Path) -> None:
    path, module = tmp_path / "head", head()
    digest = write_export(path, written(form).content, meta=META, provenance=PROVENANCE, may_replace=False)
    header = read_header(path)
    assert (header.kind, header.content_digest, header.meta) == ("export", digest, META)
    assert check_export(path) == header
    if form == "pt2":
        extra = {"bnncli.json": ""}
        found = torch.export.load(path, extra_files=extra).module()(inputs(3))["probs"]
        assert '"classes":["a","b","c"]' in str(extra["bnncli.json"])
    else:
        session = library("onnxruntime").InferenceSession(path)
        found = torch.from_numpy(session.run(["probs"], {FEATURES: inputs(3).numpy()})[0])
        assert '"classes":["a","b","c"]' in session.get_modelmeta().custom_metadata_map["bnncli"]
        library("onnx").checker.check_model(str(path), full_check=True)
    assert torch.allclose(found, module(inputs(3))["probs"], atol=1e-6)


@every_form
def test_damage_anywhere_is_found(form: str, tmp_path: Path) -> None:
    path = tmp_path / "head"
    write_export(path, written(form).content, meta=META, provenance=PROVENANCE, may_replace=False)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for place in random.integers(len(whole), size=150).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            check_export(path)
        except DataError:
            continue
        assert form == "pt2", place  # a date or a comment of an archive changes nothing that anybody reads
    for size in (0, 1, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            check_export(path)


def test_other_weights_in_an_archive_that_is_whole_are_found(tmp_path: Path) -> None:
    path, other = tmp_path / "head", tmp_path / "other"
    write_export(path, written("pt2").content, meta=META, provenance=PROVENANCE, may_replace=False)
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(other, "w") as theirs:
        for name in ours.namelist():
            part = ours.read(name)
            theirs.writestr(name, bytes(len(part)) if name.endswith("weight_0") else part)
    assert read_header(other) == replace(read_header(path), path=other)
    with pytest.raises(DataError, match="does not match its digest"):
        check_export(other)


def test_graphs_of_others_are_no_artifacts(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    for content in (b"\x08\x08\x3a\x02\x0a\x00", b"PK\x03\x04" + bytes(30), b"\x08" * 40):
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            read_header(path)
        assert caught.value.code == "not_an_artifact"


def test_onnx_names_what_to_install(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name.startswith("onnx") else real(name, *rest)
    )
    done = cli("export", small_run, "--posterior", "laplace", "--head-only")
    assert (done.code, done.stderr.count("\n")) == (2, 2)
    assert "error: --format onnx needs onnx, which is not installed" in done.stderr
    assert "pip install 'bnncli[onnx]'" in done.stderr


def test_a_run_gives_an_onnx_file_that_runs_without_bnncli(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    written_by("onnx")
    words = shlex.split("--posterior hmc --head-only --score max_prob --json")
    done = cli("export", small_run, *words, "--out", tmp_path / "head.onnx").expect(0)
    assert set(done.json["metrics"]["milliseconds"]) == {"onnxruntime", "torch"}
    assert max(done.json["metrics"]["parity"]["max_difference"].values()) < 1e-5
    session = library("onnxruntime").InferenceSession(tmp_path / "head.onnx")
    with np.load(small_run.with_name("features.npz")) as arrays:
        values = session.run(None, {"features": arrays["features_test"]})
    outputs = dict(zip([one.name for one in session.get_outputs()], values, strict=True))
    cli("predict", small_run, "--posterior", "hmc", "--samples", 100, "--split", "test", "--force").expect(0)
    expected = read_predictions(small_run.with_name("small.bnn") / "predictions" / "hmc.mc" / "test.h5")
    assert np.abs(outputs["probs"] - expected.probs).max() < 0.05  # other draws of the same chains
    np.testing.assert_allclose(outputs["ood_score"], -outputs["probs"].max(axis=1))


# The fixtures are smaller than the data of the example.
SMALLER = {
    "train=npz:train.npz": "train=npz:train.npz@500",
    ":2000": ":600",
    "--risk 0.02": "--risk 0.2",
    "accuracy>=0.9": "accuracy>=0.8",
}


def test_the_tutorial_of_a_nightly_job_runs_as_it_stands(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    written_by("onnx")
    root = Path(__file__).parents[2]
    text = (root / "docs/tutorials/production.md").read_text()
    found = re.search(r"<!-- job -->\n```sh\nset -eu\n(.*?)```.*<!-- serve -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    assert len(found[2].splitlines()) <= 11
    monkeypatch.chdir(tmp_path)
    for name, own in (("lenet5-fmnist.pt", "lenet.pt"), ("train.npz", "train.npz"), ("test.npz", "test.npz")):
        shutil.copy(root / "fixtures" / name, own)
    commands = found[1]
    for old, new in SMALLER.items():
        assert old in commands
        commands = commands.replace(old, new)
    for line in commands.replace("\\\n", " ").splitlines():
        assert cli(*shlex.split(line)[1:]).code == 0, line
    np.savez("test.npz", x=np.load("test.npz")["x"][:5])
    words = ("--posterior", "laplace", "--integrator", "probit", "--data", "new=npz:test.npz", "--table", "new.csv")
    cli("predict", "lenet.pt", *words).expect(0)
    capfd.readouterr()
    exec(found[2], {})
    shown = [line.split(maxsplit=2) for line in capfd.readouterr().out.splitlines()]
    rows = list(csv.DictReader(Path("new.csv").read_text().splitlines()))
    assert [one[0] for one in shown] == [row["predicted"] for row in rows]
    assert [float(one[1]) for one in shown] == pytest.approx([float(row["probability"]) for row in rows], abs=6e-4)
    decided = {("1", "0"): "accepted", ("1", "1"): "outlier", ("0", "1"): "outlier", ("0", "0"): "ask a person"}
    assert [one[2] for one in shown] == [decided[row["accept"], row["ood"]] for row in rows]
