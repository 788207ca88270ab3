"""Graphs of programs: exported and scripted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.command_line import Cli
from torch import Tensor, nn
from torch.ao import quantization as ao

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.errors import DataError, MissingInput, Untrusted, UsageError
from bnncli.models import ModelRequest
from bnncli.models.head_search import find_head
from bnncli.models.kinds import jit
from bnncli.models.kinds.export import open_model as open_exported
from bnncli.models.kinds.jit import open_model as open_script

pytestmark = pytest.mark.libraries


IMAGES = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
TOLERANCE = 1e-5


class Net(nn.Module):
    """A convolution, a batch norm and pooling, then a head of some kind, and something behind it."""

    def __init__(self, head: nn.Module, after: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.head, self.after = head, after

    def forward(self, images: Tensor) -> Any:
        maps = self.body(images)
        return self.after(self.head(maps), maps)


class Product(nn.Module):
    """A head of a product and a sum, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 3)), nn.Parameter(torch.randn(3))

    def forward(self, maps: Tensor) -> Tensor:
        return maps.flatten(1) @ self.weight + self.bias


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


HEADS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Any]]] = {
    "linear": (lambda: flat(nn.Linear(16, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)), lambda logits, _: logits),
    "softmax": (lambda: flat(nn.Linear(16, 3)), lambda logits, _: (logits / 0.7).softmax(1)),
    "no bias": (lambda: flat(nn.Linear(16, 3, bias=False)), lambda logits, _: logits),
    "product": (Product, lambda logits, _: logits),
    "pooled": (lambda: nn.Conv2d(4, 3, 1), lambda logits, _: logits.mean((2, 3))),
    "convolution": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Conv2d(4, 3, 1)), lambda logits, _: logits.flatten(1)
    ),
    "mapping": (lambda: flat(nn.Linear(16, 3)), lambda logits, maps: {"maps": maps, "logits": logits}),
    "tuple": (lambda: flat(nn.Linear(16, 3)), lambda logits, maps: (logits, maps)),
}  # fmt: skip


