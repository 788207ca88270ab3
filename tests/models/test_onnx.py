"""ONNX graphs: what onnxruntime gives on the file itself, and features that the head makes it of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts.features import read_features
from bnncli.errors import DataError, DeviceError, MissingInput, Untrusted, UsageError
from bnncli.models import ModelRequest
from bnncli.models.head_search import find_head
from bnncli.models.kinds.onnx import open_model

pytestmark = pytest.mark.libraries

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def graph_file(
    path: Path,
    nodes: list[Any],
    stored: dict[str, np.ndarray],
    *,
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: tuple[str, ...] = ("out",),
) -> Path:
    """A graph of these nodes and tensors."""
    taken = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    given = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    model = helper.make_model(helper.make_graph(nodes, "net", taken, given, tensors), ir_version=10)
    model.opset_import[0].version = 17
    onnx.save(model, path)
    return path


IMAGES = {"images": (FLOAT, ["n", 1, 6, 6])}
BODY = [
    helper.make_node("Conv", ["images", "kernel"], ["maps"], name="conv"),
    helper.make_node("Relu", ["maps"], ["active"], name="relu"),
]
KERNEL = {"kernel": array(4, 1, 3, 3)}
FLAT = [*BODY, helper.make_node("Flatten", ["active"], ["flat"], name="flatten")]
GRAPHS: dict[str, tuple[list[Any], dict[str, np.ndarray]]] = {
    "gemm": ([*FLAT, helper.make_node("Gemm", ["flat", "w", "b"], ["out"], transB=1)], {"w": array(3, 64), "b": array(3)}),
    "gemm of (D, K)": ([*FLAT, helper.make_node("Gemm", ["flat", "w"], ["out"])], {"w": array(64, 3)}),
    "matmul and add": (
        [*FLAT, helper.make_node("MatMul", ["flat", "w"], ["product"]), helper.make_node("Add", ["b", "product"], ["out"])],
        {"w": array(64, 3), "b": array(3)},
    ),
    "softmax": (
        [*FLAT, helper.make_node("Gemm", ["flat", "w"], ["logits"]), helper.make_node("Softmax", ["logits"], ["out"])],
        {"w": array(64, 3)},
    ),
    "transposed weight": (
        [*FLAT, helper.make_node("Transpose", ["w"], ["t"]), helper.make_node("MatMul", ["flat", "t"], ["out"])],
        {"w": array(3, 64)},
    ),
    "reshape by its own shape": (
        [
            *BODY,
            helper.make_node("Shape", ["active"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "zero"], ["rows"]),
            helper.make_node("Concat", ["rows", "rest"], ["shape"], axis=0),
            helper.make_node("Reshape", ["active", "shape"], ["flat"]),
            helper.make_node("Gemm", ["flat", "w"], ["out"]),
        ],
        {"w": array(64, 3), "zero": np.array([0]), "rest": np.array([-1])},
    ),
    "head reshaped by its own shape": (
        [
            *BODY,
            helper.make_node("GlobalAveragePool", ["active"], ["pooled"]),
            helper.make_node("Conv", ["pooled", "w"], ["logits"]),
            helper.make_node("Shape", ["logits"], ["sizes"]),
            helper.make_node("Slice", ["sizes", "zero", "two"], ["shape"]),
            helper.make_node("Reshape", ["logits", "shape"], ["out"]),
        ],
        {"w": array(3, 4, 1, 1), "zero": np.array([0]), "two": np.array([2])},
    ),
    "convolution and pooling": (
        [
            *BODY,
            helper.make_node("Conv", ["active", "w", "b"], ["logits"]),
            helper.make_node("GlobalAveragePool", ["logits"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["out"]),
        ],
        {"w": array(3, 4, 1, 1), "b": array(3)},
    ),
}  # fmt: skip


def run(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(path).run(None, inputs)


def check(path: Path, num_rows: int = 7, *, link: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
    """The network returns what onnxruntime does on the file, and its features times its head are that."""
    network, images = open_model(str(path), ModelRequest()).build(None), array(num_rows, 1, 6, 6)
    seen: list[torch.Tensor] = []
    network.head.register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[union-attr,operator]
    with torch.inference_mode():
        found = network(torch.from_numpy(images))
    expected = torch.from_numpy(run(path, {"images": images})[0])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(link(seen[-1]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_gives_what_onnxruntime_gives(name: str, tmp_path: Path) -> None:
    nodes, stored = GRAPHS[name]
    check(
        graph_file(tmp_path / "net.onnx", nodes, KERNEL | stored, inputs=IMAGES),
        link=partial(torch.softmax, dim=1) if name == "softmax" else torch.clone,
    )


def test_what_torch_exports_gives_what_onnxruntime_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten())
    net = torch.nn.Sequential(body, torch.nn.Dropout(), torch.nn.Linear(64, 3)).eval()
    axes = {"images": {0: "n"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the older exporter, whose class of warning changes from release to release
        torch.onnx.export(
            net, (torch.zeros(2, 1, 6, 6),), tmp_path / "net.onnx", dynamo=False, input_names=["images"],
            dynamic_axes=axes,
        )  # fmt: skip
    check(tmp_path / "net.onnx")


def gemm(path: Path, **inputs: tuple[int, list[Any]]) -> Path:
    nodes, stored = GRAPHS["gemm"]
    return graph_file(path, nodes, KERNEL | stored, inputs=inputs or IMAGES)


def test_tensors_in_a_file_beside_it_are_read_and_belong_to_it(tmp_path: Path) -> None:
    model = onnx.load(gemm(tmp_path / "net.onnx"))
    onnx.save(model, tmp_path / "parts.onnx", save_as_external_data=True, location="parts.bin", size_threshold=0)
    saved = open_model(str(tmp_path / "parts.onnx"), ModelRequest())
    assert [file.name for file in saved.files] == ["parts.onnx", "parts.bin"]
    check(tmp_path / "parts.onnx")
    before = saved.build(None).state_dict()["program.digest"]
    content = (tmp_path / "parts.bin").read_bytes()
    (tmp_path / "parts.bin").write_bytes(content[:4][::-1] + content[4:])
    assert not torch.equal(before, saved.build(None).state_dict()["program.digest"])
    (tmp_path / "parts.bin").write_bytes(content[:6])
    with pytest.raises(DataError, match=r"parts\.onnx': its tensor '.*' is incomplete; copy the graph's files again$"):
        open_model(str(tmp_path / "parts.onnx"), ModelRequest()).build(None)
    (tmp_path / "parts.bin").unlink()
    with pytest.raises(MissingInput, match=r"no file .*parts\.bin"):
        open_model(str(tmp_path / "parts.onnx"), ModelRequest())


def test_tensors_outside_its_folder_are_not_read(tmp_path: Path) -> None:
    model = onnx.load(gemm(tmp_path / "net.onnx"))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(Untrusted, match=r"outside its folder: '\.\./secret\.bin'"):
        open_model(str(tmp_path / "net.onnx"), ModelRequest())
    tensor.external_data[0].value = "parts\0.bin"
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(DataError, match="contains NUL"):
        open_model(str(tmp_path / "net.onnx"), ModelRequest())


def test_a_constant_that_no_memory_can_hold_is_not_computed(tmp_path: Path) -> None:
    helper = onnx.helper
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    ends = [helper.make_tensor_value_info(name, FLOAT, ["N", size]) for name, size in (("x", 3), ("y", None))]
    stored = [onnx.numpy_helper.from_array(np.array([3, 1 << 40]), "s")]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(DeviceError, match="its constant 'w' needs 12582912 MiB"):
        open_model(str(tmp_path / "net.onnx"), ModelRequest()).build(None)


@pytest.mark.parametrize("content", [b"", b"no graph at all", b"\x80\x04\x95", bytes(100)])
def test_what_is_no_graph_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(DataError, match=r"is not an ONNX graph, or is damaged \("):
        open_model(str(tmp_path / "net.onnx"), ModelRequest())


@pytest.mark.parametrize("num_rows", [2, 4, 9])
def test_a_batch_of_fixed_size_is_filled_and_cut(num_rows: int, tmp_path: Path) -> None:
    fixed = gemm(tmp_path / "fixed.onnx", images=(FLOAT, [4, 1, 6, 6]))
    network, images = open_model(str(fixed), ModelRequest()).build(None), array(num_rows, 1, 6, 6)
    expected = run(gemm(tmp_path / "free.onnx"), {"images": images})[0]
    with torch.inference_mode():
        np.testing.assert_allclose(network(torch.from_numpy(images)).numpy(), expected, atol=1e-5)


def test_inputs_by_name_keep_their_types(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"]),
        helper.make_node("Cast", ["mask"], ["weights"], to=FLOAT),
        helper.make_node("Unsqueeze", ["weights", "last"], ["column"]),
        helper.make_node("Mul", ["words", "column"], ["masked"]),
        helper.make_node("ReduceMean", ["masked"], ["mean"], axes=[1], keepdims=0, name="mean"),
        helper.make_node("Gemm", ["mean", "w"], ["logits"]),
    ]
    stored = {"table": array(9, 4), "w": array(4, 3), "last": np.array([2])}
    taken = {"ids": (INT64, ["n", 5]), "mask": (INT64, ["n", 5])}
    path = graph_file(tmp_path / "net.onnx", nodes, stored, inputs=taken, outputs=("mean", "logits"))
    network, ids = open_model(str(path), ModelRequest()).build(None), np.arange(20).reshape(4, 5) % 9
    mask = (ids % 2).astype(np.int64)
    with torch.inference_mode():
        found = network(mask=torch.from_numpy(mask), ids=torch.from_numpy(ids))
    expected = run(path, {"ids": ids, "mask": mask})
    assert [*found] == ["mean", "logits"]
    np.testing.assert_allclose(found["logits"].numpy(), expected[1], atol=1e-5)
    assert network.head.in_features == 4
    with pytest.raises(DataError, match=r"input 'ids' expects int64 \(N, 5\), got float32 \(4, 5\)"):
        network(ids=torch.zeros(4, 5), mask=torch.from_numpy(mask))


@pytest.mark.parametrize("stored", [np.int32, np.int64])
@pytest.mark.parametrize("taken", [onnx.TensorProto.INT32, INT64])
def test_token_ids_of_both_widths_go_from_arrays_to_predictions(
    cli: Cli, tmp_path: Path, taken: int, stored: type[np.integer]
) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["words"]),
        helper.make_node("ReduceMean", ["words"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Gemm", ["mean", "w"], ["out"]),
    ]
    weights = {"table": array(9, 4), "w": array(4, 3)}
    path = graph_file(tmp_path / "net.onnx", nodes, weights, inputs={"tokens": (taken, ["n", 5])})
    ids, labels = RNG.integers(9, size=(40, 5)), RNG.integers(3, size=40)
    np.savez(tmp_path / "new.npz", tokens=ids.astype(stored), y=labels)
    spec = f"npz:{tmp_path}/new.npz:tokens,y"
    done = cli("extract-features", path, "--model", f"onnx:{path}", "--data", f"train={spec}", "--data", f"test={spec}")
    assert done.code == 0, done.stderr
    content = read_features(path.with_name("net.onnx.bnn") / "features" / "test.h5")
    np.testing.assert_allclose(content.features, weights["table"][ids].mean(axis=1), atol=1e-6)
    words = ("--posterior", "map", "--data", f"new={spec}", "--table", tmp_path / "new.csv", "--trust-code")
    done = cli("predict", path, *words)
    assert done.code == 0, done.stderr
    logits = weights["table"][ids].mean(axis=1) @ weights["w"]
    rows = (tmp_path / "new.csv").read_text().splitlines()
    place = rows[0].split(",").index("predicted")
    assert [int(row.split(",")[place]) for row in rows[1:]] == logits.argmax(axis=1).tolist()


def test_a_node_is_named_by_its_own_name_or_its_value(tmp_path: Path) -> None:
    path = str(gemm(tmp_path / "net.onnx"))
    for name in ("flatten", "flat", "relu", "active"):
        assert open_model(path, ModelRequest(feature_node=name)).build(None).head.in_features == 64  # type: ignore[union-attr]
    with pytest.raises(
        UsageError, match=r"no linear layer of .* takes 'conv' as input; .*: 'flatten' \(weight \(3, 64\)\)"
    ):
        open_model(path, ModelRequest(feature_node="conv")).build(None)


def test_a_graph_that_ends_in_no_linear_step_or_is_random_is_refused(tmp_path: Path) -> None:
    tanh = graph_file(
        tmp_path / "tanh.onnx", [*FLAT, helper.make_node("Tanh", ["flat"], ["out"])], KERNEL, inputs=IMAGES
    )
    with pytest.raises(DataError, match="its output does not come from a linear layer; it has no linear layer"):
        find_head(open_model(str(tanh), ModelRequest()).build(None), lambda count: torch.zeros(4, 1, 6, 6)[:count])
    nodes = [*FLAT, helper.make_node("RandomNormalLike", ["flat"], ["out"])]
    noise = graph_file(tmp_path / "noise.onnx", nodes, KERNEL, inputs=IMAGES)
    with pytest.raises(DataError, match="draws random numbers"):
        open_model(str(noise), ModelRequest()).build(None)


def test_without_onnxruntime_one_line_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = open_model(str(gemm(tmp_path / "net.onnx")), ModelRequest())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(UsageError, match="onnx needs onnxruntime, which is not installed") as told:
        saved.build(None)
    assert told.value.hint == "pip install 'bnncli[onnx]'"


def test_what_stands_behind_the_head_is_done_again_and_only_taken_where_it_is_the_output(tmp_path: Path) -> None:
    nodes = [
        *FLAT,
        helper.make_node("Gemm", ["flat", "w"], ["scores"]),
        helper.make_node("Div", ["scores", "temperature"], ["divided"]),
        helper.make_node("BatchNormalization", ["divided", "scale", "shift", "mean", "variance"], ["normal"]),
        helper.make_node("Softmax", ["normal"], ["out"]),
    ]
    stored = {
        "w": 0.1 * array(64, 3), "temperature": np.float32(2), "scale": array(3), "shift": array(3), "mean": array(3),
    }  # fmt: skip
    path = graph_file(tmp_path / "net.onnx", nodes, KERNEL | stored | {"variance": array(3) ** 2}, inputs=IMAGES)
    network, images = open_model(str(path), ModelRequest()).build(None), array(5, 1, 6, 6)
    seen: list[tuple[Any, torch.Tensor]] = []
    network.tail.register_forward_hook(lambda module, args, output: seen.append((args, output)))  # type: ignore[union-attr,operator]
    with torch.inference_mode():
        network(torch.from_numpy(images))
    ((logits, own), found) = seen[0]
    assert found is not own
    np.testing.assert_allclose(own.numpy(), run(path, {"images": images})[0], atol=1e-6)
    torch.testing.assert_close(found, own, atol=1e-6, rtol=1e-4)
    other = own + 1e-3
    assert network.tail(logits, other) is other  # type: ignore[operator]


def decomposed(*, is_log: bool, axis: int = -1, of_other: bool = False) -> list[Any]:
    """A softmax of `logits`, or its logarithm, in five nodes; of_other: with the largest of other values."""
    nodes = [
        helper.make_node("Identity", ["logits"], ["copy"]),
        helper.make_node("ReduceMax", ["active_max" if of_other else "copy"], ["most"], axes=[axis], keepdims=1),
        helper.make_node("Max", ["most", "lowest"], ["largest"]),
        helper.make_node("Sub", ["logits", "largest"], ["shifted"]),
        helper.make_node("Exp", ["shifted"], ["exp"]),
        helper.make_node("ReduceSum", ["exp", "axes"], ["total"], keepdims=1),
    ]
    if is_log:
        return [
            *nodes,
            helper.make_node("Log", ["total"], ["log"]),
            helper.make_node("Sub", ["shifted", "log"], ["out"]),
        ]
    return [*nodes, helper.make_node("Div", ["exp", "total"], ["out"])]


@pytest.mark.parametrize("is_log", [False, True])
def test_a_softmax_that_is_written_out_is_passed_on_the_way_to_the_head(is_log: bool, tmp_path: Path) -> None:
    nodes = [*FLAT, helper.make_node("Gemm", ["flat", "w"], ["logits"]), *decomposed(is_log=is_log)]
    stored = KERNEL | {"w": array(64, 3), "axes": np.array([-1]), "lowest": np.float32(-np.inf)}
    path = graph_file(tmp_path / "net.onnx", nodes, stored, inputs=IMAGES)
    check(path, link=partial(torch.log_softmax if is_log else torch.softmax, dim=1))


def test_what_is_no_softmax_is_not_taken_for_one(tmp_path: Path) -> None:
    other = [helper.make_node("Neg", ["logits"], ["active_max"])]
    nodes = [
        *FLAT, helper.make_node("Gemm", ["flat", "w"], ["logits"]), *other, *decomposed(is_log=False, of_other=True),
    ]  # fmt: skip
    stored = KERNEL | {"w": array(64, 3), "axes": np.array([-1]), "lowest": np.float32(-np.inf)}
    path = graph_file(tmp_path / "net.onnx", nodes, stored, inputs=IMAGES)
    with pytest.raises(DataError, match="its output does not come from a linear layer"):
        find_head(open_model(str(path), ModelRequest()).build(None), lambda count: torch.zeros(4, 1, 6, 6)[:count])
