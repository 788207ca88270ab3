"""Predicted and measured peaks of memory of fit-laplace over whole networks, each in a process of its own.

    python benchmarks/network_memory.py

Prints a line a case: predicted and measured MiB above what the process had before, the inputs counted, and their quotient.
"""

from __future__ import annotations

import gc
import itertools
import json
import resource
import subprocess
import sys

CASES = {
    # sizes of tanh layers, or conv for a small convolutional network; examples, held-out examples, structure, searched
    "mlp diag": ([784, 50, 10], 4000, 500, "diag", True),
    "small full": ([100, 16, 10], 4000, 500, "full", True),
    "conv diag": ("conv", 1000, 200, "diag", True),
    "conv low-rank": ("conv", 300, 100, "low-rank", False),
    "wide low-rank": ([784, 200, 200, 10], 500, 200, "low-rank", False),
    "conv kron": ("conv", 2000, 200, "kron", False),
    "mlp kron": ([784, 50, 10], 4000, 500, "kron", True),
}


def measure(name: str) -> dict[str, float]:
    """Of one case, in this process."""
    import torch

    from bnncli.inference.laplace import fit_gaussian
    from bnncli.inference.network_memory import NetworkPlan
    from bnncli.inference.prior_precision import search
    from bnncli.targets.curvature_choice import CurvatureChoice
    from bnncli.targets.network import NetworkTarget
    from bnncli.theta.module import ModuleLayout, ModuleNetwork
    from bnncli.theta.prior import Prior

    torch.set_num_threads(1)
    sizes, examples, held, structure, is_search = CASES[name]
    nn = torch.nn
    if sizes == "conv":
        shape: tuple[int, ...] = (3, 16, 16)
        module = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip
    else:
        shape = (sizes[0],)
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
        module = nn.Sequential(*layers[:-1])
    layout = ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=10, input_shape=shape)
    choice = CurvatureChoice(rank=20)

    def make(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(count, layout.num_features), torch.arange(count) % 10

    small = NetworkTarget(*make(20), layout, Prior(10.0), choice=choice)  # what importing and first calls leave
    for warm in ("diag", structure):
        one = {"start": layout.trained(), "center": "checkpoint", "structure": warm}
        if structure != "full" or warm == "diag":
            fit_gaussian(small.with_choice(CurvatureChoice(rank=1)), **one)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gc.collect()
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[1]) * resource.getpagesize()
    plan = NetworkPlan(layout, examples, held, choice, (structure,), is_search)
    predicted = plan.fit_bytes(structure, torch.device("cpu"))
    target = NetworkTarget(*make(examples), layout, Prior(10.0), choice=choice)
    common = {"start": layout.trained(), "center": "checkpoint", "structure": structure}
    if is_search:
        search(target, generator=torch.Generator(), held_out=target.held_out(*make(held)), bounds=(1.0, 10.0), **common)
    else:
        fit_gaussian(target, **common)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "predicted": predicted / 2**20,
        "measured": (peak - now) / 2**20,
        "before": (before - now) / 2**20,
        "params": layout.num_params,
    }


def main() -> None:
    """All cases, or those named."""
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        print(json.dumps(measure(sys.argv[2])))
        return
    for name in sys.argv[1:] or CASES:
        words = [sys.executable, __file__, "--one", name]
        found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        quotient = found["predicted"] / found["measured"]
        print(
            f"{name}: P {found['params']}, predicted {found['predicted']:.0f} MiB, measured {found['measured']:.0f} MiB, {quotient:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