def network(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head, after = HEADS[name]
        net = Net(head(), after).eval()
        net.body[1].running_mean.uniform_(-1, 1)  # type: ignore[operator,union-attr]
        return net


def exported(path: Path, net: nn.Module, images: Tensor = IMAGES, *, is_fixed: bool = False) -> Path:
    sizes = None if is_fixed else ({0: torch.export.Dim("n")},)
    torch.export.save(torch.export.export(net, (images,), dynamic_shapes=sizes), path)
    return path


def traced(path: Path, net: nn.Module) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(net, IMAGES, strict=False).save(str(path))
    return path


def built(form: str, folder: Path, net: nn.Module) -> nn.Module:
    """The graph of a network that is saved as `export` or `jit` does."""
    save, opened = {"export": (exported, open_exported), "jit": (traced, open_script)}[form]
    return opened(str(save(folder / "net.pt2", net)), ModelRequest()).build(None)


def logits_of(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output


def check(graph: nn.Module, library: nn.Module, *, after: str = "", images: Tensor | None = None) -> None:
    """The graph returns what the library does, and its features times its head are that."""
    inputs = torch.randn(7, 1, 6, 6, generator=torch.Generator().manual_seed(2)) if images is None else images
    seen: list[Tensor] = []
    graph.head.register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[union-attr,operator]
    with torch.inference_mode():
        ours, theirs = graph(inputs), library(inputs)
    assert type(ours) is type(theirs)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), atol=TOLERANCE, rtol=0)
    logits = (seen[0] / 0.7).softmax(1) if after == "softmax" else seen[0]
    torch.testing.assert_close(logits, logits_of(theirs), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", HEADS)
def test_an_exported_program_gives_what_torch_gives(name: str, tmp_path: Path) -> None:
    path = exported(tmp_path / "net.pt2", network(name))
    graph = open_exported(str(path), ModelRequest()).build(None)
    check(graph, torch.export.load(path).module(), after=name)


@pytest.mark.parametrize("name", HEADS)
def test_a_traced_program_gives_what_torch_gives(name: str, tmp_path: Path) -> None:
    path = traced(tmp_path / "net.pt", network(name))
    graph = open_script(str(path), ModelRequest()).build(None)
    check(graph, torch.jit.load(path), after=name)


def test_a_scripted_program_with_its_modules_is_one_graph(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(64, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(net).save(str(tmp_path / "net.pt"))
    check(open_script(str(tmp_path / "net.pt"), ModelRequest()).build(None), net.eval())


@pytest.mark.parametrize("num_rows", [3, 5, 12])
def test_a_batch_of_fixed_size_is_filled_and_cut(num_rows: int, tmp_path: Path) -> None:
    net = network("linear")
    graph = open_exported(str(exported(tmp_path / "net.pt2", net, is_fixed=True)), ModelRequest()).build(None)
    check(graph, net, images=torch.randn(num_rows, 1, 6, 6, generator=torch.Generator().manual_seed(3)))


class Pair(nn.Module):
    """Token ids and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.embedding(ids) * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True))


def test_several_inputs_are_taken_by_name_and_whole_numbers_stay_whole(tmp_path: Path) -> None:
    given = {"mask": torch.ones(4, 5, dtype=torch.int64), "ids": torch.arange(20).reshape(4, 5) % 9}
    net, batch = Pair().eval(), torch.export.Dim("n")
    program = torch.export.export(net, (), given, dynamic_shapes={"mask": {0: batch}, "ids": {0: batch}})
    torch.export.save(program, tmp_path / "net.pt2")
    graph = open_exported(str(tmp_path / "net.pt2"), ModelRequest()).build(None)
    torch.testing.assert_close(graph(**given), net(**given), atol=TOLERANCE, rtol=0)
    with pytest.raises(DataError, match=r"takes 2 inputs, '(ids|mask)', '(ids|mask)'; got 1 unnamed"):
        graph(given["ids"])
    with pytest.raises(DataError, match="got inputs named 'ids', 'attention_mask'"):
        graph(ids=given["ids"], attention_mask=given["mask"])
    with pytest.raises(DataError, match=r"input 'ids' expects int64 \(N, 5\), got float32 \(4, 5\)"):
        graph(ids=given["ids"].float(), mask=given["mask"])


def test_the_features_after_a_node_are_those_of_the_linear_layer_that_takes_it(tmp_path: Path) -> None:
    path = str(exported(tmp_path / "net.pt2", network("linear")))
    assert open_exported(path, ModelRequest(feature_node="max_pool2d")).build(None).head.in_features == 16  # type: ignore[union-attr]
    assert open_exported(path, ModelRequest(feature_node="relu_1")).build(None).head.in_features == 6  # type: ignore[union-attr]
    listed = r"no linear layer of .*takes 'relu' as input; nodes before .*: 'flatten' \(weight \(6, 16\)\), 'dropout'"
    with pytest.raises(UsageError, match=listed):
        open_exported(path, ModelRequest(feature_node="relu")).build(None)


def test_a_graph_that_ends_in_no_linear_layer_lists_those_it_has(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh())
    found = open_exported(str(exported(tmp_path / "net.pt2", net)), ModelRequest()).build(None)
    with pytest.raises(
        DataError, match=r"its output does not come from a linear layer; .*'flatten' \(weight \(4, 36\)\)"
    ):
        find_head(found, lambda count: IMAGES[:count])


def test_wrong_inputs_of_a_script_are_one_line(tmp_path: Path) -> None:
    graph = open_script(str(traced(tmp_path / "net.pt", network("linear"))), ModelRequest()).build(None)
    with pytest.raises(RuntimeError, match=r"^Given groups=1, weight of size [^\n]*$"):
        graph(torch.zeros(2, 3, 6, 6))


@pytest.mark.parametrize("form", ["export", "jit"])
def test_a_program_made_in_training_mode_is_refused(form: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(36, 3)).train()
    with pytest.raises(DataError, match="in training mode: its dropout is random"):
        built(form, tmp_path, net)


def changed(path: Path, old: str, new: str, *, of: str = "models/model.json") -> Path:
    """The exported program with another text in its members that end so."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert any(old.encode() in content for name, content in members.items() if name.endswith(of))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(old.encode(), new.encode()) if name.endswith(of) else content)
    return path


def test_nothing_of_an_exported_file_is_run_but_operators_of_torch(tmp_path: Path) -> None:
    net, mark = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(36, 3)), tmp_path / "mark"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    path = exported(tmp_path / "net.pt2", net)
    changed(path, '"guards_code": []', f'"guards_code": ["{code}"]')
    changed(path, "Symbol(", f"{code} or Symbol(")
    check(open_exported(str(path), ModelRequest()).build(None), net)
    assert not mark.exists()
    for target, error, told in (
        ("builtins.eval", DataError, "only PyTorch's own operators"),
        ("torch.ops.aten.__class__.default", DataError, "only PyTorch's own operators"),
        ("torch.ops.mylib.relu.default", DataError, "only PyTorch's own operators"),
        ("torch.ops.aten.from_file.default", Untrusted, "reads or writes files"),
        ("torch.ops.aten.rand_like.default", DataError, "draws random numbers"),
    ):
        odd = changed(exported(tmp_path / "odd.pt2", net), "torch.ops.aten.relu.default", target)
        with pytest.raises(error, match=told):
            open_exported(str(odd), ModelRequest()).build(None)


def test_weights_that_were_pickled_are_not_loaded(tmp_path: Path) -> None:
    path = exported(tmp_path / "net.pt2", nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    with pytest.raises(Untrusted, match=r"'1\.weight' is stored as a pickle"):
        open_exported(
            str(changed(path, '"use_pickle": false', '"use_pickle": true', of="config.json")), ModelRequest()
        ).build(None)


def test_a_tensor_that_claims_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path / "net.pt2", nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    changed(
        path,
        '"sizes": [{"as_int": 3}, {"as_int": 36}]',
        '"sizes": [{"as_int": 999999}, {"as_int": 999}]',
        of="config.json",
    )
    changed(
        path,
        '"strides": [{"as_int": 36}, {"as_int": 1}]',
        '"strides": [{"as_int": 0}, {"as_int": 0}]',
        of="config.json",
    )
    with pytest.raises(DataError, match="the tensors claim 3995996"):
        open_exported(str(path), ModelRequest()).build(None)


@pytest.mark.parametrize("form", ["export", "jit"])
def test_weights_that_are_not_finite_are_refused(form: str, tmp_path: Path) -> None:
    net = network("linear")
    net.body[0].weight.data[0] = float("nan")  # type: ignore[index,union-attr]
    with pytest.raises(DataError, match="weights are not finite"):
        built(form, tmp_path, net)


@pytest.mark.parametrize("member", [".py", "constants.pkl"])
def test_a_damaged_script_is_one_line(member: str, tmp_path: Path) -> None:
    path = traced(tmp_path / "net.pt", network("linear"))
    with zipfile.ZipFile(path) as archive:
        place = next(one for one in archive.infolist() if one.filename.endswith(member))
    content = bytearray(path.read_bytes())
    start = (
        place.header_offset
        + 30
        + int.from_bytes(content[place.header_offset + 28 : place.header_offset + 30], "little")
    )
    start += len(place.filename.encode())
    content[start : start + place.compress_size] = bytes([255]) * place.compress_size
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        open_script(str(path), ModelRequest()).build(None)


def test_another_kind_of_file_is_one_line_with_the_way_there_is(tmp_path: Path) -> None:
    net = network("linear")
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "text.pt").write_text("nothing")
    for opened, file, told, hint in (
        (open_exported, traced(tmp_path / "net.pt", net), "an exported program, got a TorchScript program", "jit:FILE"),
        (
            open_script,
            exported(tmp_path / "net.pt2", net),
            "a TorchScript program, got an exported program",
            "export:FILE",
        ),
        (open_script, tmp_path / "weights.pt", "got a weights file", "define their network"),
        (open_exported, tmp_path / "text.pt", "got neither a torch nor", "None"),
    ):
        with pytest.raises(DataError, match=told) as error:
            opened(str(file), ModelRequest()).build(None)
        assert hint in str(error.value.hint)
    with pytest.raises(MissingInput, match="no file"):
        open_script(str(tmp_path / "none.pt"), ModelRequest())


def test_a_script_that_touches_files_is_not_loaded(tmp_path: Path) -> None:
    class Writer(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            torch.save(images, "mark")
            return images

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Writer()).save(str(tmp_path / "net.pt"))
    with pytest.raises(Untrusted, match=r"calls 'torch\.save'"):
        open_script(str(tmp_path / "net.pt"), ModelRequest()).build(None)


class Restored(nn.Module):
    """A network whose state a method of its own restores, which runs while the program is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(16, 3)

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, bool]:
        return self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, bool]) -> None:
        self.weight, self.training = state

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight


def restored(path: Path, line: str = "", head: str = "", rename: Callable[[str], str] = str, twin: str = "") -> Path:
    """Write a program whose `__setstate__` ends with `line`, and whose source begins with `head`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Restored()).save(str(path))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            if name.endswith(".py"):
                start = content.rindex(b"\n    return None")
                content = head.encode() + content[:start] + f"\n    {line}".encode() + content[start:]
                if twin:
                    archive.writestr(name.upper(), twin)
            archive.writestr(rename(name), content)
    return path


HIDDEN = (
    '_1 = "+ACIAIg-"\n    torch.save(1, "mark")\n    _2 = "+ACI-"'  # one string of UTF-7, TorchScript runs its middle
)
MAPPED = 'm = torch.from_file("mark", True, 1, dtype=0, layout=None, device=None, pin_memory=False)\n    m = torch.fill_(m, 65)'
ATTACKS: dict[str, tuple[str, str]] = {
    "torch.save": ('torch.save(1, "mark")', "calls 'torch.save'"),
    "a file mapped": (MAPPED, "calls 'torch.from_file'"),
    "ops": ('ops.aten.save(1, "mark")', "calls 'ops.aten.save'"),
    "spaces": ('torch . save(1, "mark")', "calls '.save'"),
    "a comment": ('(torch. # \n    save)(1, "mark")', "calls 'save'"),
    "a variable": ('t = torch\n    t.save(1, "mark")', "calls 't.save'"),
    "a variable of a namespace": ('o = ops\n    o.aten.save(1, "mark")', "calls 'o.aten.save', 'ops'"),
    "a name as text": ('getattr(torch, "save")(1, "mark")', "calls 'getattr'"),
    "an escape": ('getattr(torch, "sa\\166e")(1, "mark")', "calls 'getattr'"),
    "joined texts": ('getattr(torch, "sa" "ve")(1, "mark")', "calls 'getattr'"),
    "another namespace": ("ops.c10d.barrier()", "calls 'ops.c10d.barrier'"),
    "an object of C++": ('__torch__.torch.classes.c10d.FileStore("mark", 1)', "calls 'torch.classes.c10d'"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_script_cannot_reach_files_while_it_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, told = ATTACKS[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Untrusted, match=re.escape(told)):
        open_script(str(restored(tmp_path / "net.pt", line)), ModelRequest()).build(None)
    assert not Path("mark").exists()


def test_a_script_is_read_as_torch_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.pt"
    assert open_script(str(restored(path)), ModelRequest()).build(None)(IMAGES[:, :, :4, :4]).shape == (5, 3)
    write = 'torch.save(1, "mark")'
    with pytest.raises(DataError, match="declares an encoding"):
        open_script(str(restored(path, HIDDEN, head="# coding: utf-7\n")), ModelRequest()).build(None)
    with pytest.raises(DataError, match="duplicate members"):
        open_script(str(restored(path, twin=write)), ModelRequest()).build(None)
    restored(path, rename=lambda name: name.replace("byteorder", "model.json"))
    with pytest.raises(DataError, match="the 2018 format"):
        open_script(str(path), ModelRequest()).build(None)
    restored(path, write, rename=lambda name: name.replace(".py", ".PY"))
    with pytest.raises(Untrusted, match=r"torch\.save"):
        open_script(str(path), ModelRequest()).build(None)
    monkeypatch.setattr(jit, "_MAX_UNPACKED", -(1 << 20))
    with pytest.raises(DataError, match="MB more than the archive"):
        open_script(str(restored(path)), ModelRequest()).build(None)
    assert not Path("mark").exists()


class Aside(nn.Module):
    """A method that forward does not call, which writes in a branch and in a task."""

    def write(self, images: Tensor) -> Tensor:
        if images.sum() > 0:
            torch.save(images, "mark")
        return images

    @torch.jit.export
    def other(self, images: Tensor) -> Tensor:
        return torch.jit.wait(torch.jit.fork(self.write, images))

    def forward(self, images: Tensor) -> Tensor:
        return images


def test_the_graphs_decide_what_a_script_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Sequential(Aside())).save(str(tmp_path / "net.pt"))
    monkeypatch.setattr(jit, "_check_archive", lambda stream: stream.seek(0) or stream)
    with pytest.raises(Untrusted, match="calls 'aten::save'"):
        open_script(str(tmp_path / "net.pt"), ModelRequest()).build(None)


class Placed(nn.Module):
    """A network that makes a tensor on the device of its inputs, which a program may keep as the CPU."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.head, self.counts = nn.Linear(36, 3), counts

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        count = flat.shape[1] if self.counts else 36
        return self.head(flat + torch.arange(count, device=flat.device))


@pytest.mark.parametrize("form", ["export", "jit"])
def test_graphs_run_on_a_gpu(form: str, tmp_path: Path) -> None:
    net = Placed()
    graph = built(form, tmp_path, net)
    with pretend_cuda.pretend() as gpu, torch.inference_mode():
        found = graph.to("cuda:0")(IMAGES.to("cuda:0"))
        assert found.device.type == "cuda"
        torch.testing.assert_close(found.cpu(), net(IMAGES))
    assert gpu.num_kernels
    assert not gpu.errors
    assert not [mix for mix in gpu.mixes if not mix.startswith("_has_compatible_shallow_copy_type")]  # of Module.to


@pytest.mark.parametrize("form", ["export", "jit"])
def test_tensors_that_a_program_makes_on_the_cpu_are_made_where_its_inputs_are(form: str, tmp_path: Path) -> None:
    net = Placed(counts=True)
    graph = built(form, tmp_path, net)
    torch.testing.assert_close(graph(IMAGES), net(IMAGES))
    assert graph.to("meta")(IMAGES.to("meta")).device.type == "meta"


def test_new_data_ask_for_trust_only_where_a_program_is_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = network("linear")
    np.savez("data.npz", x=IMAGES.numpy(), y=np.arange(5) % 3)
    exported(Path("net.pt2"), net)
    traced(Path("net.pt"), net)
    for spec in ("export:net.pt2", "jit:net.pt"):
        path = spec.partition(":")[2]
        assert cli("extract-features", path, "--model", spec, "--data", "train=npz:data.npz").code == 0
        assert cli("fit-laplace", path, "--prior-precision", 1).code == 0
        asked = ("predict", path, "--posterior", "laplace", "--data", "new=npz:data.npz", "--table", f"{path}.csv")
        done = cli(*asked)
        assert (done.code == 0) == (spec == "export:net.pt2"), done.stderr
        if done.code:
            assert done.code == 77
            assert f"bnncli will not run the code of {spec!r} just because the run folder names it" in done.stderr
            assert "if the code is yours or you have read it, add --trust-code" in done.stderr
            assert cli(*asked, "--trust-code").code == 0


class LoopsWhenLoaded(nn.Module):
    """A program whose loading never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    @torch.jit.export
    def __getstate__(self):  # type: ignore[no-untyped-def]
        return (self.head.weight, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, bool]):  # type: ignore[no-untyped-def]
        turns = 0
        while turns >= 0:
            turns = (turns + 1) % 7
        self.training = state[1]

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(x)


class LoopsForEver(nn.Module):
    """A program whose forward never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):  # type: ignore[no-untyped-def]
        turns = 0
        while turns >= 0:
            turns = (turns + 1) % 7
        return self.head(x)


def test_a_program_whose_loading_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.jit.script(LoopsWhenLoaded()).save(str(tmp_path / "net.pt"))
    monkeypatch.setattr(jit, "_LOAD_SECONDS", 0.3)
    with pytest.raises(
        DataError, match=r"loading the program did not finish in 0.3 s: its __setstate__ contains a loop"
    ):
        jit.read_program(tmp_path / "net.pt")


@pytest.mark.long
@pytest.mark.parametrize(("net", "where"), [(LoopsForEver, ""), (LoopsWhenLoaded, "loading ")], ids=["forward", "load"])
def test_a_signal_ends_a_program_that_loops(tmp_path: Path, net: type[nn.Module], where: str) -> None:
    torch.jit.script(net()).save(str(tmp_path / "net.pt"))
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 6), np.float32), y=np.arange(4) % 3)
    words = ("extract-features", "net.pt", "--model", "jit:net.pt", "--data", "train=npz:x.npz")
    code = (  # the signal comes when the loop has begun
        "import os, signal, sys, threading\n"
        "from bnncli.system import signals\n"
        "from bnncli.models.kinds import jit\n"
        "from bnncli.__main__ import main\n"
        "plain = signals.raise_if_interrupted\n"
        "def told(where=''):\n"
        f'    if where == "{where}the network\'s program":\n'
        "        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "        signals.raise_if_interrupted = plain\n"
        "    plain(where)\n"
        "signals.raise_if_interrupted = told\n"
        f"sys.argv = ['bnncli', *{words!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 143, done.stderr
    assert f"error: interrupted by SIGTERM at {where}the network's program" in done.stderr


def test_features_of_a_program_that_has_changed_record_the_new_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=IMAGES.numpy(), y=np.arange(5) % 3)
    words = ("extract-features", "net.pt2", "--model", "export:net.pt2", "--data", "train=npz:data.npz", "--force")
    net, digests = network("linear"), set()
    for factor in (1.0, 2.0):  # in one process, as from a notebook
        with torch.no_grad():
            next(net.parameters()).mul_(factor)
        exported(Path("net.pt2"), net)
        assert cli(*words).code == 0
        header = read_header(Path("net.pt2.bnn/features/train.h5"))
        digests |= {one["content_digest"] for one in header.inputs if one["role"] == "model"}
    assert len(digests) == 2


INPUTS = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


def run_network(*behind: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3), *behind).eval()


def export(path: Path, net: nn.Module) -> None:
    rows = torch.export.Dim("n")
    torch.export.save(torch.export.export(net, (torch.zeros(2, 6),), dynamic_shapes=({0: rows},)), path)


@contextmanager
def quietly() -> Iterator[None]:
    """What PyTorch says of its older exporters, and by which class of warning, changes from release to release."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def script(path: Path, net: nn.Module) -> None:
    with quietly():
        torch.jit.trace(net, torch.zeros(2, 6)).save(str(path))


def to_onnx(path: Path, net: nn.Module) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    with quietly():
        torch.onnx.export(
            net, (torch.zeros(2, 6),), path, dynamo=False, dynamic_axes={"x": {0: "n"}}, input_names=["x"]
        )


FORMS: dict[str, tuple[str, Callable[[Path, nn.Module], None]]] = {
    "export": ("net.pt2", export),
    "jit": ("net.pt", script),
    "onnx": ("net.onnx", to_onnx),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_without_a_linear_head_takes_an_identity_layer(form: str, tmp_path: Path, cli: Cli) -> None:
    file, make = FORMS[form]
    net = run_network(nn.ReLU())
    make(tmp_path / file, net)
    np.savez(tmp_path / "data.npz", x=INPUTS, y=np.arange(40) % 3)
    line: list[Any] = ["extract-features", tmp_path / "run", "--model", f"{form}:{tmp_path / file}"]
    line += ["--data", f"train=npz:{tmp_path / 'data.npz'}"]
    refused = cli(*line)
    assert (refused.code, "its output does not come from a linear layer" in refused.stderr) == (65, True)
    assert "--last-layer identity puts an identity layer on top of the logits" in refused.stderr
    assert cli(*line, "--last-layer", "identity").code == 0
    with torch.no_grad():
        expected = net(torch.from_numpy(INPUTS)).numpy()
    features = read_features(tmp_path / "run.bnn/features/train.h5").features
    np.testing.assert_allclose(features, expected, atol=1e-6)
    opened = bnncli.open(tmp_path / "run", model=f"{form}:{tmp_path / file}")
    np.testing.assert_array_equal(opened.features(INPUTS), features)
    other = shutil.copy(tmp_path / file, tmp_path / f"other{Path(file).suffix}")
    with pytest.raises(
        DataError, match=r"the files of '.*other.*' have changed or moved since .*train.h5 was created from them"
    ):
        bnncli.open(tmp_path / "run", model=f"{form}:{other}").features(INPUTS)


class Quantised(nn.Module):
    """Layers between the types of whole numbers and of real ones, as static quantisation takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.inward, self.outward = run_network(), ao.QuantStub(), ao.DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outward(self.net(self.inward(x)))
        return y


@pytest.mark.filterwarnings("ignore")
def test_a_statically_quantised_program_runs_as_saved_under_an_identity_layer(cli: Cli, tmp_path: Path) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no quantised kernels of this kind here")
    net = Quantised().eval()
    net.qconfig = ao.get_default_qconfig("fbgemm")
    prepared = ao.prepare(net)
    prepared(torch.from_numpy(INPUTS))
    whole = ao.convert(prepared)
    torch.jit.trace(whole, torch.zeros(2, 6)).save(str(tmp_path / "net.pt"))
    np.savez(tmp_path / "data.npz", x=INPUTS, y=np.arange(40) % 3)
    data = ("--data", f"train=npz:{tmp_path / 'data.npz'}")
    done = cli(
        "extract-features", tmp_path / "q", "--model", f"jit:{tmp_path / 'net.pt'}", "--last-layer", "identity", *data
    )
    assert done.code == 0
    features = read_features(tmp_path / "q.bnn/features/train.h5").features
    np.testing.assert_array_equal(features, whole(torch.from_numpy(INPUTS)).numpy())


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_makes_a_run_which_a_change_of_its_file_makes_stale(form: str, tmp_path: Path, cli: Cli) -> None:
    file, make = FORMS[form]
    net = run_network(nn.LogSoftmax(1))
    make(tmp_path / file, net)
    np.savez(tmp_path / "data.npz", x=INPUTS, y=np.arange(40) % 3)
    line: list[Any] = ["extract-features", tmp_path / "run", "--model", f"{form}:{tmp_path / file}"]
    line += ["--data", f"train=npz:{tmp_path / 'data.npz'}", "--batch-size", 16]
    done = cli(*line)
    assert done.code == 0, done.stderr
    assert "log-softmax" in done.stderr
    made = read_features(tmp_path / "run.bnn/features/train.h5")
    assert made.head_weight is not None
    assert made.head_bias is not None
    with torch.inference_mode():
        expected = net(torch.from_numpy(INPUTS))
    logits = torch.from_numpy(made.features @ made.head_weight.T + made.head_bias)
    torch.testing.assert_close(logits.log_softmax(1), expected, atol=1e-5, rtol=0)
    assert "up to date" in cli(*line).stderr
    make(
        tmp_path / file,
        run_network(nn.LogSoftmax(1)).apply(lambda layer: layer.register_buffer("other", torch.ones(1))),
    )
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-1])
    again = cli("fit-laplace", tmp_path / "run", "--prior-precision", 1)
    assert again.code == 65, again.stderr
    assert f"{tmp_path / file}" in again.stderr or file in again.stderr
