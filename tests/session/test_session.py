"""Sessions: named posteriors, memory, publication, rows of references."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.arrays import make_wide_arrays
from problems.command_line import Cli, new_run
from torch import nn

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import read_posterior
from bnncli.artifacts.predictions import PredictionFile
from bnncli.console import Console
from bnncli.errors import CheckFailed, DataError, DeviceError, UsageError
from bnncli.options.command import CommandLine, CommonOptions, ComputeOptions, NameOptions, RunOptions, WriteOptions
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.posteriors.point import Point
from bnncli.session.costs import TotalCost, total_cost
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import load_split
from bnncli.session.prediction_files import GivenPredictions, matching_rows
from bnncli.session.prediction_memory import PosteriorMemory, require_prediction
from bnncli.session.run import Result, Run

ALL = "--layers all"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("refine --base own", "bnncli fit-laplace {} --name own"),
        ("refine --base laplace", "bnncli fit-laplace {}"),
        ("refine --base laplace-all --trust-code", f"bnncli fit-laplace {{}} {ALL} --trust-code"),
        (f"refine {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        (f"refine {ALL} --base own", f"bnncli fit-laplace {{}} {ALL} --name own"),
        ("hmc", "bnncli fit-laplace {}"),
        ("hmc --layers fc --trust-code", "bnncli fit-laplace {} --layers fc --trust-code"),
        ("hmc --base own", "bnncli fit-laplace {} --name own"),
        ("predict --posterior laplace-all", f"bnncli fit-laplace {{}} {ALL}"),
        ("predict --posterior hmc-all --trust-code", f"bnncli hmc {{}} {ALL} --trust-code"),
        ("predict --posterior hmc-al", "did you mean 'hmc'?"),
        ("predict --posterior own", "bnncli status {}"),
        ("diagnose --posterior temperature", "bnncli fit-temperature {}"),
        ("evaluate --posterior laplace", "bnncli fit-laplace {}"),
        ("evaluate --posterior refine", "bnncli predict {} --posterior refine"),
        ("evaluate --posterior refine.mc", "bnncli predict {} --posterior refine"),
        ("evaluate --posterior own", "bnncli status {}"),
        (f"evaluate {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        (f"compare {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        ("prune", "bnncli fit-lbbnn {}"),
        ("fit-temperature --base own", "bnncli fit-laplace {} --name own"),
    ],
)
def test_the_hint_makes_what_is_not_there(cli: Cli, small_run: Path, words: str, hint: str) -> None:
    folder = small_run.with_name("small.bnn")
    (folder / "posteriors" / "laplace.safetensors").unlink()
    for name in ("laplace", "refine"):
        for path in (folder / "predictions").glob(f"{name}.*/*"):
            path.unlink()
    command, *rest = words.split()
    refused = cli(command, small_run, *rest)
    assert (refused.code, refused.stderr.splitlines()[-1]) == (66, f"hint: {hint.format(small_run)}")


@pytest.fixture
def wide_run(cli: Cli, tmp_path: Path) -> Path:
    return new_run(cli, tmp_path / "run", make_wide_arrays(num_test=40))


def warning(cli: Cli, *words: object) -> str:
    (text,) = [text for text in cli(*words, "--json").json["warnings"] if "predicts val worse" in text]
    return str(text).partition("%). ")[2].replace("Run bnncli", "run bnncli").replace("Use the", "use the")


def test_each_step_that_was_taken_makes_way_for_the_one_after_it(cli: Cli, wide_run: Path) -> None:
    run, folder = shlex.quote(str(wide_run)), wide_run.with_name("run.bnn") / "predictions"
    words = ("fit-laplace", wide_run, "--structure", "kron", "--prior-precision", 5)
    advice = warning(cli, *words)
    assert f"run bnncli fit-temperature {run} (" in advice
    assert f"run bnncli predict {run} --posterior map (" in advice
    cli("fit-temperature", wide_run).expect(0)
    advice = warning(cli, *words)
    assert "fit-temperature" not in advice
    assert f"run bnncli predict {run} --posterior temperature (" in advice
    cli("predict", wide_run, "--posterior", "temperature", "--posterior", "map").expect(0)
    advice = warning(cli, *words)
    for name in ("temperature", "map"):
        assert f"--posterior {name}" not in advice
        assert f"use the predictions in {folder / name}.plug-in (" in advice


def test_predictions_of_fewer_splits_or_of_other_features_are_still_to_be_made(cli: Cli, wide_run: Path) -> None:
    words = ("fit-laplace", wide_run, "--structure", "kron", "--prior-precision", 5)
    cli("predict", wide_run, "--posterior", "map", "--split", "val").expect(0)
    assert f"predict {shlex.quote(str(wide_run))} --posterior map (" in warning(cli, *words)
    cli("predict", wide_run, "--posterior", "map").expect(0)
    assert "--posterior map (" not in warning(cli, *words)
    new_run(cli, wide_run, make_wide_arrays(num_test=39), "--force")
    assert f"predict {shlex.quote(str(wide_run))} --posterior map (" in warning(cli, *words, "--force")


def test_a_refinement_of_the_gaussian_is_not_advised_again(cli: Cli, wide_run: Path) -> None:
    words = ("fit-laplace", wide_run, "--structure", "kron", "--prior-precision", 5)
    assert "refine" in warning(cli, *words)
    cli("refine", wide_run, "--flow", "affine", "--epochs", 2, "--elbo-draws", 16).expect(0)
    advice = warning(cli, *words)
    assert f"bnncli refine {shlex.quote(str(wide_run))} --flow affine" not in advice


def test_a_temperature_of_a_posterior_takes_no_name_that_is_taken(cli: Cli, tmp_path: Path) -> None:
    arrays = make_wide_arrays(num_test=40)
    weight = arrays["head_weight"]
    noise = 2 * weight.std() * np.random.default_rng(1).normal(size=weight.shape)
    arrays["head_weight"] = (weight + noise).astype(
        np.float32
    )  # a network that is worse than the mode, both at one temperature
    run = new_run(cli, tmp_path / "run", arrays)
    words = ("fit-laplace", run, "--structure", "kron", "--prior-precision", 300, "--name", "other")
    cli(*words).expect(0)
    cli("fit-temperature", run, "--base", "other").expect(0)
    words = (*words[:-1], "another")
    line = next(part for part in warning(cli, *words).split(", or ") if "fit-temperature" in part)
    command = shlex.split(line.removeprefix("run ").removeprefix("Run ").partition(" (")[0])
    assert command[-2:] == ["--name", "another-temperature"]
    cli(*command[1:]).expect(0)
    assert "fit-temperature" not in warning(cli, *words)


def test_diagnose_goes_on_from_what_has_been_predicted_and_scored(cli: Cli, small_run: Path) -> None:
    def following() -> Any:
        return shlex.split(cli("diagnose", small_run, "--posterior", "laplace", "--json").json["verdict"]["run"])

    first = following()
    if first[1] == "fit-temperature":
        cli(*first[1:]).expect(0)
        first = following()
    assert first[1] == "predict"
    cli(*first[1:]).expect(0)
    assert following()[1] == "evaluate"
    cli("evaluate", small_run).expect(0)
    assert following()[1] == "compare"


@pytest.fixture
def laplace(finished_run: Path) -> Header:
    return read_header(finished_run.with_name("small.bnn") / "posteriors/laplace.safetensors")


def test_training_that_nobody_told_of_is_unknown(laplace: Header) -> None:
    found = total_cost(laplace)
    assert found.training is None
    assert found.network == 0
    assert found.head is not None
    assert found.head > 0


def test_training_is_that_of_the_network_beside_it(laplace: Header, monkeypatch: pytest.MonkeyPatch) -> None:
    network = read_header(laplace.path.with_name("map.safetensors"))
    told = replace(network, meta={**network.meta, "gradient_passes": 100})
    monkeypatch.setattr(
        "bnncli.session.costs.read_header", lambda path: told if path == network.path else read_header(path)
    )
    assert total_cost(laplace).training == 100
    assert total_cost(told) == TotalCost(0.0, 0.0, 100.0)


@pytest.mark.parametrize("passes", [None, 300])
def test_an_ensemble_costs_the_training_of_its_members(laplace: Header, passes: int | None) -> None:
    header = replace(laplace, meta={**laplace.meta, "method": "ensemble", "metrics": {"gradient_passes": passes}})
    assert total_cost(header) == (TotalCost(None, None, None) if passes is None else TotalCost(0.0, 300.0, 0.0))


CPU = torch.device("cpu")


def make_memory(kind: str, *, num_stored: int = 0) -> PosteriorMemory:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 3)).eval().requires_grad_(False)
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=3, input_shape=(1, 8, 8))
    return PosteriorMemory(layout, kind, "", 100_000, num_stored, layout.num_params)


def test_draws_that_are_made_are_held_in_float32_and_those_of_a_sampler_once() -> None:
    flow, samples = make_memory("flow"), make_memory("samples", num_stored=500)
    size = flow.layout.num_params

    def bytes_of(memory: PosteriorMemory, count: int | None) -> int:
        return memory.predicting_bytes(CPU, "sample", 20, count, has_scores=False)

    assert bytes_of(flow, 4000) - bytes_of(flow, 3000) >= 4 * 1000 * size
    assert bytes_of(samples, None) - bytes_of(samples, 400) == -4 * 400 * size  # all are the file's own


def test_predictions_without_room_are_refused_with_how_many_draws_have(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, words = make_memory("flow"), {"keeps_samples": False, "what": "predicting"}
    there = require_prediction(memory, CPU, "sample", 20, 700, **words)
    for module in ("session.prediction_memory", "system.memory"):
        monkeypatch.setattr(f"bnncli.{module}.budget", lambda device: there)
    with pytest.raises(DeviceError, match="predicting: needs about") as caught:
        require_prediction(memory, CPU, "sample", 20, 2000, **words)
    assert caught.value.hint == "use at most \0samples\0 700"


class Halving:
    """Half the network's weights, as a posterior."""

    def __init__(self, run: Path, name: str | None = None, *, divisor: float = 2) -> None:
        self.happened: list[str] = []
        self.divisor = divisor
        self.run = Run(
            command="halve",
            line=CommandLine.of("halve", str(run), NameOptions(name=name)),
            arguments={"ckpt": run},
            console=Console("halve", CommonOptions(quiet=True)),
            run_options=RunOptions(),
            write=WriteOptions(),
            compute=ComputeOptions(device="cpu"),
            naming=NameOptions(name=name),
        )

    def produce(self) -> Result:
        split = load_split(self.run, "train")
        sizes: Any = {"algo_rev": 1, "checkpoint": split.checkpoint, "estimated_bytes": lambda: 100}
        params = {"divisor": self.divisor}
        request = posterior_request(self.run, "half", params=params, sources=[split.source], **sizes)

        @contextmanager
        def publishing() -> Iterator[None]:
            assert not request.target.exists()
            yield
            self.happened.append("published" if request.target.exists() else "not written")

        def fit() -> FitOutput:
            self.happened.append("fitted")
            head = split.head()
            assert head is not None
            tensors, meta = Point(head / self.divisor, split.layout).to_tensors()
            meta |= {"method": "halve", "param_layout": split.layout.to_json()}
            told = {"seconds": 1.5}
            return FitOutput(tensors, meta, {"divisor": self.divisor}, split, told=told, publishing=publishing)

        return produce_posterior(self.run, request, fit, self.report)

    def report(self, meta: Mapping[str, Any]) -> Report:
        self.happened.append(f"reported {meta['method']}")
        return Report(dict(meta["metrics"]), [f"of {len(meta['classes'])} classes"], CheckFailed("always"))


