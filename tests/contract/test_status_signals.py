"""Commands of many short steps end at a signal: status of a run on a slow disk, scores with a bootstrap."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.evaluation import bootstrap
from bnncli.session import states


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("last", [1, 12])
def test_status_ends_at_a_signal_and_says_where(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, last: int
) -> None:
    count, plain = 0, states.read_header

    def signalled(path: Path) -> Any:
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), number)
        return plain(path)

    monkeypatch.setattr(states, "read_header", signalled)
    done = cli("status", small_run)
    assert done.code == 128 + number
    assert f"interrupted by {number.name} at " in done.stderr
    assert count == last


def test_a_bootstrap_ends_at_a_signal(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probs = np.full((50, 2), 0.5)
    np.savez(tmp_path / "p.npz", probs=probs, label=np.arange(50) % 2)
    monkeypatch.setattr(bootstrap, "BLOCK_WEIGHTS", 500)
    blocks, plain = 0, bootstrap._counts

    def signalled(*words: Any) -> Any:
        nonlocal blocks
        blocks += 1
        if blocks == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*words)

    monkeypatch.setattr(bootstrap, "_counts", signalled)
    done = cli("score", tmp_path / "p.npz", "--bootstrap", 1000)
    assert (done.code, blocks, "interrupted by SIGTERM at bootstrap" in done.stderr) == (143, 3, True)
