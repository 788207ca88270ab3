"""status ends at a signal: a run of many artifacts on a slow disk takes long to look at."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from problems.command_line import Cli

from bnncli.run import artifact_states


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("last", [1, 12])
def test_status_ends_at_a_signal_and_says_where(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, last: int
) -> None:
    count, plain = 0, artifact_states.read_header

    def signalled(path: Path) -> Any:
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), number)
        return plain(path)

    monkeypatch.setattr(artifact_states, "read_header", signalled)
    done = cli("status", small_run)
    assert done.code == 128 + number
    assert f"interrupted by {number.name} at " in done.stderr
    assert count == last
