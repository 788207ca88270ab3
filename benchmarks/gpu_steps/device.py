"""The GPU that is looked at, or a pretend one: what it counts, what it can be made to do, what it tells of its memory."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_PIECE = 1 << 21  # bytes, of memory that the device gives
REFUSAL = "this capture is refused, so that steps run one by one"


@dataclass
class Counts:
    """Of a block: graphs captured and replayed, and how often the host waited for the GPU."""

    captures: int = 0
    replays: int = 0
    syncs: int = 0


class Gpu:
    """A CUDA device."""

    is_pretend = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """As --device takes it."""
        return str(self.device)

    def facts(self) -> dict[str, Any]:
        """Name, driver, memory."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "GPU": properties.name,
            "driver": driver(),
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        }

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Counts what happens in the block; a replay that would make the host wait is an error."""
        counts = Counts()

        class Graph(torch.cuda.CUDAGraph):
            def replay(self) -> None:
                counts.replays += 1
                torch.cuda.set_sync_debug_mode("error")
                try:
                    super().replay()
                finally:
                    torch.cuda.set_sync_debug_mode("warn")

        class Capture(torch.cuda.graph):
            def __enter__(self) -> Any:
                counts.captures += 1
                return super().__enter__()

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", Graph))
            stack.enter_context(mock.patch.object(torch.cuda, "graph", Capture))
            seen = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(_sync_mode("warn"))
            yield counts
            counts.syncs = sum("called a synchronizing" in str(warning.message) for warning in seen)

    @contextmanager
    def refusing_captures(self) -> Iterator[None]:
        """Captures fail in the block, so that what would be replayed is done step by step."""

        class Capture(torch.cuda.graph):
            def __enter__(self) -> Any:
                raise RuntimeError(REFUSAL)

        with mock.patch.object(torch.cuda, "graph", Capture), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    @contextmanager
    def ballast(self, leave: int) -> Iterator[None]:
        """Holds all memory but so many bytes."""
        self.release()
        held: list[torch.Tensor] = []
        size = self._free() - leave
        while size >= _PIECE:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            except torch.OutOfMemoryError:  # no piece is as large
                size //= 2
            else:
                size = self._free() - leave
        try:
            yield
        finally:
            held.clear()
            self.release()

    def _free(self) -> int:
        """Bytes that the device says are free."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def release(self) -> None:
        """Give unused memory back to the device."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def problems(self) -> list[str]:
        """What was done since the last call that a GPU refuses or must not do; a real one refuses by itself."""
        return []

    def peak(self, work: Callable[[], Any]) -> int | None:
        """Bytes that the work holds at most, beside what is held before; None where that cannot be told."""
        self.release()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = work()
        torch.cuda.synchronize(self.device)
        del result
        return int(torch.cuda.max_memory_allocated(self.device)) - before


class PretendGpu(Gpu):
    """A GPU in CPU memory, of tests/pretend_cuda.py: no speed, no memory of its own."""

    is_pretend = True

    def __init__(self, pretend: Any) -> None:
        super().__init__(pretend.device)
        self.pretend = pretend

    def facts(self) -> dict[str, Any]:
        """That it is none."""
        return {"GPU": "a pretend one, in CPU memory: no asynchrony, no speed, no rounding of its own"}

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """The pretend device counts by itself."""
        pretend, counts = self.pretend, Counts()
        before = pretend.num_captures, pretend.num_replays, pretend.num_syncs
        yield counts
        after = pretend.num_captures, pretend.num_replays, pretend.num_syncs
        counts.captures, counts.replays, counts.syncs = (b - a for a, b in zip(before, after, strict=True))

    @contextmanager
    def refusing_captures(self) -> Iterator[None]:
        """The first kernel of a capture fails."""
        self.pretend.capture_error = RuntimeError(REFUSAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self.pretend.capture_error = None

    @contextmanager
    def ballast(self, leave: int) -> Iterator[None]:
        """It says that no more is free, and gives no larger tensor."""
        pretend = self.pretend
        before = pretend.free_memory, pretend.largest_tensor
        pretend.free_memory, pretend.largest_tensor = leave, leave
        try:
            yield
        finally:
            pretend.free_memory, pretend.largest_tensor = before

    def release(self) -> None:
        """Nothing is kept."""

    def problems(self) -> list[str]:
        """Mixes of devices, generators of the wrong one, what a capture must not do."""
        kinds = (self.pretend.mixes, self.pretend.errors, self.pretend.capture_problems)
        found = [text for kind in kinds for text in kind]
        for kind in kinds:
            kind.clear()
        return found

    def peak(self, work: Callable[[], Any]) -> int | None:
        """Does the work; its memory is the CPU's."""
        work()
        return None


@contextmanager
def open_gpu(device: torch.device | None) -> Iterator[Gpu]:
    """The device; a pretend one for None."""
    if device is not None:
        torch.cuda.set_device(device)
        yield Gpu(device)
        return
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    try:
        pretend = importlib.import_module("pretend_cuda").pretend
    finally:
        del sys.path[0]
    with pretend() as found:
        yield PretendGpu(found)


@contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    """What torch does where the host waits."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def driver() -> str:
    """The driver's version as nvidia-smi tells it."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "not told: nvidia-smi does not run"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "not told"
