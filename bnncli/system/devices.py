"""Choose the device that a command computes on, and estimate its speed from its specification."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import DeviceError, UsageError
from bnncli.lazy import addresses_left, torch
from bnncli.names import printable
from bnncli.system.signals import raise_if_received

if TYPE_CHECKING:
    from torch import Tensor

_ONE_AT_A_TIME = threading.RLock()
DEVICE_FILES = Path("/dev")
# device files of every driver that PyTorch computes with
_GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")

CPU, MPS, VISIBLE, _THREADS = "cpu", "mps", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
GPU_POOL = "BNNCLI_GPUS"  # variable with the devices that processes share out among them, one each
_POLL = 0.2  # seconds between looks for a free one


def device_name(name: str) -> str:
    """Return the name that resolve_device gives, without importing PyTorch where the machine has no GPU.

    Raises:
        UsageError, DeviceError: as resolve_device.
    """
    if name != CPU:
        _take_device()
    is_told = "torch" in sys.modules or any(any(DEVICE_FILES.glob(pattern)) for pattern in _GPU_FILES)
    return "cpu" if name == "cpu" or (name == "auto" and not is_told) else str(resolve_device(name))


def _take_device() -> None:
    """Take the first free device of $BNNCLI_GPUS and hide the others from CUDA. Its lock is held until this process ends.

    Raises:
        Interrupted: a signal has come while it waited for one.
    """
    names = [name.strip() for name in os.environ.pop(GPU_POOL, "").split(",") if name.strip()]
    folder = Path(tempfile.gettempdir(), f"bnncli-gpus-{os.getuid()}")
    while names:
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            path = folder / re.sub(r"\W", "-", name)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            os.environ[VISIBLE] = "" if name == CPU else name
            return
        raise_if_received("the wait for a GPU")
        time.sleep(_POLL)


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`: auto (a CUDA GPU where there is one), cpu, cuda, cuda:N or mps.

    Raises:
        UsageError: for any other name.
        DeviceError: when a GPU was asked for by name and is not there; an explicit device never falls back.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == MPS:
        if not torch.backends.mps.is_available():
            raise DeviceError(f"\0device\0 {name}: {_why_no_mps()}", hint="use \0device\0 auto or \0device\0 cpu")
        return torch.device(MPS)
    if re.fullmatch(r"cuda(:[0-9]{1,4})?", name) is None:
        raise UsageError(f"\0device\0: expected auto, cpu, cuda, cuda:N or mps; got {name!r}")
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = (
            f"this machine has {count} CUDA devices, numbered from cuda:0"
            if count
            else f"no CUDA device: {_why_no_gpu()}"
        )
        raise DeviceError(f"\0device\0 {name}: {found}", hint="use \0device\0 auto or \0device\0 cpu")
    return torch.device("cuda", index)


def _why_no_gpu() -> str:
    """Explain why PyTorch has no CUDA device, as far as can be told without one."""
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) was built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {printable(visible)!r}"
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return "the system has no NVIDIA GPU, or its driver is not loaded"
    return f"the driver does not support CUDA {torch.version.cuda}, which PyTorch was built for; see nvidia-smi"


def _why_no_mps() -> str:
    """Explain why PyTorch has no MPS device."""
    if not torch.backends.mps.is_built():
        return f"this PyTorch ({torch.__version__}) was built without MPS, which only builds for macOS have"
    return "this machine has no Apple GPU that MPS supports, or its macOS is older than PyTorch needs"


def has_float64(device: torch.device | str) -> bool:
    """Return whether the device computes in float64: all but MPS, where only networks' forward passes run."""
    return torch.device(device).type != MPS


def to_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64; on the CPU if its device has none."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def select_device(device: torch.device) -> None:
    """Make a GPU the current one of this process, for streams and graphs that name none."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def configure_torch(*, threads: int | None, deterministic: bool) -> None:
    """Set the number of CPU threads and, if asked, deterministic kernels for this process.

    Float32 products and convolutions are true float32 on every device: TF32 has three digits, and energies of 10,000
    nats need seven.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def keep_settings() -> Iterator[None]:
    """Restore torch's settings after the block, for processes that are not ours.

    Inside, the default dtype is float32 and the default device the CPU, autocast is off and no gradients are recorded.
    The settings are global to the process, so one thread at a time is inside.
    """
    with _ONE_AT_A_TIME, ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(_set_current_gpu, torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
        stack.enter_context(_precision_kept())
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":  # only where needed: each operation takes longer in such a block
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda", *([MPS] if torch.backends.mps.is_available() else [])):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore torch's random state after the block."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus):
        yield


