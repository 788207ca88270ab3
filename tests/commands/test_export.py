"""export: the files give what predict does, say what they are, and are refused where they would not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run
from problems.installed import installed_parts
from problems.label_sets import label_arrays
from problems.transforms import WordLengths
from problems.words_model import write_weights
from torch import Tensor

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_decision
from bnncli.artifacts.predictions import PredictionFile, read_predictions
from bnncli.commands.export import build as measures
from bnncli.evaluation.decisions import AcceptanceRule, ClassRule, OutlierRule, SetRule
from bnncli.export import steps

TORCH = ("--format", "torch", "--head-only")
WHOLE = ("--draws", "100000")  # of predict


def folder_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.bnn")


def loaded(path: Path) -> Any:
    """The head in a file of tensors, by the module beside it, as somebody without bnncli has it."""
    space: dict[str, Any] = {}
    exec(path.with_suffix(".py").read_text(), space)
    return space["load"](path)


def features_of(run: Path, split: str) -> Tensor:
    with np.load(run.with_name(f"{run.name}.npz" if run.name != "small" else "features.npz")) as arrays:
        return torch.from_numpy(arrays[f"features_{split}"])


def predicted(run: Path, name: str, split: str = "test") -> PredictionFile:
    return read_predictions(folder_of(run) / "predictions" / name / f"{split}.h5")


def assert_as_predicted(outputs: dict[str, Tensor], expected: PredictionFile, *, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(outputs["probs"], expected.probs, atol=tolerance)
    np.testing.assert_allclose(outputs["entropy"], expected.entropy, atol=3 * tolerance)
    assert ("mutual_information" in outputs) == (expected.mutual_info is not None)
    if expected.mutual_info is not None:
        np.testing.assert_allclose(outputs["mutual_information"], expected.mutual_info, atol=3 * tolerance)


def check_every_integrator(cli: Cli, run: Path, *posteriors: str) -> int:
    """Export each posterior by every integrator that predict has for it; how many were."""
    count = 0
    for posterior in posteriors:
        asked = ("predict", run, "--posterior", posterior, "--split", "test")
        cli(*asked, "--integrator", "all", "--force").expect(0)
        for folder in sorted((folder_of(run) / "predictions").glob(f"{posterior}.*")):
            integrator = folder.name.partition(".")[2]
            done = cli("export", run, "--posterior", posterior, "--integrator", integrator, *TORCH, *WHOLE)
            if "cannot be exported" in done.stderr:
                assert (posterior, integrator) in {("laplace", "logit-mc"), ("laplace", "bridge")}
                continue
            assert done.code == 0, (posterior, integrator, done.stderr)
            assert ("shared by all inputs" in done.stderr) == integrator.startswith("logit-mc")
            outputs = loaded(folder_of(run) / "exports" / f"{folder.name}.safetensors")(features_of(run, "test"))
            # Draws of the logits are the same for all inputs of a file, and each row's own in predict: a Monte Carlo error apart.
            tolerance = 0.1 if integrator == "logit-mc" else 1e-5
            assert_as_predicted(outputs, predicted(run, folder.name), tolerance=tolerance)
            count += 1
    return count


def test_every_posterior_by_every_integrator_gives_what_predict_wrote(cli: Cli, small_run: Path) -> None:
    cli("fit-lbbnn", small_run, "--epochs", 1).expect(0)
    cli("fit-temperature", small_run).expect(0)
    found = check_every_integrator(cli, small_run, "laplace", "refine", "hmc", "map", "lbbnn", "temperature")
    assert found == 25


def test_one_logit_gives_two_classes(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    for split in ("train", "val", "test"):
        arrays[f"labels_{split}"] = arrays[f"labels_{split}"] % 2
    arrays["head_weight"], arrays["head_bias"] = arrays["head_weight"][:1], arrays["head_bias"][:1]
    run = new_run(cli, tmp_path / "one", arrays, "--ood", "far")
    cli("fit-laplace", run, "--prior-precision", 3).expect(0)
    assert check_every_integrator(cli, run, "laplace") == 8


def test_labels_of_which_an_example_has_several(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "labels", label_arrays(), "--task", "multilabel", "--ood", "far")
    cli("fit-laplace", run, "--prior-precision", 3, "--structure", "diag").expect(0)
    assert check_every_integrator(cli, run, "laplace") == 7


def test_fewer_examples_than_features(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays(num_features=30)
    few = {name: part[:12] if name.endswith("train") else part for name, part in arrays.items()}
    run = new_run(cli, tmp_path / "wide", few, "--ood", "far")
    cli("fit-laplace", run, "--prior-precision", 4).expect(0)
    assert "row_space_rank" in read_header(folder_of(run) / "posteriors" / "laplace.safetensors").meta
    assert check_every_integrator(cli, run, "laplace") == 6


@pytest.mark.long
def test_a_program_takes_batches_of_any_size(cli: Cli, small_run: Path) -> None:
    cli("export", small_run, "--posterior", "laplace", "--format", "pt2", "--head-only", *WHOLE).expect(0)
    program = torch.export.load(folder_of(small_run) / "exports" / "laplace.mc.pt2").module()
    features = features_of(small_run, "test")
    assert_as_predicted(program(features), predicted(small_run, "laplace.mc"))
    for count in (1, 7):
        few = program(features[:count])
        assert few["probs"].shape == (count, 3)
        assert torch.allclose(few["probs"], program(features)["probs"][:count], atol=1e-6)


@pytest.mark.long
def test_the_file_of_tensors_needs_no_bnncli(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    words = ("--posterior", "laplace", "--integrator", "bridge", "--out", tmp_path / "head.safetensors")
    cli("export", small_run, *words, *TORCH).expect(0)
    np.save(tmp_path / "x.npy", features_of(small_run, "test").numpy())
    lines = "import sys; sys.modules['bnncli'] = None; import numpy, torch; from head import load"
    lines += "; out = load('head.safetensors')(torch.from_numpy(numpy.load('x.npy')))"
    lines += "; numpy.savez('out.npz', **{name: value.numpy() for name, value in out.items()})"
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, check=True, env={"PYTHONPATH": ""})
    with np.load(tmp_path / "out.npz") as out:
        cli("predict", small_run, *words[:4], "--split", "test").expect(0)
        combined = predicted(small_run, "laplace.bridge").combined
        assert combined is not None
        np.testing.assert_allclose(out["ood_score"], -np.asarray(combined), atol=1e-3)
        assert_as_predicted({name: torch.from_numpy(out[name]) for name in out}, predicted(small_run, "laplace.bridge"))
    assert len((tmp_path / "head.py").read_text().splitlines()) < 80


NETWORK = """
from torch import nn

