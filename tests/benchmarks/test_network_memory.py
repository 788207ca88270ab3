"""What commands over whole networks plan to take of the memory, against what their processes took."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import network_memory

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("case", ["lenet5 kron", "tanh diagnose"])
def test_the_planned_peak_is_within_a_fifth_of_the_measured(case: str, tmp_path: Path) -> None:
    peak = network_memory.measured_cases(tmp_path, [case])[case]
    assert peak.measured > 100  # of little nothing is to be seen
    assert 1 / network_memory.WITHIN <= peak.quotient <= network_memory.WITHIN, peak
