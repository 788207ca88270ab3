"""A pretend CUDA device in CPU memory: tells mixes of devices, host syncs and transfers, and emulates graphs.

Storages made on the device are tagged. A function mode sees the calls of Python (devices of arguments, transfers, generators),
a dispatch mode the kernels below them (mixes, syncs, what a capture records). Nothing of it is left after `pretend()`.

What it cannot show: asynchrony, memory that runs out by itself, speed, kernels' own rounding, two GPUs at work at once.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bnncli
from bnncli.training.loop import _side_stream
from bnncli.training.optimizers import Adam, Optimizer, Sgd

_PACKAGE = str(Path(bnncli.__file__).parent) + "/"
_CPU = torch.device("cpu")
_TOTAL_MEMORY = 140 << 30
_MAX_TAGS = 20_000  # after which those of freed storages are forgotten
_RealGenerator = torch.Generator

# Kernels whose result the host needs before it goes on.
_SYNCING = {
    "_local_scalar_dense", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "_unique2", "bincount", "equal", "histc",
    "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
# As torch.use_deterministic_algorithms documents them: those that raise, and those that add in any order where it is off.
_WITHOUT_DETERMINISTIC = {
    "histc", "kthvalue", "put", "put_", "nll_loss2d_forward", "nll_loss2d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "adaptive_max_pool2d_backward", "_adaptive_avg_pool2d_backward", "reflection_pad2d_backward",
}  # fmt: skip
_ADDING = {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"}
_WATCHED = {*_WITHOUT_DETERMINISTIC, *_ADDING, "bincount", "cumsum", "median"}
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
_RESHAPING = {"unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_", "swapdims_", "swapaxes_", "detach_"}
_CALLS = {"__get__", "cpu", "cuda", "to", "pin_memory", "is_pinned", "record_stream", "numpy", "__array__", "tolist"}
_PLACES = {"device", "generator", "pin_memory"}
_ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _registers_lazily() -> bool:
    """As the release of torch that is there does."""
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.14"


@dataclass
class Pretend:
    """What the pretend device saw, and how it is to behave; sites are places in the package, innermost first.

    Args:
        device: its name; there are as many devices as it takes, and tensors on this one alone.
        free_memory: bytes that it says are free.
        largest_tensor: bytes; a larger tensor is out of memory.
        capture_error: what the first kernel of a capture fails with; the capture then ends as torch 2.13 ends it, with an
            error of its own and with its stream left current.
        captures_nothing: whether captures record no kernel, as where they are made on another device's stream.
        registers_lazily: whether a graph finds the generators it draws from by itself, as from torch 2.14 on.
        mixes: kernels on tensors of both devices. errors: what CUDA refuses. scalars: 0-dimensional CPU tensors in kernels.
        capture_problems: what a capture must not do: host syncs, copies from the CPU, generators that are not registered;
            waits of other threads, which end it unless it is of its own thread alone.
        nondeterministic: kernels whose sums come in any order.
        syncs: where the host waits. uploads, downloads: bytes that travel.
        kernels: by name. num_captures, num_replays: of graphs.
    """

    device: torch.device
    free_memory: int = 100 << 30
    largest_tensor: int = 1 << 62
    capture_error: RuntimeError | None = None
    captures_nothing: bool = False
    registers_lazily: bool = field(default_factory=_registers_lazily)
    mixes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    scalars: Counter[str] = field(default_factory=Counter)
    capture_problems: Counter[str] = field(default_factory=Counter)
    nondeterministic: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    downloads: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    num_captures: int = 0
    num_replays: int = 0
    current_device: int = 0
    capture: _Graph | None = None
    is_hidden: bool = False
    _placing: int = 0
    _sync_mode: str = "default"
    _tags: dict[int, StorageWeakRef] = field(default_factory=dict)
    _pinned: dict[int, StorageWeakRef] = field(default_factory=dict)
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _graphs: list[weakref.ref[_Graph]] = field(default_factory=list)

    @property
    def num_syncs(self) -> int:
        """How often the host waited."""
        return self.syncs.total()

    @property
    def num_kernels(self) -> int:
        """Kernels launched by the host; a replay is none."""
        return self.kernels.total()

    def problems(self) -> list[str]:
        """Lines for all that must not happen: mixes, errors, capture problems, sums in any order."""
        kinds = ("mixes", "errors", "capture_problems", "nondeterministic")
        return [f"{kind}: {text} ({count})" for kind in kinds for text, count in getattr(self, kind).items()]

    @property
    def num_live_graphs(self) -> int:
        """Graphs that somebody holds, and their memory with them."""
        return sum(graph() is not None for graph in self._graphs)

    def clear(self) -> None:
        """Forget what was seen."""
        for value in vars(self).values():
            if isinstance(value, Counter):
                value.clear()
        self.num_captures = self.num_replays = 0

    def holds(self, tensor: object) -> bool:
        """Whether a tensor lies on the device."""
        return isinstance(tensor, Tensor) and _storage_key(tensor) in self._tags

    def current_stream(self, device: Any = None) -> _Stream:
        """The stream that kernels on a device go to."""
        index = _index(device, self.current_device)
        return self._streams.setdefault(index, _Stream(index, pretend_=self))

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor, which lies on the device from now on."""
        storage = _storage(tensor)
        if (size := storage.nbytes()) > self.largest_tensor:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        if (key := storage._cdata) not in self._tags:
            self._tags[key] = StorageWeakRef(storage)
        if len(self._tags) > _MAX_TAGS:
            self._forget_freed()
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor, in pinned memory from now on."""
        storage = _storage(tensor)
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in pinned memory."""
        return _storage_key(tensor) in self._pinned

    def sync(self, kind: str) -> None:
        """The host waits here; an error in a capture, and where set_sync_debug_mode says so."""
        self.syncs[f"{kind} @ {_site()}"] += 1
        if self.capture is not None:
            self.capture_problems[f"sync, {kind} @ {_site()}"] += 1
        if self._sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def _forget_freed(self) -> None:
        for known in (self._tags, self._pinned):
            for key in [key for key, reference in known.items() if reference.expired()]:
                del known[key]

    @contextmanager
    def placing(self) -> Iterator[None]:
        """New tensors are made on the device."""
        self._placing += 1
        try:
            yield
        finally:
            self._placing -= 1

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """Kernels are run and not looked at."""
        before, self.is_hidden = self.is_hidden, True
        try:
            yield
        finally:
            self.is_hidden = before

    def count_transfer(self, tensor: Tensor, *, is_upload: bool, waits: bool) -> None:
        """A copy between the CPU and the device."""
        travelled = self.uploads if is_upload else self.downloads
        travelled[_site()] += tensor.numel() * tensor.element_size()
        if waits:
            self.sync("upload" if is_upload else "download")


