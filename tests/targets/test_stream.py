"""Features that lie elsewhere than the work is done: in a file, or beside a GPU that is too small for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from streaming import private_peaks
from torch import Tensor

from bnncli.artifacts import features as feature_files
from bnncli.artifacts import hdf5
from bnncli.artifacts.features import FeatureFile, read_features, write_features
from bnncli.errors import DataError, DeviceError
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.system import devices
from bnncli.targets import blocks as stream
from bnncli.targets import last_layer
from bnncli.targets.blocks import FeatureBlocks, PinnedRows
from bnncli.targets.last_layer import LastLayerTarget

LAYOUT = HeadLayout(3, 40)
N = 3000


def write_split(path: Path, features: np.ndarray) -> None:
    rows = len(features)
    labels, ids = np.arange(rows) % 3, np.arange(rows)
    split = FeatureFile("train", features, labels, ids, ["a", "b", "c"], None, None, None, is_ood=False)
    provenance = {"params_hash": "", "params": {}, "algo_rev": 1, "command": ["bnncli"], "inputs": []}
    nothing: dict[str, Any] = {"layer": None, "order_digest": "", "source": "", "may_replace": False}
    write_features(path, split, preprocess={}, provenance=provenance, **nothing)


def stored(path: Path, dtype: str) -> LastLayerTarget:
    write_split(path, np.random.default_rng(0).normal(size=(N, 40)).astype(dtype))
    split = read_features(path)
    assert split.labels is not None
    return LastLayerTarget(torch.from_numpy(split.features), torch.from_numpy(split.labels), LAYOUT, Prior(2.0))


def everything(target: LastLayerTarget) -> list[Tensor]:
    theta = torch.randn(3, LAYOUT.num_params, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    index = torch.tensor([5, 0, 2999])
    hessians = [part for name in ("full", "kron", "diag") for part in ggn(target, theta[0], name).values()]
    energies = [target.log_joint(theta), *target.log_joint_and_grad(theta)]
    exact = target.log_joint_and_grad(theta, dtype=torch.float64)
    return [*hessians, *energies, *exact, target.hessian_vector_product(theta[0], theta), target.rows(index)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mapped_file_gives_the_bits_of_features_in_memory(tmp_path: Path, dtype: str) -> None:
    mapped = stored(tmp_path / "train.h5", dtype)
    in_memory = LastLayerTarget(mapped.features.float().clone(), mapped.labels, LAYOUT, Prior(2.0))
    for ours, theirs in zip(everything(mapped), everything(in_memory), strict=True):
        assert torch.equal(ours, theirs)


def test_features_are_mapped_and_the_file_is_safe_from_changes(tmp_path: Path) -> None:
    write_split(tmp_path / "train.h5", np.ones((N, 40), np.float32))
    before = (tmp_path / "train.h5").read_bytes()
    features = read_features(tmp_path / "train.h5").features
    assert features.base is not None
    features[:] = 7.0
    assert (tmp_path / "train.h5").read_bytes() == before


def test_a_file_that_is_replaced_stays_as_it_was_read(tmp_path: Path) -> None:
    write_split(tmp_path / "train.h5", np.ones((N, 40), np.float32))
    features = read_features(tmp_path / "train.h5").features
    write_split(tmp_path / "other.h5", np.zeros((N, 40), np.float32))
    (tmp_path / "other.h5").replace(tmp_path / "train.h5")
    assert features.min() == 1


def test_rows_that_are_not_finite_are_found_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "CHECK_BYTES", 7 * 160)
    features = np.ones((N, 40), np.float32)
    features[[20, 21, 2999], [1, 0, 39]] = [np.nan, np.inf, -np.inf]
    write_split(tmp_path / "train.h5", features)
    with pytest.raises(DataError, match="3 rows are not finite; the first is row 20"):
        read_features(tmp_path / "train.h5")


@pytest.mark.long  # in `.ci/run`
def test_files_of_any_size_take_little_memory(tmp_path: Path) -> None:
    files = []
    for dtype in ("float32", "float16"):
        files.append(tmp_path / f"{dtype}.h5")
        write_split(files[-1], np.ones((48_000, 256), dtype))
    # A few blocks of 2 MB, and the workspace of products; the files: 49 and 25 MB.
    peaks = private_peaks(files, tmp_path)
    assert max(peaks) < 20e6, peaks


def test_probabilities_that_do_not_fit_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = stored(tmp_path / "train.h5", "float32")
    vectors = torch.randn(2, LAYOUT.num_params, generator=torch.Generator().manual_seed(1))
    kept = target.hessian_vector_product(vectors[0], vectors)
    monkeypatch.setattr(last_layer, "_KEPT_BYTES", 0)
    torch.testing.assert_close(target.hessian_vector_product(vectors[0], vectors), kept, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("free", [1 << 10, 1 << 50])
def test_products_do_not_depend_on_free_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    layout, generator = HeadLayout(10, 84), torch.Generator().manual_seed(2)
    features = torch.randn(9000, 84, generator=generator)
    target = LastLayerTarget(features, torch.arange(9000) % 10, layout, Prior(2.0))
    vectors = torch.randn(8, layout.num_params, generator=generator)
    expected = target.hessian_vector_product(vectors[0], vectors)
    monkeypatch.setattr(devices, "_system_memory", lambda: free)
    assert torch.equal(target.hessian_vector_product(vectors[0], vectors), expected)


def test_probabilities_that_the_device_refuses_are_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = stored(tmp_path / "train.h5", "float32")
    vectors = torch.randn(2, LAYOUT.num_params, generator=torch.Generator().manual_seed(1))
    kept = target.hessian_vector_product(vectors[0], vectors)
    plain = LastLayerTarget.probabilities

    def refuse(self: LastLayerTarget, theta: Tensor, features: Tensor | None = None) -> Tensor:
        if features is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, theta, features)

    monkeypatch.setattr(LastLayerTarget, "probabilities", refuse)
    torch.testing.assert_close(target.hessian_vector_product(vectors[0], vectors), kept, rtol=1e-5, atol=1e-4)


def column_sums(blocks: FeatureBlocks, largest: int) -> Tensor:
    """Sums of the columns on a device that has no memory for more than `largest` rows."""

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        if len(block) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (block.sum(dim=0, dtype=torch.float64),)

    return blocks.sum(work, columns=2**19 // 700, dtype=torch.float32)[0]


def test_a_device_without_memory_for_a_block_gets_smaller_ones() -> None:
    blocks = FeatureBlocks(torch.arange(4000.0).view(2000, 2), torch.device("cpu"))
    assert torch.equal(column_sums(blocks, largest=90), blocks.features.double().sum(dim=0))
    assert blocks.divisor == 8
    assert torch.equal(column_sums(blocks, largest=90), blocks.features.double().sum(dim=0))
    assert blocks.divisor == 8


def test_a_device_without_memory_for_one_example_is_an_error() -> None:
    blocks = FeatureBlocks(torch.ones(2000, 2), torch.device("cpu"))
    with pytest.raises(DeviceError, match="out of memory even with a block of one example"):
        column_sums(blocks, largest=0)


class LateEvent:
    """An event of a GPU whose copies are done as late as the events allow."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []

    def record(self, queue: "LateStream") -> None:
        self.pending, queue.copies = self.pending + queue.copies, []

    def synchronize(self) -> None:
        while self.pending:
            to, source = self.pending.pop(0)
            to.copy_(source)