def test_a_fit_is_published_and_reported_and_then_up_to_date(small_run: Path) -> None:
    halving = Halving(small_run)
    first, again = halving.produce(), halving.produce()
    assert halving.happened == ["fitted", "reported halve", "published", "reported halve"]
    assert (first.action, again.action) == ("computed", "up_to_date")
    assert first.metrics == {"divisor": 2, "seconds": 1.5}
    assert again.metrics == {"divisor": 2}
    assert first.summary == again.summary == ["of 3 classes"]
    assert first.failure is not None
    assert again.failure is not None
    path = small_run.with_name("small.bnn") / "posteriors/half.safetensors"
    assert first.outputs == [{"role": "half", "path": str(path), "content_digest": again.outputs[0]["content_digest"]}]
    tensors, header = read_posterior(path)
    assert header.meta["num_examples"] == 240
    assert header.meta["metrics"] == {"divisor": 2}
    torch.testing.assert_close(2 * tensors["mean"][:15], tensors["head.weight"].double().flatten())


def test_a_fit_has_the_name_that_was_given_if_it_is_free(small_run: Path) -> None:
    assert Path(Halving(small_run, "other").produce().outputs[0]["path"]).name == "other.safetensors"
    with pytest.raises(UsageError, match="reserved for the trained network"):
        Halving(small_run, "map").produce()