def _storage(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def _storage_key(tensor: Tensor) -> int:
    try:
        return int(_storage(tensor)._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor, say, has none
        return -1


def _site(depth: int = 2) -> str:
    """The innermost lines of the package that are being run."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            found.append(f"{frame.f_code.co_filename[len(_PACKAGE) :]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "outside"


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, which may be nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _listed(values: Any) -> list[Tensor]:
    """The same as a list, quickly: of arguments that are flat, or lists of tensors."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _aliases(value: Any) -> Any:
    """The same arguments on the same memory: shapes of the tensors themselves may be changed in place later."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return type(value)([_aliases(part) for part in value])
    return {name: _aliases(part) for name, part in value.items()} if isinstance(value, dict) else value


def _key_of(tensor: Tensor) -> int:
    """`_storage_key` where no function mode looks on."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -1


def _index(device: Any, otherwise: int) -> int:
    """The number of a CUDA device, however it is given."""
    if device is None:
        return otherwise
    if isinstance(device, int):
        return device
    index = torch.device(device).index if isinstance(device, str) else device.index
    return otherwise if index is None else int(index)


class _Kernel(NamedTuple):
    """What is to be known of a kernel; views and allocations launch none."""

    name: str
    is_launched: bool
    may_wait: bool
    is_watched: bool


@cache
def _kernel_of(func: Any) -> _Kernel:
    name = func._schema.name.partition("::")[2]
    is_view = any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns)
    is_view = is_view or name in _RESHAPING
    may_wait = name in _SYNCING or name in _INDEXING
    return _Kernel(name, not is_view and name not in _ALLOCATING, may_wait, name in _WATCHED)


class _Dispatch:
    """Looks at kernels. Apart from the mode, whose subclasses torch wraps in torch._dynamo, which takes seconds to import."""

    pretend: Pretend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pretend.is_hidden:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        pretend_, known = self.pretend, self.pretend._tags
        tensors = _listed([*args, *kwargs.values()] if kwargs else args)
        keys = [_key_of(tensor) for tensor in tensors]
        held = [key in known for key in keys]
        is_any_held = True in held
        if not (is_any_held or pretend_._placing):
            return func(*args, **kwargs)
        kernel = _kernel_of(func)
        if is_any_held:
            if False in held or kernel.may_wait:
                self._look_at_devices(kernel.name, args, kwargs, tensors, held)
            if kernel.is_watched:
                self._look_at_sums(kernel.name, args, kwargs)
        if kernel.is_launched:
            pretend_.kernels[kernel.name] += 1
        capture = pretend_.capture
        if capture is not None and kernel.is_launched:
            return self._record(capture, func, args, kwargs)
        out = _as_on_a_gpu(func)(*args, **kwargs)
        self._place(out, keys)
        return out

    def _look_at_devices(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], held: list[bool]) -> None:
        """Mixes, transfers and syncs of one kernel."""
        pretend_ = self.pretend
        if name in _SYNCING:
            pretend_.sync(name)
        if name in _INDEXING and any(part is not None and part.dtype == torch.bool for part in args[1]):
            pretend_.sync(f"{name} by a mask")
        aliens = [tensor for tensor, is_held in zip(tensors, held, strict=True) if not is_held]
        if not aliens or torch.autograd.forward_ad._current_level >= 0:  # forward mode works on tensors of its own
            return
        if name == "copy_":
            is_upload, other = (True, args[1]) if pretend_.holds(args[0]) else (False, args[0])
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            pretend_.count_transfer(other, is_upload=is_upload, waits=not (non_blocking and pretend_.is_pinned(other)))
            if pretend_.capture is not None and is_upload:
                pretend_.capture_problems[f"copy from the CPU @ {_site()}"] += 1
            return
        if name in _INDEXING and pretend_.holds(args[0]):
            value = args[2] if len(args) > 2 else args[0]
            if pretend_.holds(value) or value.ndim == 0:  # CPU indices are allowed, and copied
                pretend_.sync(f"{name} by CPU indices")
                return
        shapes = [tuple(tensor.shape) for tensor in aliens if tensor.ndim > 0]
        where = pretend_.mixes if shapes else pretend_.scalars
        where[f"{name} with CPU {shapes or 'scalar'} @ {_site()}"] += 1

    def _look_at_sums(self, name: str, args: Any, kwargs: Any) -> None:
        """Kernels that add in any order, and those that the deterministic mode refuses."""
        refuses = name in _WITHOUT_DETERMINISTIC or (name == "median" and len(args) > 1)
        refuses = refuses or (name == "cumsum" and args[0].is_floating_point() and kwargs.get("dtype") != torch.int64)
        weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
        refuses = refuses or (name == "bincount" and weights is not None)
        if refuses or (name in _ADDING and _adds_twice(name, args)):
            self.pretend.nondeterministic[f"{name} @ {_site()}"] += 1
        if refuses and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                f"{name} does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True)'"
            )

    def _record(self, capture: _Graph, func: Any, args: Any, kwargs: Any) -> Any:
        """A kernel in a capture: what it writes to is left alone until a replay; new tensors are made, for their shapes."""
        if self.pretend.capture_error is not None:
            capture.error = self.pretend.capture_error
            raise capture.error
        if not func._schema.is_mutable:
            kernel = _as_on_a_gpu(func)  # with the precision of now, whatever it is at a replay
            out = kernel(*args, **kwargs)
            self._place(out, [_key_of(tensor) for tensor in (*_tensors(args), *_tensors(kwargs))])
            capture.records.append((kernel, _aliases(args), _aliases(kwargs), _aliases(out)))
            return out
        capture.records.append((func, _aliases(args), _aliases(kwargs), None))
        given = dict(zip((part.name for part in func._schema.arguments), args, strict=False)) | kwargs
        written = [
            given[part.name]
            for part in func._schema.arguments
            if part.alias_info is not None and part.alias_info.is_write and part.name in given
        ]
        returns = func._schema.returns
        return written[0] if len(returns) == 1 else tuple(written) if returns else None

    def _place(self, out: Any, keys: list[int]) -> None:
        """New tensors, on memory other than these keys', are where the others are."""
        for tensor in [out] if isinstance(out, Tensor) else _listed(out) if isinstance(out, (list, tuple)) else []:
            if _key_of(tensor) not in keys:
                self.pretend.place(tensor)


