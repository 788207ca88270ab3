"""inspect on everything that people have: what it is, and a line that works."""

from __future__ import annotations

import json
import pickle
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from safetensors.torch import save_file
from torch import nn

from bnncli.models.build import load_network

IMAGES = np.random.default_rng(0).normal(size=(12, 1, 28, 28)).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("TRAIN.npz", x=IMAGES, y=np.arange(12) % 10)
    return tmp_path


def seen(cli: Cli, place: object) -> dict[str, Any]:
    """The JSON document; the last line that is printed is what it suggests."""
    document = cli("inspect", place, "--json").json
    printed = cli("inspect", place).stdout.splitlines()
    assert document["suggested"] is None or printed[-1] == document["suggested"]
    return document


def facts(cli: Cli, place: object) -> str:
    return cli("inspect", place).stdout


def test_a_file_may_be_named_as_model_and_data_name_it(cli: Cli, folder: Path) -> None:
    torch.save({"weight": torch.zeros(2, 3)}, "net.ckpt")
    for kind, place in (("npz", "TRAIN.npz"), ("onnx", "net.ckpt")):
        assert cli("inspect", f"{kind}:{place}").stdout == facts(cli, place)
    cli("inspect", "onnx:none.onnx").expect(66, "error: none.onnx does not exist")
    Path("npz:TRAIN.npz").mkdir()  # a file that is called so is meant itself
    assert cli("inspect", "npz:TRAIN.npz").stdout != facts(cli, "TRAIN.npz")


BUILT_IN = [("lenet5", {}), ("mlp", {"inputs": 784, "hidden": (6, 5), "classes": 10}), ("resnet20", {"channels": 1})]


@pytest.mark.parametrize("prefix", ["", "net."])
@pytest.mark.parametrize(("name", "arguments"), BUILT_IN)
def test_the_line_for_a_built_in_network_works(cli: Cli, name: str, arguments: dict[str, Any], prefix: str) -> None:
    from bnncli.registry import load_module

    state = load_module("networks", name).build(**arguments).state_dict()
    saved = {f"model.{prefix}{key}": value for key, value in state.items()} | {"loss.weight": torch.ones(10)}
    torch.save({"state_dict": saved if prefix else state}, "net.ckpt")
    document = seen(cli, "net.ckpt")
    assert document["suggested"] == f"bnncli extract-features net.ckpt --model {name} --data train=npz:TRAIN.npz"
    cli(*shlex.split(document["suggested"])[1:]).expect(0)
    assert document["heads"][0]["num_classes"] == 10


def test_another_networks_names_are_none_of_the_built_in_ones(cli: Cli) -> None:
    torch.save({"conv1.weight": torch.ones(16, 3, 3, 3), "linear.weight": torch.ones(10, 64)}, "net.pt")
    document = seen(cli, "net.pt")
    assert document["network"].startswith("unknown")
    assert "--model NET.py:FACTORY" in document["suggested"]


def test_the_line_for_a_network_without_a_linear_head_names_the_identity_layer(cli: Cli) -> None:
    shapes = {"features.0": (64, 3, 3, 3), "features.3.squeeze": (16, 64, 1, 1), "classifier.1": (5, 512, 1, 1)}
    torch.save({f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}, "net.pt")
    line = "--model torchvision:squeezenet1_1 --data train=images:TRAIN --last-layer identity"
    assert seen(cli, "net.pt")["suggested"] == f"bnncli extract-features net.pt {line}"


def test_what_lightning_kept_is_shown(cli: Cli) -> None:
    state = {f"model.{name}": value for name, value in load_network("lenet5", {}, None).state_dict().items()}
    saved = {
        "pytorch-lightning_version": "2.1.3", "epoch": 7, "state_dict": {**state, "shift": torch.zeros(())},
        "hyper_parameters": {"lr": 0.5, "sizes": [3, 4], "optim": {"name": "adam\x1b"}, "x": torch.ones(1)},
        "callbacks": {"EMA": {"weights": {name: value * 0 for name, value in state.items()}}},
    }  # fmt: skip
    torch.save(saved, "last.ckpt")
    document = seen(cli, "last.ckpt")
    assert document["made_by"] == "Lightning 2.1.3"
    assert document["hyper_parameters"]["hyper_parameters.lr"] == 0.5
    assert document["hyper_parameters"]["hyper_parameters.sizes"] == "3, 4"
    assert [one["key"] for one in document["states"]] == ["state_dict", "callbacks.EMA.weights"]
    text = facts(cli, "last.ckpt")
    assert "--state callbacks.EMA.weights" in text
    assert "\x1b" not in text