IDS = np.array([7, 2, 5])  # rows of its data that a split holds


def predictions(size: int, ids: Sequence[int] | np.ndarray | None, labels: np.ndarray | None) -> GivenPredictions:
    probs = np.full((size, 2), 0.5)
    file = None if ids is None else PredictionFile(probs, probs[:, 0], None, None, np.array(ids), ["a", "b"])
    return GivenPredictions("test", Path("ref"), probs, labels, ("a", "b"), False, file=file)


def ours(sample_id: np.ndarray | None = IDS, labels: np.ndarray | None = None) -> GivenPredictions:
    return predictions(3, sample_id, labels)


def reference(size: int, *, ids: list[int] | None = None, labels: np.ndarray | None = None) -> GivenPredictions:
    return predictions(size, ids, labels)


def rows_of(theirs: GivenPredictions, of: GivenPredictions | None = None) -> tuple[list[int] | None, list[str]]:
    told: list[str] = []
    rows = matching_rows(of or ours(), theirs, tell=told.append)
    return None if rows is None else rows.tolist(), told


def test_as_many_rows_stand_in_the_order_of_the_split() -> None:
    assert rows_of(reference(3)) == (None, [])


def test_of_the_whole_data_those_that_the_split_holds_are_taken_and_told() -> None:
    rows, told = rows_of(reference(9))
    assert rows == [7, 2, 5]
    assert told == ["reference 'ref': using the 3 of its 9 rows that belong to split 'test'"]