class _Kernels(_Dispatch, TorchDispatchMode):
    """What reaches the kernels."""

    def __init__(self, pretend_: Pretend) -> None:
        super().__init__()
        self.pretend = pretend_


_MM, _MM_TO = torch.ops.aten.mm.default, torch.ops.aten.mm.dtype  # looking them up takes longer than most of the rest


def _as_on_a_gpu(func: Any) -> Callable[..., Any]:
    """The kernel with what a GPU's products can and a CPU's cannot: float32 sums of halves, and TF32 where it is on."""
    if func is _MM_TO:
        return lambda left, right, dtype: torch.mm(left.to(dtype), right.to(dtype))
    if func is _MM and torch.get_float32_matmul_precision() != "highest":
        return lambda left, right: torch.mm(_ten_bits(left), _ten_bits(right))
    return cast("Callable[..., Any]", func)


def _ten_bits(tensor: Tensor) -> Tensor:
    """Float32 numbers with TF32's bits of mantissa, the nearest ones; other types as they are."""
    if tensor.dtype != torch.float32:
        return tensor
    fraction, exponent = torch.frexp(tensor)
    return torch.ldexp((fraction * 2**11).round() * 2**-11, exponent)


def _adds_twice(name: str, args: Any) -> bool:
    """Whether index_add or scatter_add adds to some element more than once, so that the order matters."""
    _, dim, index = args[:3]
    if index.numel() == 0:
        return False
    ordered = index.sort(dim=dim if index.ndim else 0).values
    return bool((ordered.diff(dim=dim if index.ndim > 1 else 0) == 0).any())