HEADS: dict[str, tuple[dict[str, tuple[int, ...]], list[str]]] = {
    "a hidden layer is none": ({"a.weight": (8, 4), "a.bias": (8,), "b.weight": (3, 8), "b.bias": (3,)}, ["b.weight"]),
    "two heads": (
        {"body.weight": (8, 4), "one.weight": (3, 8), "one.bias": (3,), "two.weight": (5, 8), "two.bias": (5,)},
        ["two.weight", "one.weight"],
    ),
    "a convolution": ({"f.weight": (8, 3, 3, 3), "c.weight": (5, 8, 1, 1), "c.bias": (5,)}, ["c.weight"]),
    "no embedding": ({"embed.weight": (99, 8), "fc.weight": (2, 8)}, ["fc.weight"]),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_are_told_by_what_takes_their_outputs(cli: Cli, case: str) -> None:
    shapes, names = HEADS[case]
    torch.save({name: torch.ones(shape) for name, shape in shapes.items()}, "net.pt")
    assert [one["name"] for one in seen(cli, "net.pt")["heads"]] == names


def jit(path: str, network: nn.Module | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of which category the deprecation is, depends on torch's release
        network = load_network("lenet5", {}, None) if network is None else network
        torch.jit.trace(network, torch.zeros(1, 1, 28, 28), check_trace=False).save(path)


def shards(path: str) -> None:
    Path(path).mkdir()
    state = load_network("lenet5", {}, None).state_dict()
    names = sorted(state)
    for place, part in enumerate((names[:4], names[4:]), start=1):
        save_file({name: state[name] for name in part}, f"{path}/model-{place:05}-of-00002.safetensors")


PROGRAMS: dict[str, tuple[Callable[[str], None], str, str]] = {
    "net.pt": (
        jit,
        "TorchScript program",
        "bnncli extract-features net.pt --model jit:net.pt --data train=npz:TRAIN.npz",
    ),
    "parts": (shards, "checkpoint", "bnncli extract-features parts --model lenet5 --data train=npz:TRAIN.npz"),
}


@pytest.mark.parametrize("place", PROGRAMS)
def test_the_line_for_what_brings_its_weights_works(cli: Cli, place: str) -> None:
    make, kind, line = PROGRAMS[place]
    make(place)
    document = seen(cli, place)
    assert (document["kind"], document["suggested"]) == (kind, line)
    cli(*shlex.split(line)[1:]).expect(0)


def test_the_header_of_an_onnx_graph_is_read(cli: Cli) -> None:
    header = b"\x08\x09" + b"\x12\x07pytorch" + b"\x1a\x032.1" + b"\x3a\x04" + bytes(4) + b"\x42\x02\x10\x11"
    Path("net.onnx").write_bytes(header)
    text = facts(cli, "net.onnx")
    assert [line.split("| ")[1].strip() for line in text.splitlines()[3:-1]] == [
        "ONNX graph",
        "9",
        "pytorch",
        "2.1",
        "17",
    ]
    assert text.splitlines()[-1].startswith("bnncli extract-features net.onnx --model onnx:net.onnx ")


HF = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
FOLDERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "hugging face folder": (
        {"config.json": HF, "model.safetensors": "", "tokenizer.json": {}},
        "extract-features d --model hf:d --data train=csv:TRAIN.csv", "bad",
    ),
    "peft adapter": (
        {"adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "no/such", "r": 8}},
        "extract-features d --model peft:d --data train=SPEC --base-model BASE", "LORA",
    ),
    "timm folder": (
        {"config.json": {"architecture": "resnet10t", "num_classes": 5, "pretrained_cfg": {}}},
        "extract-features d --model timm:d --data train=images:TRAIN", "resnet10t",
    ),
    "timm folder ": (
        {"config.json": {"architecture": "volo_d1_224", "pretrained_cfg": {}}},
        "extract-features d --model timm:d --data train=images:TRAIN --last-layer identity", "volo_d1_224",
    ),
    "images": ({"cat/a.png": "", "dog/b.JPG": ""}, "extract-features CKPT --model MODEL --data train=images:d", "'cat', 'dog'"),
    "folder": ({"net.pth": "", "notes.txt": ""}, "inspect d/net.pth", "net.pth"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_are_told_by_their_files(cli: Cli, kind: str) -> None:
    files, line, fact = FOLDERS[kind]
    for name, content in files.items():
        (Path("d") / name).parent.mkdir(parents=True, exist_ok=True)
        (Path("d") / name).write_text(content if isinstance(content, str) else json.dumps(content))
    document = seen(cli, "d")
    assert (document["kind"], document["suggested"]) == (kind.strip(), f"bnncli {line}")
    assert fact in facts(cli, "d")


def test_a_model_without_a_head_suggests_nothing(cli: Cli) -> None:
    Path("d").mkdir()
    Path("d/config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    assert seen(cli, "d")["suggested"] is None
    assert "not a classifier" in facts(cli, "d")


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_suggests_convert_and_lists_its_tensors(cli: Cli) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id="step", no_dist=True)
    document = seen(cli, "step")
    assert document["arrays"] == {"w": "float32 (2, 3)"}
    cli(*shlex.split(document["suggested"])[1:]).expect(0)
    Path("step/.metadata").unlink()
    assert seen(cli, "step")["suggested"] is None
    assert ".metadata file is missing" in facts(cli, "step")


def test_a_run_folder_is_told(cli: Cli, small_run: Path) -> None:
    document = seen(cli, f"{small_run}.bnn")
    assert (document["kind"], document["suggested"]) == ("run", f"bnncli status {small_run}")
    assert "laplace.safetensors" in document["posteriors"]


def test_a_folder_of_nothing_known_is_one_clear_line(cli: Cli) -> None:
    Path("d").mkdir()
    cli("inspect", "d").expect(66, "bnncli does not recognise the folder 'd'; it is empty")


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "x and y": ({"x": IMAGES, "y": np.arange(12)}, "extract-features CKPT --model MODEL --data train=npz:a.npz"),
    "other names": (
        {"ids": np.ones(3, int), "pixels": IMAGES, "digits": np.arange(12)},
        "extract-features CKPT --model MODEL --data train=npz:a.npz:pixels,digits",
    ),
    "features": (
        {"features_train": np.ones((3, 2)), "labels_train": np.arange(3)},
        "extract-features a --from-npz a.npz",
    ),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_archives_of_arrays_are_told(cli: Cli, case: str) -> None:
    arrays, line = ARRAYS[case]
    np.savez("a.npz", **arrays)
    assert seen(cli, "a.npz")["suggested"] == f"bnncli {line}"


def test_a_damaged_archive_is_refused(cli: Cli) -> None:
    np.savez("a.npz", x=IMAGES)
    Path("a.npz").write_bytes(Path("a.npz").read_bytes().replace(b"NUMPY", b"NUMBY"))
    cli("inspect", "a.npz").expect(65)


def test_idx_files_are_told_with_their_labels(cli: Cli) -> None:
    Path("t-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + bytes(8))
    Path("t-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + b"\0\0\0\x02" + bytes(2))
    line = "bnncli extract-features CKPT --model MODEL --data train=idx:t-images-idx3-ubyte,t-labels-idx1-ubyte"
    assert [seen(cli, f"t-{name}-ubyte")["suggested"] for name in ("images-idx3", "labels-idx1")] == [line, line]


def test_a_table_of_texts_names_its_columns(cli: Cli) -> None:
    pytest.importorskip("bnncli.data.kinds.csv")
    Path("a.csv").write_text("id,review,sentiment\n1,good,pos\n")
    document = seen(cli, "a.csv")
    assert document["columns"] == "id, review, sentiment"
    assert document["suggested"].endswith("--data train=csv:a.csv:text=review,label=sentiment")


def test_nothing_of_a_file_is_run(cli: Cli, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.mkdir, (tmp_path / "ran",)

    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"x": Evil()}}, "a.ckpt")
    Path("b.pkl").write_bytes(pickle.dumps(Evil()))
    for name in ("a.ckpt", "b.pkl"):
        error = cli("inspect", name, "--json").json["error"]
        assert error["code"] == "needs_code"
        assert "--trust-pickle" in error["hint"]
    assert not (tmp_path / "ran").exists()


def test_extract_features_without_a_model_names_the_one_that_the_checkpoint_tells_of(cli: Cli) -> None:
    torch.save(load_network("lenet5", {}, None).state_dict(), "net.pt")
    error = cli("extract-features", "net.pt", "--json").json["error"]
    assert error["hint"] == "bnncli extract-features net.pt --model lenet5 --data train=npz:TRAIN.npz"
    error = cli("extract-features", "net.pt", "--data", "a=npz:TRAIN.npz@5", "--json").json["error"]
    assert error["hint"] == "bnncli extract-features net.pt --data a=npz:TRAIN.npz@5 --json --model lenet5"
    cli(*shlex.split(error["hint"])[1:]).expect(0)


@pytest.mark.parametrize("content", [None, b"", b"hello", pickle.dumps(nn.Linear)])
def test_extract_features_without_a_model_says_no_more_of_an_unknown_file(cli: Cli, content: bytes | None) -> None:
    if content is not None:
        Path("net.pt").write_bytes(content)
    error = cli("extract-features", "net.pt", "--json").json["error"]
    assert (error["code"], error["hint"]) == ("usage", None)


def test_the_line_for_a_checkpoint_that_is_a_model_of_its_own_works(cli: Cli) -> None:
    jit("net.pt")
    words = ("--model", "lenet5", "--model-arg", "a=b", "--state", "ema", "--data", "a=npz:TRAIN.npz", "--json")
    line = cli("extract-features", "net.pt", *words).json["error"]["hint"]
    assert line == "bnncli extract-features net.pt --data a=npz:TRAIN.npz --json --model jit:net.pt"
    cli(*shlex.split(line)[1:]).expect(0)
    Path("net.onnx").write_bytes(b"\x08\x09\x12\x07pytorch")
    line = cli("extract-features", "net.onnx", *words).json["error"]["hint"]
    assert line == "bnncli extract-features net.onnx --data a=npz:TRAIN.npz --json --model onnx:net.onnx"


def test_a_program_that_cannot_be_run_does_not_suggest_itself(cli: Cli) -> None:
    jit("net.pt", nn.Sequential(nn.Flatten(), nn.Linear(784, 3), nn.Dropout()).train())
    words = ("--model", "jit:net.pt", "--data", "a=npz:TRAIN.npz", "--json")
    assert cli("extract-features", "net.pt", *words).json["error"]["hint"] == "trace the network after network.eval()"


def test_the_line_for_a_folder_of_a_model_leaves_preprocessing_to_it(cli: Cli) -> None:
    words = ("--model", "lenet5", "--mean", "0.5", "--data", "a=npz:TRAIN.npz", "--json")
    Path("d").mkdir()
    Path("d/config.json").write_text("{}")
    assert "--model hf:d" in cli("extract-features", "d", *words).json["error"]["hint"]
    Path("d/config.json").write_text('{"model_type": "vit", "architectures": ["ViTForImageClassification"]}')
    line = cli("extract-features", "d", *words).json["error"]["hint"]
    assert line == "bnncli extract-features d --data a=npz:TRAIN.npz --json --model hf:d"
    without_weights = "bnncli extract-features CKPT --model hf:d --data train=images:TRAIN"
    assert seen(cli, "d")["suggested"] == without_weights
    config = {"model_type": "vit", "id2label": {str(number): f"c{number}" for number in (0, 1, 10, *range(2, 10))}}
    Path("d/config.json").write_text(json.dumps(config))
    Path("d/training_args.bin").touch()
    document = seen(cli, "d")
    assert (document["classes"], document["weights"]) == ([f"c{number}" for number in range(11)], "none")
    Path("d/model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "1 of 1 weight files are missing" in facts(cli, "d")
    Path("d/adapter_config.json").write_text('{"task_type": "SEQ_CLS"}')
    assert "--data train=csv:TRAIN.csv" in seen(cli, "d")["suggested"]


def test_a_classifier_of_scikit_learn_is_told_how_to_be_converted(cli: Cli) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    fitted = linear_model.LogisticRegression().fit(np.arange(8.0).reshape(4, 2), [0, 1, 0, 1])
    Path("model.pkl").write_bytes(pickle.dumps(fitted))
    hint = cli("inspect", "model.pkl", "--json").json["error"]["hint"].split(": ")[1]
    assert hint == "bnncli convert model.pkl model.npz --trust-pickle"
    cli(*shlex.split(hint)[1:]).expect(0)
    assert seen(cli, "model.npz")["suggested"].startswith(
        "bnncli extract-features model.npz --model sklearn:model.npz "
    )


def test_checkpoints_that_are_called_tar_are_no_shards_of_images(cli: Cli) -> None:
    Path("run").mkdir()
    torch.save({"fc.weight": torch.zeros(2, 3)}, "run/model_best.pth.tar")
    assert seen(cli, "run")["suggested"] == "bnncli inspect run/model_best.pth.tar"
