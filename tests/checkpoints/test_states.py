"""Checkpoints that have the weights of a network several times: raw, averaged, a teacher's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from torch import Tensor, nn

from bnncli.artifacts.files import read_header
from bnncli.errors import DataError, UsageError
from bnncli.models.build import load_network
from bnncli.models.checkpoints import load_checkpoint, states_in
from bnncli.numerics.digests import tensor_digest

RAW = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.tensor([0.5, -0.5])}
MEAN = {name: tensor * 2 for name, tensor in RAW.items()}


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


INSIDE = {**under("model.", RAW), **under("ema_model.module.", MEAN), "ema_model.n_averaged": torch.ones(())}
SAVED: dict[str, tuple[Any, str, str]] = {
    "two keys": (
        {"state_dict": RAW, "state_dict_ema": MEAN, "optimizer": {"state": {0: RAW}}},
        "ema",
        "state_dict_ema",
    ),
    "a callback's": ({"state_dict": RAW, "callbacks": {"EMA": {"weights": MEAN}}}, "ema", "callbacks.EMA.weights"),
    "by its key": ({"net": RAW, "trainer": {"best": MEAN}}, "trainer.best", "trainer.best"),
    "a prefix": ({"state_dict": INSIDE}, "ema_model", "state_dict.ema_model"),
    "found prefix": ({"state_dict": INSIDE}, "ema", "state_dict.ema_model.module"),
    "a prefix at the top": (INSIDE, "ema_model.module", "ema_model.module"),
}


@pytest.mark.parametrize("case", SAVED)
def test_the_state_that_is_asked_for_is_taken(tmp_path: Path, case: str) -> None:
    saved, wanted, key = SAVED[case]
    torch.save(saved, tmp_path / "a.pt")
    checkpoint = load_checkpoint(tmp_path / "a.pt", wanted=wanted)
    assert checkpoint.weights_digest == tensor_digest(MEAN)
    assert checkpoint.selected_key == key
    again = load_checkpoint(tmp_path / "a.pt", wanted=key)
    assert again.weights_digest == checkpoint.weights_digest


def test_the_raw_weights_can_be_had_where_the_averaged_ones_are_the_usual(tmp_path: Path) -> None:
    torch.save(SAVED["two keys"][0], tmp_path / "a.pt")
    checkpoint = load_checkpoint(tmp_path / "a.pt", wanted="state_dict")
    assert (checkpoint.weights_digest, checkpoint.notes) == (tensor_digest(RAW), ())


def test_all_states_are_listed_and_nothing_else() -> None:
    saved = {
        "epoch": 3, "state_dict": INSIDE, "swa": MEAN, "optimizer_states": [{"state": {0: RAW}}], "optim": {"a": RAW},
        "callbacks": {"best": {"a.ckpt": torch.tensor(0.5)}, "stop": {"wait": 1, "score": torch.ones(1)}},
    }  # fmt: skip
    assert [tuple(one) for one in states_in(saved)] == [
        ("state_dict", 5, False),
        ("state_dict.ema_model.module", 2, True),
        ("swa", 2, True),
    ]


def test_words_that_hold_those_of_averages_are_none() -> None:
    assert [one.is_averaged for one in states_in({"semantic_head": RAW, "schema": MEAN})] == [False, False]


def test_a_state_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    torch.save(SAVED["a callback's"][0], tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"no state 'best'; it has 'state_dict', 'callbacks\.EMA\.weights'"):
        load_checkpoint(tmp_path / "a.pt", wanted="best")
    torch.save(RAW, tmp_path / "b.pt")
    with pytest.raises(UsageError, match="no state 'ema'; it has only one, at the top level"):
        load_checkpoint(tmp_path / "b.pt", wanted="ema")


def test_an_unclear_choice_names_the_states(tmp_path: Path) -> None:
    torch.save({"student": RAW, "tutor": MEAN}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="no state dict found") as caught:
        load_checkpoint(tmp_path / "a.pt")
    assert caught.value.hint == "choose one: \0state\0 student, \0state\0 tutor"
    assert load_checkpoint(tmp_path / "a.pt", wanted="tutor").weights_digest == tensor_digest(MEAN)


@pytest.fixture
def two_states(tmp_path: Path) -> list[object]:
    """The words of extract-features on a checkpoint with raw and averaged weights."""
    torch.manual_seed(0)
    first, second = (load_network("mlp", {"inputs": "4", "hidden": "5", "classes": "3"}, None) for _ in range(2))
    torch.save({"state_dict": first.state_dict(), "ema": second.state_dict()}, tmp_path / "net.pt")
    torch.save([first, second], tmp_path / "networks")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), y=np.arange(6) % 3)
    return [
        "extract-features",
        tmp_path / "net.pt",
        "--model",
        "mlp",
        "--data",
        f"train=npz:{tmp_path}/d.npz",
        "--json",
    ]


def test_the_chosen_state_is_run_and_recorded(cli: Cli, two_states: list[object], tmp_path: Path) -> None:
    assert cli(*two_states, "--state", "ema").json["action"] == "computed"
    header = read_header(tmp_path / "net.pt.bnn/features/train.h5")
    assert header.provenance["params"]["state"] == "ema"
    assert header.provenance["checkpoint"]["selected_key"] == "ema"
    assert header.weights_digest == tensor_digest(torch.load(tmp_path / "networks", weights_only=False)[1].state_dict())
    assert cli(*two_states, "--state", "ema").json["action"] == "up_to_date"
    assert cli(*two_states).code == 73  # the others; not the same request
    other = [str(word).replace("train=", "test=") for word in two_states]
    error = cli(*other).json["error"]
    assert (error["code"], "another --state (then ema, now None)" in error["message"]) == ("mixed_options", True)
    assert cli(*other, "--state", "ema").json["action"] == "computed"
    assert cli("fit-laplace", tmp_path / "net.pt", "--prior-precision", "1").code == 0


def test_a_checkpoint_saved_again_is_known_by_the_chosen_weights(
    cli: Cli, two_states: list[object], tmp_path: Path
) -> None:
    assert cli(*two_states, "--state", "ema").code == 0
    saved = torch.load(tmp_path / "net.pt")
    torch.save({**saved, "epoch": 4}, tmp_path / "net.pt")
    assert cli("fit-laplace", tmp_path / "net.pt", "--prior-precision", "1").code == 0
    torch.save({"state_dict": nn.Linear(1, 1).state_dict(), "ema": saved["state_dict"]}, tmp_path / "net.pt")
    error = cli("fit-laplace", tmp_path / "net.pt", "--prior-precision", "2", "--json").json["error"]
    assert error["code"] == "wrong_checkpoint"


def test_no_state_is_recorded_where_none_was_asked_for(cli: Cli, two_states: list[object], tmp_path: Path) -> None:
    assert cli(*two_states).code == 0
    header = read_header(tmp_path / "net.pt.bnn/features/train.h5")
    assert "state" not in header.provenance["params"]
    assert cli(*two_states, "--state", "none").code == 2


@pytest.mark.parametrize("words", ["--model flatten --data a=npz:a.npz", "--from-npz a.npz"])
def test_a_run_without_a_network_has_no_state(cli: Cli, tmp_path: Path, words: str) -> None:
    np.savez(tmp_path / "a.npz", features_a=np.ones((2, 2)), labels_a=np.zeros(2, np.int64))
    done = cli("extract-features", tmp_path / "x", *words.replace("a.npz", f"{tmp_path}/a.npz").split(), "--state", "a")
    assert done.code == 2
    assert "--state needs a network" in done.stderr


BESIDE: dict[str, tuple[Any, str]] = {
    "a key": ({"model": RAW, "ema": MEAN}, "ema"),
    "both wrapped": ({"model": under("module.", RAW), "ema": MEAN}, "ema"),
    "an average of torch's": ({"model": RAW, "model_swa": {**under("module.", MEAN), "n_averaged": torch.ones(())}}, "model_swa"),
    "a callback's": ({"state_dict": RAW, "callbacks": {"SWA": {"average_model_state": MEAN}}}, "callbacks.SWA.average_model_state"),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_it_is_said_that_raw_weights_were_picked_where_there_are_averaged_ones(tmp_path: Path, case: str) -> None:
    saved, key = BESIDE[case]
    torch.save(saved, tmp_path / "a.pt")
    checkpoint = load_checkpoint(tmp_path / "a.pt")
    assert checkpoint.weights_digest == tensor_digest(RAW)
    assert checkpoint.notes == (f"using the raw weights, not the averaged ones (to use those: \0state\0 {key})",)
    assert load_checkpoint(tmp_path / "a.pt", wanted=key).weights_digest == tensor_digest(MEAN)
    for other in ({"else": torch.ones(1)}, RAW):  # of another network, or the same numbers
        torch.save({**saved, key.split(".")[0]: other}, tmp_path / "a.pt")
        assert load_checkpoint(tmp_path / "a.pt").notes == ()


def test_lightnings_callback_has_the_averaged_weights_in_the_place_of_the_raw(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(
        {"state_dict": MEAN, "current_model_state": RAW, "averaging_state": {"n_averaged": torch.ones(())}}, path
    )
    checkpoint = load_checkpoint(path)
    assert checkpoint.weights_digest == tensor_digest(MEAN)
    note = "using the averaged weights 'state_dict', not the raw ones in 'current_model_state'"
    assert checkpoint.notes == (note,) == tuple(cli("inspect", path, "--json").json["notes"])
    assert load_checkpoint(path, wanted="ema").selected_key == "state_dict"
    raw = load_checkpoint(path, wanted="current_model_state")
    assert (raw.weights_digest, raw.notes) == (tensor_digest(RAW), ())
