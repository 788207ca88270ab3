"""A pytest plugin: every command of the tests on the device of BNNCLI_DEVICE, and at the end how much of it was used.

With GPU_CHECK_PRETEND each test runs on a pretend GPU of its own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

USED = "used on the GPU: "  # what the last line begins with
PRETEND = "GPU_CHECK_PRETEND"
_kernels = [0]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fixtures and test on the pretend device, where there is to be one."""
    with ExitStack() as stack:
        if PRETEND in os.environ:
            found = stack.enter_context(importlib.import_module("pretend_cuda").pretend())
            yield
            _kernels[0] += found.num_kernels
        else:
            yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Bytes that tests held on the GPU at most; kernels, where it is a pretend one."""
    used = _kernels[0] if PRETEND in os.environ else torch.cuda.max_memory_allocated()
    terminalreporter.write_line(f"{USED}{used}")