def _set_current_gpu(index: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_device(index)


@contextmanager
def _precision_kept() -> Iterator[None]:
    """Restore the precision of float32 products after the block, whether set by PyTorch's older calls or the newer attributes.

    Inside, the newer attributes allow nothing coarse: a setting of a whole backend would apply where a part has none.
    """
    older: list[tuple[Callable[[Any], None], Any]] = []
    with suppress(RuntimeError):  # the older calls raise where the newer attributes were set
        older.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    with suppress(RuntimeError):
        older.append((partial(setattr, torch.backends.cudnn, "allow_tf32"), torch.backends.cudnn.allow_tf32))
    newer = []
    for place in _with_precision():  # backends before their parts: a part without a setting reports its backend's
        newer.append((place, place.fp32_precision))
        place.fp32_precision = "none"
    try:
        yield
    finally:
        for restore, value in older:
            restore(value)
        for place, value in newer:
            place.fp32_precision = value


def _with_precision() -> list[Any]:
    """Return the parts of PyTorch with an `fp32_precision`, backends before their parts; none in a PyTorch without it.

    mkldnn as a whole is missing: setting it sets torch.backends.
    """
    backends: list[Any] = [torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn]
    parts = [getattr(place, name, None) for place in backends for name in ("matmul", "conv", "rnn")]
    return [place for place in [torch.backends, torch.backends.cudnn, *parts] if hasattr(place, "fp32_precision")]


def has_bfloat16_products(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 faster than float32: such GPUs, and CPUs with instructions for it."""
    if device.type != "cpu":
        return has_coarse_products(device)
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def has_coarse_products(device: torch.device) -> bool:
    """Return whether the device has TF32 and bfloat16 products: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def tf32_products() -> Iterator[None]:
    """Use TF32 for float32 matrix products on a GPU inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def share_threads(count: int) -> dict[str, str]:
    """Return the threads of each of several processes, where no variable sets them."""
    if count == 1 or _THREADS in os.environ:
        return {}
    return {_THREADS: str(max(1, count_cores() // count))}


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one CPU thread inside the block: small operations lose more by waiting for threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_memory(device: torch.device | str) -> int:
    """Return the bytes that can be allocated on the device: free GPU memory, or what the system, its container and ulimit -v leave."""
    if str(device).startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_memory(), _container_memory(Path("/sys/fs/cgroup")), addresses_left())


def _system_memory() -> int:
    """Return the bytes that the system reports as available."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_memory(folder: Path) -> int:
    """Return the bytes that the control group (version 2) has left, its file cache counted as free; huge without a limit."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
        cache = sum(int(line.split()[1]) for line in statistics if line.startswith(("inactive_file ", "active_file ")))
    except (OSError, ValueError, IndexError):  # no such group, or a limit of "max"
        return 1 << 62
    return max(0, limit - max(0, used - cache))


# Of one CPU core, measured: float32 products, float64 factorisations, elementwise operations.
_CORE = (3e10, 1.2e10, 3e9)
# Operations of a GPU's multiprocessor per cycle, float32 and float64, by compute capability (CUDA C++ Programming
# Guide, arithmetic instructions; a multiply-add is two). Where float64 has an eighth or less, it is a consumer card.
_PER_CYCLE = {(6, 0): (128, 64), (7, 0): (128, 64), (8, 0): (128, 64), (9, 0): (256, 128), (10, 0): (256, 128)}
_PER_CYCLE_OF_OTHERS = (256, 4)
_CYCLES = 1.4e9  # per second, sustained
_SHARE_OF_PRODUCTS, _SHARE_OF_FACTORS = 0.5, 0.3  # share of the peak that large products and factorisations reach


class Speed(NamedTuple):
    """Operations a second.

    Args:
        products: of float32 matrix products over the examples.
        factors: of float64 factorisations.
        elementwise: of elementwise operations.
    """

    products: float
    factors: float
    elementwise: float


def estimate_speed(device: torch.device | str, *, threads: int | None = None) -> Speed:
    """Estimate the speed of the device, to within a factor of about three.

    Args:
        threads: of the CPU; the process's number by default.
    """
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return Speed(*((threads or torch.get_num_threads()) * one for one in _CORE))
    single, double = _PER_CYCLE.get(torch.cuda.get_device_capability(chosen), _PER_CYCLE_OF_OTHERS)
    cycles = _CYCLES * torch.cuda.get_device_properties(chosen).multi_processor_count
    products = _SHARE_OF_PRODUCTS * single * cycles
    return Speed(products, _SHARE_OF_FACTORS * double * cycles, products / 20)
