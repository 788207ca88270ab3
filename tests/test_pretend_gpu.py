"""Every path on a GPU, on a pretend one: no mixes of devices, no syncs in captures, and the CPU's numbers."""

from __future__ import annotations

import pretend_cuda
import torch


def test_the_pretend_device_tells_what_a_gpu_would_refuse() -> None:
    with pretend_cuda.pretend() as gpu:
        x = torch.ones(3, device="cuda")
        assert x.device == torch.device("cuda:0")
        assert (gpu.problems(), gpu.num_syncs) == ([], 0)
        torch.add(x, torch.ones(3))
        assert float(x.sum()) == 3
    assert [line.split(" @")[0] for line in gpu.problems()] == ["mixes: add with CPU [(3,)]"]
    assert gpu.num_syncs == 1
    assert not torch.cuda.is_available()
    assert not hasattr(torch.Generator(), "own_device")
