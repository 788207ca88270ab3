"""What the device code promises about precision and memory."""

import os
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bnncli.errors import DeviceError, UsageError
from bnncli.system import devices


def test_products_and_convolutions_are_never_coarser_than_float32() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True
    devices.configure_torch(threads=None, deterministic=False)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["cuda:", "cuda:²", "cuda:-1", "cuda:1.0", "gpu", "cuda0", "", "cuda:99999999999"])
def test_a_device_that_means_nothing_is_a_wrong_option(name: str) -> None:
    with pytest.raises(UsageError, match="expected auto, cpu, cuda, cuda:N or mps"):
        devices.resolve_device(name)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_gpu_is_found_by_its_number_and_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2)
    assert devices.resolve_device("auto") == devices.resolve_device("cuda") == torch.device("cuda:0")
    assert devices.resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(DeviceError, match="this machine has 2 CUDA devices, numbered from cuda:0"):
        devices.resolve_device("cuda:2")
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cuda:1", "cpu"):
        devices.select_device(devices.resolve_device(name))
    assert current == [torch.device("cuda:1")]


def test_pytorch_is_asked_for_a_gpu_only_where_there_may_be_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "resolve_device", lambda name: f"asked for {name}")
    assert devices.device_name("auto") == "asked for auto"  # imported already, as here
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    assert [devices.device_name(name) for name in ("auto", "cpu", "cuda:1")] == ["cpu", "cpu", "asked for cuda:1"]
    (tmp_path / "nvidia0").touch()
    assert [devices.device_name(name) for name in ("auto", "cpu")] == ["asked for auto", "cpu"]


_TAKE = """
import os, sys
from bnncli.system.devices import device_name
device_name("cpu")
assert "BNNCLI_GPUS" in os.environ
device_name("auto")
assert "BNNCLI_GPUS" not in os.environ  # not for the processes that it starts
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
sys.stdin.read()
"""


def test_each_process_takes_a_device_of_the_pool_for_as_long_as_it_lives(tmp_path: Path) -> None:
    environment = {**os.environ, "BNNCLI_GPUS": "GPU-a,cpu", "TMPDIR": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)

    def start() -> subprocess.Popen[str]:
        words = [sys.executable, "-c", _TAKE]
        return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first, start() as second, start() as third:
        outputs = [process.stdout for process in (first, second, third) if process.stdout is not None]
        taken: dict[Any, str] = {}
        while len(taken) < 2:
            taken |= {output: output.readline() for output in select.select(outputs, [], [])[0] if output not in taken}
            outputs = [output for output in outputs if output not in taken]
        assert sorted(taken.values()) == ["\n", "GPU-a\n"]
        assert not select.select(outputs, [], [], 0.5)[0]  # it waits
        ended = next(process for process in (first, second, third) if taken.get(process.stdout) == "GPU-a\n")
        ended.kill()
        assert outputs[0].readline() == "GPU-a\n"
        for process in (first, second, third):
            process.kill()


def test_why_there_is_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"no CUDA device: this PyTorch \(.*\) was built without CUDA"):
        devices.resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is ''"):
        devices.resolve_device("cuda:0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([]))
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(DeviceError, match="has no NVIDIA GPU, or its driver is not loaded"):
        devices.resolve_device("cuda")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    with pytest.raises(DeviceError, match=r"does not support CUDA 13.0"):
        devices.resolve_device("cuda")


@pytest.mark.parametrize(("limit", "left"), [("1000000", 400_000), ("max", 1 << 62), ("100", 0), ("?", 1 << 62)])
def test_a_containers_limit_counts_less_what_it_cannot_give_back(tmp_path: Path, limit: str, left: int) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 60000\nactive_file 40000\n")
    assert devices._container_memory(tmp_path) == left


def test_memory_is_what_the_tightest_of_system_container_and_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert 1 << 20 < devices.available_memory(cpu) <= devices._system_memory() + (1 << 30)
    monkeypatch.setattr(devices, "_container_memory", lambda folder: 5000)
    assert devices.available_memory(cpu) == 5000
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (used // 2, used // 2))
    assert devices.available_memory(cpu) == 0


@pytest.fixture
def precision() -> Iterator[None]:
    """A test may set how coarse products are."""
    with devices._precision_kept():
        yield


def settings() -> dict[str, object]:
    return {repr(place): place.fp32_precision for place in devices._with_precision()}


def test_nothing_is_computed_in_the_callers_autocast() -> None:
    left, right = torch.rand(5, 5), torch.rand(5, 5)
    expected = left @ right
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with devices.keep_settings():
            assert not torch.is_autocast_enabled("cuda")
            assert torch.equal(left @ right, expected)
        assert (left @ right).dtype == torch.bfloat16


def test_one_thread_at_a_time_has_its_settings() -> None:
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        with devices.keep_settings():
            inside.set()
            go_on.wait(5)
            seen.append("first")

    def second() -> None:
        with devices.keep_settings(), devices.keep_settings():
            seen.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    torch.set_default_dtype(torch.float64)
    try:
        threads[0].start()
        assert inside.wait(5)
        threads[1].start()
        threads[1].join(0.1)
        go_on.set()
        for thread in threads:
            thread.join(5)
        assert (seen, torch.get_default_dtype()) == (["first", "second"], torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_callers_default_device_is_not_ours() -> None:
    torch.set_default_device("meta")
    try:
        with devices.keep_settings():
            assert torch.ones(2).device.type == "cpu"
        assert torch.ones(2).device.type == "meta"
    finally:
        torch.set_default_device(None)


def places() -> list[object]:
    return [torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this PyTorch has the older calls alone")
@pytest.mark.parametrize("index", range(3))
def test_precision_that_was_set_by_the_newer_attributes_is_kept(precision: None, index: int) -> None:
    before = settings()
    places()[index].fp32_precision = "tf32"  # type: ignore[attr-defined]
    wanted = settings()
    assert wanted != before
    with devices.keep_settings():
        devices.configure_torch(threads=None, deterministic=False)
        assert "tf32" not in settings().values()
        assert torch.get_float32_matmul_precision() == "highest"
    assert settings() == wanted


@pytest.mark.parametrize("level", ["high", "highest"])
def test_precision_that_was_set_by_the_older_calls_is_kept(precision: None, level: str) -> None:
    torch.set_float32_matmul_precision(level)
    torch.backends.cudnn.allow_tf32 = level == "high"
    wanted = settings()
    with devices.keep_settings():
        devices.configure_torch(threads=None, deterministic=False)
    assert (torch.get_float32_matmul_precision(), settings()) == (level, wanted)
    assert torch.backends.cudnn.allow_tf32 == (level == "high")


def test_a_gpu_that_was_first_used_inside_is_not_the_current_one_after(monkeypatch: pytest.MonkeyPatch) -> None:
    used, current = [False], [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    with devices.keep_settings():
        used[0], current[0] = True, 1
    assert current == [0]
    current[0] = 2
    with devices.keep_settings():
        current[0] = 1
    assert current == [2]