class LateStream:
    def __init__(self, device: object = None) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()

    def wait_stream(self, other: "LateStream") -> None:
        pass


def test_pinned_buffers_bring_every_row_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[LateStream] = []

    @contextmanager
    def on(queue: LateStream) -> Iterator[None]:
        current.append(queue)
        yield
        current.pop()

    plain_empty, plain_copy = torch.empty, Tensor.copy_

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            current[-1].copies.append((self, source))
            return self
        return plain_copy(self, source)

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool = False, device: object = None) -> Tensor:
        return plain_empty(shape, dtype=dtype).fill_(float("nan"))

    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "current_stream", LateStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(stream.torch, "empty", empty)
    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(stream, "TRANSFER_BYTES", 300 * 8)
    features = torch.arange(2002.0).view(1001, 2)
    blocks = FeatureBlocks(features, torch.device("cuda"))
    got = [(rows, block.clone()) for rows, block in blocks._blocks(0, len(blocks.features), 70)]
    assert [rows for rows, _ in got] == list(stream.slices(0, 1001, 70))  # as where the features lie on the GPU
    assert torch.equal(torch.cat([block for _, block in got]), features)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_features_beside_the_gpu_give_what_features_on_it_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TRANSFER_BYTES", 300 * 160)
    features, labels = torch.randn(N, 40), torch.arange(N).cuda() % 3
    beside, on_it = (LastLayerTarget(part, labels, LAYOUT, Prior(2.0)) for part in (features, features.cuda()))
    for ours, theirs in zip(everything(beside), everything(on_it), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-3)


ROWS = [slice(3, 40), torch.tensor([49, 0, *range(5, 40), 0])]


@pytest.mark.parametrize("rows", ROWS, ids=["slice", "index"])
def test_rows_that_travel_are_those_that_lie_on_the_device(
    monkeypatch: pytest.MonkeyPatch, rows: slice | Tensor
) -> None:
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).half()
    here, syncs = FeatureBlocks(features, torch.device("cpu")).gather(rows, torch.float32), []
    for piece in (1, 7, 50):
        monkeypatch.setattr(stream, "_PIECE_BYTES", piece * 8)
        with pretend_cuda.pretend() as gpu:
            blocks = FeatureBlocks(features, gpu.device)
            found = [blocks.gather(part, torch.float32) for part in (slice(0, 2), rows, rows)]
            syncs.append(gpu.num_syncs)
            assert found[1].device == gpu.device
            assert all(torch.equal(part.cpu(), here) for part in found[1:])
        assert gpu.problems() == []
    assert syncs == [0, 0, 0]


@pytest.mark.parametrize("rows", ROWS, ids=["slice", "index"])
def test_a_buffer_is_filled_anew_only_when_its_copy_is_done(
    monkeypatch: pytest.MonkeyPatch, rows: slice | Tensor
) -> None:
    queue, plain_empty, plain_copy = LateStream(), torch.empty, Tensor.copy_

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            queue.copies.append((self, source))
            return self
        return plain_copy(self, source)

    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    monkeypatch.setattr(torch, "empty", lambda shape, pin_memory=False, **rest: plain_empty(shape, **rest))
    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(stream, "_PIECE_BYTES", 7 * 16)
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    travelling = PinnedRows(features, torch.device("cpu"))
    found = [travelling.take(rows) for _ in range(2)]
    for event in travelling._copied:
        event.synchronize()
    assert all(torch.equal(part, features[rows]) for part in found)


def test_small_files_are_mapped_as_large_ones_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "IN_MEMORY_LIMIT", 0)
    on_disk = stored(tmp_path / "large.h5", "float32")
    monkeypatch.undo()
    assert torch.equal(on_disk.features, stored(tmp_path / "small.h5", "float32").features)
