"""Graphs in ONNX and of torch.export: what they give, what they hold, and what is said where there are none."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.heads import THREE, gaussian_at_mode, head_target
from problems.optional_libraries import library
from torch import Tensor, nn

from bnncli.artifacts.exports import check_export, write_export
from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import DataError
from bnncli.export.graphs import FEATURES, INPUTS, ExportedModel, export_onnx, export_program
from bnncli.export.network import HalfPrecisionStorage, WholeNetwork
from bnncli.export.parts import add_ood_score, add_sets, head_parts
from bnncli.export.steps import PortableHead
from bnncli.integrators import load_integrator

pytestmark = pytest.mark.libraries

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


def inputs(count: int, *shape: int) -> Tensor:
    return 2 * torch.randn(count, *(shape or (4,)), generator=torch.Generator().manual_seed(count))


every_form = pytest.mark.parametrize("form", ["pt2", "onnx"])


@every_form
@pytest.mark.parametrize(("integrator", "structure"), HEADS)
def test_a_graph_gives_what_the_module_does_for_batches_of_any_size(form: str, integrator: str, structure: str) -> None:
    module = head(integrator, structure=structure)
    model = written_by(form)(module, inputs(2), input_name=FEATURES)
    for count in (1, 7):
        expected = module(inputs(count))
        found = model.run(inputs(count))
        assert list(found) == list(expected)
        for name, values in expected.items():
            assert torch.allclose(found[name].double(), values.double(), atol=2e-6), name


@every_form
def test_the_same_module_gives_the_same_bytes_and_nothing_of_the_machine(form: str) -> None:
    write, module = written_by(form), head("mc")
    content = write(module, inputs(2), input_name=FEATURES).content
    assert write(module, inputs(2), input_name=FEATURES).content == content
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
    content = written_by(form)(module, inputs(2), input_name=FEATURES).content
    digest = write_export(path, content, meta=META, provenance=PROVENANCE, may_replace=False)
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
    content = written_by(form)(head(), inputs(2), input_name=FEATURES).content
    write_export(path, content, meta=META, provenance=PROVENANCE, may_replace=False)
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
    content = export_program(head(), inputs(2), input_name=FEATURES).content
    write_export(path, content, meta=META, provenance=PROVENANCE, may_replace=False)
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


def test_what_onnx_needs_is_named_with_what_installs_it(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = cli(
        "export",
        small_run,
        "--posterior",
        "hmc",
        "--head-only",
        "--score",
        "max_prob",
        "--out",
        tmp_path / "head.onnx",
        "--json",
    )
    assert done.code == 0, done.stderr
    assert set(done.json["metrics"]["milliseconds"]) == {"onnxruntime", "torch"}
    assert max(done.json["metrics"]["parity"]["max_difference"].values()) < 1e-5
    session = library("onnxruntime").InferenceSession(tmp_path / "head.onnx")
    with np.load(small_run.with_name("features.npz")) as arrays:
        outputs = dict(
            zip(
                [one.name for one in session.get_outputs()],
                session.run(None, {"features": arrays["features_test"]}),
                strict=True,
            )
        )
    assert cli("predict", small_run, "--posterior", "hmc", "--samples", 100, "--split", "test", "--force").code == 0
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
    assert cli("predict", "lenet.pt", *words).code == 0
    capfd.readouterr()
    exec(found[2], {})
    shown = [line.split(maxsplit=2) for line in capfd.readouterr().out.splitlines()]
    rows = list(csv.DictReader(Path("new.csv").read_text().splitlines()))
    assert [one[0] for one in shown] == [row["predicted"] for row in rows]
    assert [float(one[1]) for one in shown] == pytest.approx([float(row["probability"]) for row in rows], abs=6e-4)
    decided = {("1", "0"): "accepted", ("1", "1"): "outlier", ("0", "1"): "outlier", ("0", "0"): "ask a person"}
    assert [one[2] for one in shown] == [decided[row["accept"], row["ood"]] for row in rows]