def test_a_reference_that_knows_its_own_rows_is_matched_by_them() -> None:
    assert rows_of(reference(5, ids=[5, 1, 7, 2, 4])) == ([2, 3, 0], [])
    assert rows_of(reference(3, ids=[7, 2, 5])) == (None, [])


@pytest.mark.parametrize(
    ("theirs", "of", "said"),
    [
        (reference(5), None, "has 5 rows, but split 'test' has 3"),  # and row 7 is asked for
        (reference(9), ours(None), "has 9 rows, but split 'test' has 3"),
        (reference(2), None, "has 2 rows, but split 'test' has 3"),
        (reference(3, ids=[7, 2, 4]), None, "lacks some examples of split 'test'"),
        (reference(4, ids=[7, 2, 5, 5]), None, "lacks some examples of split 'test'"),
    ],
)
def test_other_rows_are_refused(theirs: GivenPredictions, of: GivenPredictions | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rows_of(theirs, of)


def test_labels_are_compared_in_the_rows_that_are_taken() -> None:
    labels = np.arange(9) % 2
    assert rows_of(reference(9, labels=labels), ours(labels=labels[IDS]))[0] == [7, 2, 5]
    with pytest.raises(DataError, match="and split 'test' have different labels in 1 of 3 rows"):
        rows_of(reference(9, labels=labels), ours(labels=np.array([1, 0, 0])))