def make():
    layers = nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3)
    return nn.Sequential(*layers)
"""


@pytest.fixture
def checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a network by the user's own code on uint8 images, channels last, that are normalised."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    random = np.random.default_rng(0)
    for name, count in (("train", 60), ("val", 40), ("test", 30)):
        images = random.integers(0, 256, (count, 3, 3, 3), dtype=np.uint8)
        np.savez(f"{name}.npz", x=images, y=images[:, 0, 0, 0].astype(np.int64) % 3)
    space: dict[str, Any] = {}
    exec(NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")
    splits = [word for name in ("train", "val", "test") for word in ("--data", f"{name}=npz:{name}.npz")]
    words = ("--model", "net.py:make", "--mean", "0.4,0.5,0.6", "--std", "0.2,0.3,0.4", *splits)
    cli("extract-features", "ckpt.pt", *words).expect(0)
    cli("fit-laplace", "ckpt.pt", "--prior-precision", "3", "--structure", "kron").expect(0)
    cli("predict", "ckpt.pt", "--integrator", "probit", "--split", "test", "--posterior", "laplace").expect(0)
    return tmp_path / "ckpt.pt"


ASKED = ("export", "ckpt.pt", "--posterior", "laplace", "--integrator", "probit", "--format", "pt2")


@pytest.mark.long
def test_a_whole_network_takes_the_images_as_they_are_stored(cli: Cli, checkpoint: Path) -> None:
    done = cli(*ASKED, "--trust-code", "--json").expect(0)
    path = folder_of(checkpoint) / "exports" / "laplace.probit.pt2"
    program = torch.export.load(path).module()
    with np.load("test.npz") as arrays:
        images = torch.from_numpy(arrays["x"])
    assert_as_predicted(program(images), predicted(checkpoint, "laplace.probit"))
    assert program(images[:1])["probs"].shape == (1, 3)
    meta = read_header(path).meta
    assert (meta["input"]["type"], meta["input"]["shape"]) == ("uint8", ["batch", 3, 3, 3])
    assert "mean 0.4, 0.5, 0.6" in meta["input"]["preprocessing"]
    assert done.json["metrics"]["parity"]["rows"] == 40


CONVOLUTION = """
from torch import nn

