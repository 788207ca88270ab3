"""Processes that read ahead: one that dies is told of in a line, and none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from bnncli.data.splits import load_split
from bnncli.errors import DeviceError

PARENT = os.getpid()


class Deadly:
    """Rows of zeros; a process that reads row 2 is killed."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        if row == 2 and os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(3, np.float32), 0


def test_a_killed_process_is_told_of_and_no_other_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.data.kinds.py.user_code.load_factory", lambda *_, **__: Deadly)
    split = load_split("py:deadly.py:make")
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))  # seconds; else 5
    batches = split.batches(2, num_workers=2)
    next(batches)
    time.sleep(0.2)  # the network, busy while the process dies: it is not to blame
    with pytest.raises(DeviceError, match="a data loading worker was killed by SIGKILL") as caught:
        next(batches)
    assert caught.value.code == "reader_died"
    assert not multiprocessing.active_children()


class Numbers:
    """Four rows, each of its own number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return np.full(3, row, np.float32), row


def test_batches_need_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    def overdue(*_: object) -> None:
        raise TimeoutError("the batch never came")

    monkeypatch.setattr("bnncli.data.kinds.py.user_code.load_factory", lambda *_, **__: Numbers)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", full)
    split = load_split("py:numbers.py:make")
    before = signal.signal(signal.SIGALRM, overdue)
    signal.alarm(60)
    try:
        batches = list(split.batches(2, num_workers=2))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert [batch.labels.tolist() for batch in batches if batch.labels is not None] == [[0, 1], [2, 3]]