class _Calls(TorchFunctionMode):
    """What Python calls."""

    def __init__(self, pretend_: Pretend) -> None:
        super().__init__()
        self.pretend = pretend_

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, pretend_ = getattr(func, "__name__", ""), self.pretend
        if name == "_parse_to" or (name not in _CALLS and not (kwargs and _PLACES.intersection(kwargs))):
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "__get__" and first is not None:
            return self._property(func, first, args, kwargs)
        if first is not None and name in ("cpu", "cuda", "to"):
            return self._to(name, *args, **kwargs)
        if first is not None and name in ("pin_memory", "is_pinned", "record_stream"):
            return self._pinned(name, first)
        if first is not None and name in ("numpy", "__array__") and pretend_.holds(first):
            pretend_.errors[f"{name} of a CUDA tensor @ {_site()}"] += 1
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if first is not None and name == "tolist" and pretend_.holds(first):
            pretend_.count_transfer(first, is_upload=False, waits=True)
            with pretend_.hiding():
                return func(*args, **kwargs)
        device = kwargs.get("device")
        self._look_at_generator(name, first, device, kwargs)
        if kwargs.pop("pin_memory", False):
            return pretend_.pin(func(*args, **kwargs))
        if device is None:
            return func(*args, **kwargs)
        return self._made_on(torch.device(device), func, name, args, kwargs)

    def _property(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        if func == Tensor.device.__get__:
            return self.pretend.device if self.pretend.holds(tensor) else func(tensor)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.pretend.holds(tensor)
        return func(*args, **kwargs)

    def _pinned(self, name: str, tensor: Tensor) -> Any:
        if name == "record_stream":
            return None
        if name == "is_pinned":
            return self.pretend.is_pinned(tensor)
        if self.pretend.holds(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return self.pretend.pin(tensor.clone())

    def _look_at_generator(self, name: str, first: Tensor | None, device: Any, kwargs: dict[str, Any]) -> None:
        """A generator draws on its own device, and in a capture only where it is registered."""
        generator, pretend_ = kwargs.get("generator"), self.pretend
        if not isinstance(generator, _RealGenerator):
            return
        out = kwargs.get("out")
        is_held = pretend_.holds(first) or pretend_.holds(out)
        kind = torch.device(device).type if device is not None else "cuda" if is_held else "cpu"
        own = generator.device.type
        if own != kind:
            pretend_.errors[f"{name} on {kind} with a generator on {own} @ {_site()}"] += 1
            raise RuntimeError(f"Expected a '{kind}' device type for generator but found '{own}'")
        if kind == "cuda" and isinstance(generator, _Generator):
            generator.look_at_draw(name)

    def _made_on(self, device: torch.device, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor made where `device` says."""
        pretend_ = self.pretend
        kwargs["device"] = _CPU
        if device.type != "cuda":
            if not any(pretend_.holds(tensor) for tensor in _tensors(args)):
                return func(*args, **kwargs)
            with pretend_.hiding():
                return func(*args, **kwargs)
        if _index(device, pretend_.current_device) != pretend_.device.index:
            pretend_.errors[f"{name} on {device} @ {_site()}"] += 1
        if name in ("tensor", "as_tensor", "asarray"):
            pretend_.sync("tensor of values")
        with pretend_.placing():
            out = func(*args, **kwargs)
        for tensor in _tensors(out):
            pretend_.place(tensor)
        return out

    def _to(self, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Tensor.cpu, Tensor.cuda and Tensor.to."""
        pretend_ = self.pretend
        kwargs.pop("memory_format", None)
        device: torch.device | None = {"cpu": _CPU, "cuda": pretend_.device}.get(name)
        dtype, others = tensor.dtype, list(args)
        given = kwargs.get("device", kwargs.get("other", others.pop(0) if name == "to" and others else None))
        if isinstance(given, Tensor):
            device, dtype = (pretend_.device if pretend_.holds(given) else _CPU), given.dtype
        elif isinstance(given, torch.dtype):
            dtype = given
        else:
            device = device if given is None else torch.device(given)
            if others and (others[0] is None or isinstance(others[0], torch.dtype)):
                dtype = others.pop(0) or dtype
        dtype = kwargs.get("dtype") or dtype
        non_blocking = kwargs.get("non_blocking", others[0] if others else False)
        return self._moved(tensor, device, dtype, non_blocking, kwargs.get("copy", False))

    def _moved(
        self, tensor: Tensor, device: torch.device | None, dtype: torch.dtype, non_blocking: bool, copy: bool
    ) -> Tensor:
        pretend_, is_held = self.pretend, self.pretend.holds(tensor)
        is_wanted = is_held if device is None else device.type == "cuda"
        if is_wanted == is_held:
            return tensor.to(dtype, copy=copy)
        if is_wanted:
            pretend_.count_transfer(tensor, is_upload=True, waits=not (non_blocking and pretend_.is_pinned(tensor)))
            if pretend_.capture is not None:
                pretend_.capture_problems[f"copy from the CPU @ {_site()}"] += 1
            with pretend_.hiding():
                moved = tensor.to(dtype, copy=True)
            return pretend_.place(moved)
        pretend_.count_transfer(tensor, is_upload=False, waits=True)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("a download that is differentiated")
        with pretend_.hiding():
            return tensor.to(dtype, copy=True)


class _Generator(_RealGenerator):
    """torch.Generator with a device that may be the pretend one."""

    pretend: Pretend

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made: _Generator = _RealGenerator.__new__(cls)
        own = torch.device(device)
        made.own_device = own if own.type == "cpu" else torch.device("cuda", _index(own, cls.pretend.current_device))
        made.graph = None
        return made

    own_device: torch.device
    graph: _Graph | None  # whose capture it was registered with, and until that ended well

    def __init__(self, device: Any = "cpu") -> None:
        """Made by __new__."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it draws."""
        return self.own_device

    def look_at_draw(self, name: str) -> None:
        """In a capture it must be registered; after one that failed it can no longer draw."""
        capture = self.pretend.capture
        if capture is not None and self.pretend.registers_lazily and self.graph is not capture:
            capture.take(self)
        if capture is not None and self.graph is not capture:
            self.pretend.capture_problems[f"unregistered generator, {name} @ {_site()}"] += 1
        if capture is None and self.graph is not None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


@dataclass(frozen=True)
class _Stream:
    """A queue of a device; nothing runs beside anything here."""

    index: int
    pretend_: Pretend = field(compare=False, repr=False)
    is_side: bool = False

    @property
    def device(self) -> torch.device:
        """Whose it is."""
        return torch.device("cuda", self.index)

    def wait_stream(self, other: _Stream) -> None:
        """All work is done."""

    def wait_event(self, event: _Event) -> None:
        """All work is done."""

    def record_event(self, event: _Event | None = None) -> _Event:
        """An event after the work so far."""
        return event or torch.cuda.Event()  # type: ignore[no-untyped-call,return-value]

    def synchronize(self) -> None:
        """The host waits."""
        self.pretend_.sync("stream")

    def is_capturing(self) -> bool:
        """Whether what goes to it is being written down."""
        return self.pretend_.capture is not None


class _Event:
    """A mark in a queue."""

    pretend: Pretend

    def __init__(self, **_: Any) -> None:
        """Options do not matter."""

    def record(self, stream: _Stream | None = None) -> None:
        """All work is done."""

    def synchronize(self) -> None:
        """All work is done; what waits for an event has taken care not to wait for much."""
        capture = self.pretend.capture
        if capture is not None and capture.thread in (None, threading.get_ident()):
            self.pretend.capture_problems[f"wait for an event @ {_site()}"] += 1

    def query(self) -> bool:
        """All work is done."""
        return True

    def wait(self, stream: _Stream | None = None) -> None:
        """All work is done."""

    def elapsed_time(self, other: _Event) -> float:
        """No time passes."""
        return 0.0


class _Graph:
    """torch.cuda.CUDAGraph: the kernels of a capture, and the tensors they gave."""

    pretend: Pretend

    def __init__(self, keep_graph: bool = False) -> None:
        self.records: list[tuple[Any, Any, Any, Any]] = []
        self.generators: list[tuple[_Generator, Tensor]] = []
        self.error: RuntimeError | None = None
        self.pretend._graphs.append(weakref.ref(self))
        self.thread: int | None = None  # whose waits its capture forbids; None: everyone's

    def register_generator_state(self, generator: _Generator) -> None:
        """What a capture needs before torch 2.14; from then on a warning."""
        if self.pretend.registers_lazily:
            raise RuntimeError("CUDAGraph.register_generator_state() is deprecated")
        self.take(generator)

    def take(self, generator: _Generator) -> None:
        """The generator belongs to this capture until it ends well."""
        generator.graph = self
        self.generators.append((generator, generator.get_state()))

    def finish(self) -> None:
        """A capture draws nothing."""
        for generator, state in self.generators:
            generator.set_state(state)
            generator.graph = None

    def replay(self) -> None:
        """Runs the kernels; what they made anew before is overwritten."""
        self.pretend.num_replays += 1
        with self.pretend.hiding(), torch._C.DisableTorchFunction(), torch.no_grad():
            for func, args, kwargs, out in self.records:
                result = func(*args, **kwargs)
                if out is not None:
                    for kept, made in zip(_tensors(out), _tensors(result), strict=True):
                        kept.copy_(made)

    def reset(self) -> None:
        """Forget the kernels."""
        self.records.clear()


def _on_device(pretend_: Pretend) -> Callable[[Any], Any]:
    """torch.cuda.device"""

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        before = pretend_.current_device
        pretend_.current_device = _index(which, before)
        try:
            yield
        finally:
            pretend_.current_device = before

    return device


def _streams(pretend_: Pretend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch.cuda.set_stream and torch.cuda.stream"""

    def set_stream(stream: _Stream) -> None:
        pretend_._streams[stream.index] = stream
        pretend_.current_device = stream.index

    @contextmanager
    def stream(which: _Stream) -> Iterator[None]:
        device, there = pretend_.current_device, pretend_.current_stream(which.index)
        set_stream(which)
        try:
            yield
        finally:
            pretend_._streams[which.index], pretend_.current_device = there, device

    return set_stream, stream


def _graph(pretend_: Pretend, set_stream: Callable[[_Stream], None]) -> Callable[..., Any]:
    """torch.cuda.graph: a capture on a side stream, which is lost where that is of another device."""
    default: list[_Stream] = []  # made once, for the device that is current then

    @contextmanager
    def graph(
        which: _Graph, pool: Any = None, stream: _Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        if not default:
            default.append(_Stream(pretend_.current_device, pretend_=pretend_, is_side=True))
        pretend_.num_captures += 1
        device, side = pretend_.current_device, stream or default[0]
        there = pretend_.current_stream(side.index)
        set_stream(side)
        if side.index == pretend_.device.index:
            pretend_.capture = which
            which.thread = threading.get_ident() if capture_error_mode == "thread_local" else None
        try:
            yield
        finally:
            pretend_.capture = None
            if which.error is not None:  # capture_end raises, and torch 2.13 then leaves its stream current
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            pretend_._streams[side.index], pretend_.current_device = there, device
            which.finish()
            if pretend_.captures_nothing:
                which.reset()

    return graph


def _install(pretend_: Pretend, stack: ExitStack) -> None:
    """Put the pretend device in the place of torch's own, until the stack is closed."""

    def replace(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, value))

    class Generator(_Generator):
        pretend = pretend_

    class Graph(_Graph):
        pretend = pretend_

    class Event(_Event):
        pretend = pretend_

    class Stream(_Stream):
        def __init__(self, device: Any = None, **_: Any) -> None:
            super().__init__(_index(device, pretend_.current_device), pretend_=pretend_, is_side=True)

    set_stream, stream = _streams(pretend_)
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: pretend_.device.index + 1,
        "current_device": lambda: pretend_.current_device,
        "set_device": lambda device: setattr(pretend_, "current_device", _index(device, pretend_.current_device)),
        "get_device_name": lambda device=None: "a pretend GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
        "mem_get_info": lambda device=None: (pretend_.free_memory, _TOTAL_MEMORY),
        "synchronize": lambda device=None: pretend_.sync("synchronize"),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: setattr(pretend_, "_sync_mode", mode),
        "is_current_stream_capturing": lambda: pretend_.capture is not None,
        "current_stream": pretend_.current_stream,
        "device": _on_device(pretend_),
        "set_stream": set_stream,
        "stream": stream,
        "graph": _graph(pretend_, set_stream),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
    }
    for name, value in cuda.items():
        replace(torch.cuda, name, value)
    replace(torch, "Generator", Generator)
    fork_rng = torch.random.fork_rng
    replace(torch.random, "fork_rng", lambda devices=None, **options: fork_rng(devices=[], **options))

    def plain_step(step: Callable[[Any], None], optimizer: Optimizer) -> None:
        """torch groups tensors by device where nothing pretends, and would fetch the rates to the CPU."""
        parameter = optimizer.param_groups[0]["params"][0]
        with ExitStack() as inner:
            if pretend_.holds(parameter):
                inner.enter_context(pretend_.placing())
            with torch._C.DisableTorchFunction():
                step(optimizer)

    for kind in (Adam, Sgd):
        step = kind.step
        replace(kind, "step", lambda optimizer, step=step: plain_step(step, optimizer))


@contextmanager
def pretend(device: str = "cuda:0", **behaviour: Any) -> Iterator[Pretend]:
    """A pretend device that code in the block finds; `behaviour`: fields of Pretend, which may also be changed later."""
    pretend_ = Pretend(torch.device(device), **behaviour)
    with ExitStack() as stack:
        _install(pretend_, stack)
        _side_stream.cache_clear()
        stack.callback(_side_stream.cache_clear)
        stack.enter_context(_Kernels(pretend_))
        stack.enter_context(_Calls(pretend_))
        yield pretend_
