"""What the device code promises about precision and memory."""

from pathlib import Path

import pytest
import torch

from bnncli import devices


def test_products_are_never_coarser_than_float32() -> None:
    torch.set_float32_matmul_precision("medium")
    devices.configure_torch(threads=None, deterministic=False)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(("limit", "left"), [("1000000", 400_000), ("max", 1 << 62), ("100", 0), ("?", 1 << 62)])
def test_a_containers_limit_counts_less_what_it_cannot_give_back(tmp_path: Path, limit: str, left: int) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 60000\nactive_file 40000\n")
    assert devices._container_memory(tmp_path) == left


def test_memory_is_what_the_tighter_of_system_and_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert 1 << 20 < devices.available_memory(cpu) <= devices._system_memory() + (1 << 30)
    monkeypatch.setattr(devices, "_container_memory", lambda folder: 5000)
    assert devices.available_memory(cpu) == 5000