def make():
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1), nn.Flatten()
    return nn.Sequential(*layers)
"""


@pytest.mark.long
@pytest.mark.parametrize("sized", [(), ("--resize", "8", "--crop", "6")], ids=["as stored", "resized"])
def test_a_head_that_is_a_convolution_and_images_that_are_resized_outside(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sized: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CONVOLUTION)
    space: dict[str, Any] = {}
    exec(CONVOLUTION, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (60, 12, 10), dtype=np.uint8)
    np.savez("data.npz", x=images, y=random.integers(0, 3, 60))
    data = ("--data", "train=npz:data.npz", "--hold-out", "val=train:20")
    cli("extract-features", "ckpt.pt", "--model", "net.py:make", *data, *sized).expect(0)
    cli("fit-laplace", "ckpt.pt", "--prior-precision", "1").expect(0)
    done = cli(*ASKED, "--trust-code", "--json").expect(0)
    program = torch.export.load(done.json["outputs"][0]["path"]).module()
    shape, dtype = ((1, 6, 6), torch.float32) if sized else ((12, 10), torch.uint8)
    meta = read_header(Path(done.json["outputs"][0]["path"])).meta
    assert meta["input"]["shape"] == ["batch", *shape]
    assert meta["input"]["preprocessing"].startswith("outside" if sized else "inside")
    assert program(torch.zeros(5, *shape, dtype=dtype))["probs"].shape == (5, 3)


@pytest.fixture
def words_kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`--model words:FILE`, as a distribution adds it."""
    with installed_parts(tmp_path_factory.mktemp("theirs"), "models", {"words": "problems.words_model"}):
        yield


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_several_inputs_keep_their_names_and_texts_may_have_any_length(
    cli: Cli, tmp_path: Path, words_kind: None, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_weights(Path("weights.safetensors"))
    texts = [f"{'a' * (row % 7 + 1)} {'b' * (row % 3 + 1)}" for row in range(60)]
    rows = ["text,label", *(f"{text},{row % 3}" for row, text in enumerate(texts))]
    Path("train.csv").write_text("\n".join(rows))
    data = ("--model", "words:weights.safetensors", "--data", "train=csv:train.csv")
    cli("extract-features", "ckpt", *data).expect(0)
    cli("fit-laplace", "ckpt", "--prior-precision", "1").expect(0)
    cli("predict", "ckpt", "--posterior", "laplace", "--integrator", "probit", "--split", "train").expect(0)
    cli("export", "ckpt", *ASKED[2:], "--trust-code", "--dtype", dtype).expect(0)
    path = folder_of(tmp_path / "ckpt") / "exports" / "laplace.probit.pt2"
    program = torch.export.load(path).module()
    longer = {name: torch.from_numpy(array) for name, array in WordLengths(9)(texts).inputs.items()}
    for rows_of in (slice(None), slice(0, 1)):
        outputs = program(**{name: tensor[rows_of] for name, tensor in longer.items()})
        expected = predicted(tmp_path / "ckpt", "laplace.probit", "train").probs[rows_of]
        np.testing.assert_allclose(outputs["probs"], expected, atol=1e-5 if dtype == "float32" else 1e-2)
    shapes = {one["name"]: (one["shape"], one["type"]) for one in read_header(path).meta["inputs"]}
    assert shapes["input_ids"] == (["batch", "sequence"], "int64")
    assert shapes["attention_mask"] == (["batch", "sequence"], "bool")


def test_code_of_the_network_is_not_run_without_trust(cli: Cli, checkpoint: Path) -> None:
    cli(*ASKED).expect(77, "--trust-code")
    cli(*ASKED, "--head-only").expect(0)
    cli(*ASKED, "--head-only", "--trust-code").expect(2)


@pytest.mark.long
def test_numbers_stored_as_float16_take_half_the_place(cli: Cli, checkpoint: Path) -> None:
    sizes, errors = {}, {}
    for dtype in ("float32", "float16"):
        done = cli(*ASKED, "--trust-code", "--dtype", dtype, "--name", dtype, "--json").expect(0)
        archive = torch.export.load(folder_of(checkpoint) / "exports" / f"{dtype}.pt2")
        sizes[dtype] = sum(tensor.nbytes for tensor in archive.state_dict.values())
        errors[dtype] = done.json["metrics"]["parity"]["max_difference"]["torch"]
    assert sizes["float16"] < 0.65 * sizes["float32"]  # what has few numbers stays whole
    assert errors["float32"] < 1e-5 < errors["float16"] < 1e-2


def test_a_run_without_a_network_has_its_head_alone(cli: Cli, small_run: Path) -> None:
    cli("export", small_run, "--posterior", "laplace", "--format", "pt2").expect(66, "--head-only")


def test_fewer_draws_are_stored_and_what_they_lose_is_said(cli: Cli, small_run: Path) -> None:
    words = ("export", small_run, "--posterior", "laplace", *TORCH, "--draws", 50, "--json")
    done = cli(*words)
    metrics = done.json["metrics"]
    assert metrics["draws"] == {"stored": 50, "predict": 1000}
    nll = metrics["nll"]
    assert nll["loss"] == pytest.approx(nll["export"] - nll["predict"])
    assert nll["loss"] != 0
    outputs = loaded(folder_of(small_run) / "exports" / "laplace.mc.safetensors")(features_of(small_run, "val"))
    labels = np.load(small_run.with_name("features.npz"))["labels_val"]
    own = -np.log(outputs["probs"].numpy()[np.arange(len(labels)), labels]).mean()
    assert nll["export"] == pytest.approx(own, abs=1e-6)
    assert "50 of predict's 1000; NLL" in " ".join(done.stderr.split())


def test_the_file_says_what_it_is(cli: Cli, small_run: Path) -> None:
    words = ("export", small_run, "--posterior", "laplace", "--integrator", "probit", *TORCH)
    cli(*words).expect(0)
    path = folder_of(small_run) / "exports" / "laplace.probit.safetensors"
    header = read_header(path)
    posterior = read_header(folder_of(small_run) / "posteriors" / "laplace.safetensors")
    assert posterior.content_digest in [entry["content_digest"] for entry in header.inputs]
    assert [output["name"] for output in header.meta["outputs"]] == ["probs", "entropy", "ood_score"]
    assert header.meta["classes"] == predicted(small_run, "laplace.mc").classes
    scores = loaded(path)(features_of(small_run, "val"))["ood_score"].numpy()
    for share, threshold in header.meta["thresholds"]["ood_score"]["at_most"].items():
        assert (scores <= np.float32(threshold)).mean() >= float(share) > (scores < np.float32(threshold)).mean()
    cli("verify", path).expect(0)
    assert "laplace.probit.safetensors" in cli("status", small_run).stdout
    assert "export" in cli("inspect", path).stdout


def test_the_same_again_is_up_to_date_and_other_options_are_refused(cli: Cli, small_run: Path) -> None:
    words = ("export", small_run, "--posterior", "laplace", "--integrator", "probit", *TORCH)
    first, again = cli(*words, "--json").json, cli(*words, "--json").json
    assert (first["action"], again["action"]) == ("computed", "up_to_date")
    assert first["outputs"] == again["outputs"]
    cli("status", small_run, "--check").expect(0)
    assert again["metrics"]["milliseconds"] is None
    cli(*words, "--score", "entropy").expect(73, "score: existing='combined', requested='entropy'")
    assert cli(*words, "--force", "--json").json["outputs"] == first["outputs"]
    module = folder_of(small_run) / "exports" / "laplace.probit.py"
    module.unlink()
    cli(*words).expect(0)
    assert module.read_text().startswith('"""Written by bnncli')


def test_a_file_is_not_named_as_one_of_another_format(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    words = ("export", small_run, "--posterior", "laplace", "--integrator", "probit", *TORCH)
    cli(*words, "--out", tmp_path / "head.onnx").expect(2, "add --format onnx or use another name")
    cli(*words, "--out", tmp_path / "head.st").expect(0)
    cli(*words, "--out", tmp_path / "head.st", "--score", "entropy").expect(73, "or another --out to keep both")


@pytest.mark.long
def test_an_export_of_another_posterior_is_stale(cli: Cli, small_run: Path) -> None:
    words = ("export", small_run, "--posterior", "laplace", "--format", "pt2", "--integrator", "probit", "--head-only")
    cli(*words).expect(0)
    cli("fit-laplace", small_run, "--prior-precision", "20", "--force").expect(0)
    state = {one["name"]: one["state"] for one in cli("status", small_run, "--json").json["artifacts"]}
    assert state["exports/laplace.probit.pt2"] == "stale"
    assert cli(*words, "--json").json["action"] == "replaced"


def test_somebody_elses_module_is_not_replaced(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    (tmp_path / "head.py").write_text("mine = 1\n")
    words = ("--posterior", "laplace", "--integrator", "probit", *TORCH, "--out", tmp_path / "head.safetensors")
    cli("export", small_run, *words).expect(73)
    assert (tmp_path / "head.py").read_text() == "mine = 1\n"
    assert not (tmp_path / "head.safetensors").exists()
    cli("export", small_run, *words[:-1], tmp_path / "head.py").expect(2)


@pytest.mark.long
def test_a_file_that_is_not_at_par_is_not_written(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(v: steps.Values) -> steps.Values:
        return {"logits": v["mean"] / (1 + 0.39 * v["variance"]).sqrt()}

    monkeypatch.setattr(steps, "probit", wrong)
    words = ("export", small_run, "--posterior", "laplace", "--integrator", "probit", "--format", "pt2", "--head-only")
    done = cli(*words, "--json")
    assert (done.code, done.json["error"]["code"]) == (70, "not_at_par")
    assert not (folder_of(small_run) / "exports").exists() or not [*(folder_of(small_run) / "exports").glob("*.pt2")]
    cli(*words, "--tolerance", "0.1").expect(0)


def test_posteriors_over_other_layers_are_refused(cli: Cli, checkpoint: Path) -> None:
    fit = ("fit-laplace", "ckpt.pt", "--layers", "all", "--structure", "diag", "--prior-precision", "3", "--trust-code")
    cli(*fit).expect(0)
    done = cli("export", "ckpt.pt", "--posterior", "laplace-all", "--head-only", "--format", "pt2", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "unsupported_export")


def test_hidden_layers_of_a_posterior_are_refused(cli: Cli, small_run: Path) -> None:
    assert cli("fit-lbbnn", small_run, "--epochs", 1, "--hidden", "3", "--name", "deep").code in (0, 2)
    if (folder_of(small_run) / "posteriors" / "deep.safetensors").exists():
        cli("export", small_run, "--posterior", "deep", *TORCH).expect(2, "its own hidden layers")


def test_without_a_name_it_is_what_auto_recommends(cli: Cli, small_run: Path) -> None:
    cli("export", small_run, *TORCH).expect(2, "--posterior (have: map, laplace, refine, hmc)")
    cli("auto", small_run).expect(0)
    rows = json.loads((folder_of(small_run) / "recommended.json").read_text())["rows"]
    best = next(row for row in rows if row["is_recommended"])
    cli("export", small_run, *TORCH).expect(0)
    found = [path.stem for path in (folder_of(small_run) / "exports").glob("*.safetensors")]
    assert found == [f"{best['posterior']}.{best['integrator']}"]


def test_a_run_without_val_is_judged_on_another_labelled_split(cli: Cli, tmp_path: Path) -> None:
    arrays = {name: part for name, part in make_arrays().items() if not name.endswith("val")}
    run = new_run(cli, tmp_path / "noval", arrays, "--ood", "far")
    assert cli("export", run, "--posterior", "map", *TORCH, "--json").json["metrics"]["parity"]["split"] == "test"


@pytest.mark.parametrize(
    "sets",
    [("lac", "--nonempty"), ("aps", "--nonrandomized"), ("raps", "--nonrandomized"), ("lac", "--class-conditional")],
)
def test_sets_of_a_rule_of_calibrate_are_in_the_file(cli: Cli, small_run: Path, sets: tuple[str, ...]) -> None:
    asked = ("--posterior", "laplace", "--integrator", "probit")
    cli("predict", small_run, *asked).expect(0)
    cli("calibrate", small_run, *asked, "--split", "test", "--coverage", "0.9", "--sets", *sets).expect(0)
    done = cli("export", small_run, *asked, *TORCH, "--decide", "sets", "--json").expect(0)
    assert done.json["metrics"]["sets"]["same"] >= 0.98
    found = loaded(folder_of(small_run) / "exports" / "laplace.probit.safetensors")(features_of(small_run, "test"))
    rule = read_decision(folder_of(small_run) / "decisions" / "laplace.probit" / "sets.safetensors").rule
    assert isinstance(rule, SetRule)
    expected = rule.sets(predicted(small_run, "laplace.probit").probs)
    assert (found["set"].numpy() == expected).all(
        axis=1
    ).mean() >= 0.98  # thresholds are scores: rounding decides there
    assert 0 < expected.mean() < 1


def test_rules_that_a_file_cannot_have_are_refused(cli: Cli, small_run: Path) -> None:
    asked = ("--posterior", "laplace", "--integrator", "probit")
    cli("predict", small_run, *asked).expect(0)
    calibrate = ("calibrate", small_run, *asked, "--split", "test")
    cli(*calibrate, "--sets", "aps", "--coverage", "0.7", "--name", "drawn").expect(0)
    cli(*calibrate, "--false-alarm", "0.1").expect(0)
    words = ("export", small_run, *asked, *TORCH, "--decide")
    assert "draws a random number for each example" in cli(*words, "drawn").stderr
    assert (
        "uses combined, but ood_score is entropy; add --score combined"
        in cli(*words, "ood", "--score", "entropy").stderr
    )
    cli(*calibrate, "--shift-level", "0.1").expect(0)
    assert "whole batches" in cli(*words, "shift").stderr
    for name in ("one", "two"):
        cli(*calibrate, "--sets", "lac", "--coverage", "0.7", "--name", name).expect(0)
    assert "but one and two each give a set" in cli(*words, "one", "--decide", "two").stderr
    cli(*words, "absent").expect(66)


def test_thresholds_of_rules_decide_on_what_the_file_gives_as_the_rules_do(
    cli: Cli, small_run: Path, tmp_path: Path
) -> None:
    asked = ("--posterior", "laplace", "--integrator", "probit")
    cli("predict", small_run, *asked).expect(0)
    rules = ("--sets", "lac", "--coverage", "0.8", "--false-alarm", "0.2", "--risk", "0.6", "--confidence", "0.8")
    rules = (*rules, "--recall", "0.5", "--class", "1", "--costs", tmp_path / "costs.csv")
    (tmp_path / "costs.csv").write_text("true,keep,drop\n0,0,1\n1,2,0\n2,2,0\n")
    fit = cli("calibrate", small_run, *asked, "--split", "test", *rules)
    assert fit.code in (0, 3), fit.stderr
    decided = [word for name in ("sets", "ood", "risk", "recall", "costs") for word in ("--decide", name)]
    done = cli("export", small_run, *asked, *TORCH, *decided).expect(0)
    path = folder_of(small_run) / "exports" / "laplace.probit.safetensors"
    about, found = read_header(path).meta["decisions"], loaded(path)(features_of(small_run, "val"))
    content = predicted(small_run, "laplace.probit", "val")
    probs, combined = content.probs, content.combined
    assert combined is not None
    folder = folder_of(small_run) / "decisions" / "laplace.probit"
    outliers = read_decision(folder / "ood.safetensors").rule
    accepted = read_decision(folder / "risk.safetensors").rule
    assert isinstance(outliers, OutlierRule)
    assert isinstance(accepted, AcceptanceRule)
    is_outlier = found["ood_score"].numpy() > about["ood"]["outlier_above"]
    assert (is_outlier == outliers.is_outlier(combined)).mean() >= 0.98
    assert 0 < is_outlier.mean() < 1
    least = about["risk"]["accept_largest_from"]
    is_accepted = np.zeros(len(probs), bool) if least is None else found["probs"].numpy().max(axis=1) >= least
    assert (is_accepted == accepted.accepts(probs.max(axis=1))).mean() >= 0.98
    flags = read_decision(folder / "recall.safetensors").rule
    assert isinstance(flags, ClassRule)
    is_flagged = found["probs"].numpy()[:, about["recall"]["class_index"]] >= about["recall"]["flag_from"]
    assert (is_flagged == flags.flags(probs)).mean() >= 0.98
    assert 0 < is_flagged.mean() < 1
    decided = (found["probs"].numpy() @ np.array(about["costs"]["costs"])).argmin(axis=1)
    assert (decided == read_decision(folder / "costs.safetensors").rule.decide(probs)[0]).mean() >= 0.98  # type: ignore[union-attr]
    assert about["costs"]["decisions"] == ["keep", "drop"]
    assert "recall: flags a probability of 1 of at least" in done.stderr
    assert (about["ood"]["false_alarm"], about["risk"]["risk"], about["sets"]["coverage"]) == (0.2, 0.6, 0.8)
    assert "marks an outlier, with 20.0% false alarms" in done.stderr


def test_batches_that_take_too_long_are_not_timed(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (20.0, 0.0):
        monkeypatch.setattr(measures, "_MOST_SECONDS", most)
        done = cli("export", small_run, "--posterior", "map", *TORCH, "--json", "--force")
        times = done.json["metrics"]["milliseconds"]["torch"]
        assert [size for size, one in times.items() if one] == (["1", "32", "1024"] if most else ["1"])


@pytest.mark.long
@pytest.mark.parametrize(("name", "form"), [("isotonic", "onnx"), ("beta", "pt2"), ("labels", "pt2")])
def test_a_calibration_map_of_predictions_gives_what_score_does(cli: Cli, tmp_path: Path, name: str, form: str) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript")
    generator = np.random.default_rng(0)
    probs = generator.random((200, 3)).astype(np.float32)
    labels = generator.random((200, 3)) < 0.2 + 0.5 * probs
    if name != "labels":
        probs, labels = probs / probs.sum(axis=1, keepdims=True), labels.argmax(axis=1)
    np.savez(tmp_path / "own.npz", probs=probs, label=labels.astype(int))
    fitted, table = tmp_path / "map.safetensors", tmp_path / "calibrated.npz"
    wanted = "platt" if name == "labels" else name
    task = ("--task", "multilabel") if name == "labels" else ()
    cli("score", tmp_path / "own.npz", *task, "--fit-calibration", wanted, "--out", fitted, "--bootstrap", 0).expect(0)
    cli("score", tmp_path / "own.npz", *task, "--calibration", fitted, "--out", table, "--bootstrap", 0).expect(0)
    cli("export", fitted, "--format", form).expect(0)
    made = tmp_path / f"map.{form}"
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(made.read_bytes(), providers=["CPUExecutionProvider"])
        found = session.run(["probs"], {"inputs": probs})[0]
    else:
        found = torch.export.load(made).module()(torch.from_numpy(probs))["probs"].numpy()
    with np.load(table) as arrays:
        np.testing.assert_allclose(found, arrays["probabilities"], atol=1e-5)
    assert cli("export", fitted, "--format", form, "--json").json["action"] == "up_to_date"
    cli("verify", made).expect(0)
    for words in (("--head-only",), ("--posterior", "laplace"), ("--format", "torch", "--head-only")):
        assert cli("export", fitted, *words).code == 2
