"""A 784-50-10 ReLU network on Fashion-MNIST (39,760 parameters), as table 6 of the refinement paper has it.

Kristiadi, Eschenhagen and Hennig 2022, arXiv:2205.10041, appendix: MAP by Adam (weight decay 5e-4, 100 epochs), a diagonal
Gaussian whose prior precision held-out data choose, radial flows and HMC under prior precision 30. Two sizes: all 60,000
examples without HMC, and 1,000 with it, since a gradient of all costs sixty times as much. Needs fmnist-train.npz and
fmnist-test.npz.
"""

from __future__ import annotations

from typing import Any

from network_parts._bench import Bench, Done, Folder
from network_parts._fashion import extract_mlp
from network_parts._scores import score_table
from network_parts._table import Cell, Table

PRIOR = 30.0
LENGTHS = (1, 5, 10, 30)
OF_TARGET = "kron-30"  # the Gaussian under the prior of the target
PUBLISHED: list[dict[str, Cell]] = [
    {"posterior": name, "mmd2": mmd, "accuracy": accuracy, "nll": nll, "brier": brier, "ece": ece}
    for name, mmd, accuracy, nll, brier, ece in (
        ("laplace diag", 0.278, 0.880, 0.3597, 0.1800, 0.077),
        ("radial-1", 0.194, 0.876, 0.3564, 0.1807, 0.061),
        ("radial-5", 0.190, 0.876, 0.3483, 0.1781, 0.049),
        ("radial-10", 0.186, 0.877, 0.3459, 0.1771, 0.047),
        ("radial-30", 0.183, 0.878, 0.3432, 0.1760, 0.046),
        ("hmc", None, 0.897, 0.2908, 0.1502, 0.045),
    )
]


def run(bench: Bench) -> list[Table]:
    """Without HMC at 60,000 examples, with it at 1,000."""
    return [_table(bench, rows, has_hmc=rows < 60_000) for rows in (60_000, 1_000)]


def _table(bench: Bench, rows: int, *, has_hmc: bool) -> Table:
    """All posteriors of the network trained on so many examples."""
    folder = bench.folder(f"mlp-50-{rows}", "mlp.pt")
    rows = bench.rows(rows)
    extract_mlp(bench, folder, hidden=(50,), rows=rows, epochs=100)
    made = _fit(folder)
    made |= _refine(bench, folder)
    if has_hmc:
        made |= _hmc(bench, folder)
    folder.bnncli("predict", "--split", "test")
    table = score_table(
        f"784-50-10, Fashion-MNIST: {rows} training examples, prior precision of refine and hmc {PRIOR:g}",
        folder,
        made,
        PUBLISHED,
    )
    if has_hmc:
        table.notes.append(_mixed(made["hmc-all"].metrics))
    table.notes += ["diagnose:", *folder.said("diagnose", "--draws", 64)]
    return table


def _fit(folder: Folder) -> dict[str, Done]:
    """Temperature, the last layer, and Gaussians over all layers: of the precision that val chooses, and of the target's."""
    made = {"temperature": folder.bnncli("fit-temperature"), "laplace": folder.bnncli("fit-laplace")}
    for structure in ("diag", "kron", "ekfac"):
        words = ("--layers", "all", "--structure", structure, "--name", f"{structure}-all")
        made[f"{structure}-all"] = folder.bnncli("fit-laplace", *words)
    own = ("--layers", "all", "--structure", "kron", "--prior-precision", f"{PRIOR:g}", "--name", OF_TARGET)
    return made | {OF_TARGET: folder.bnncli("fit-laplace", *own)}


def _refine(bench: Bench, folder: Folder) -> dict[str, Done]:
    """Radial flows on the diagonal Gaussian, as published; affine ones on the target's own, whole and in a subspace."""
    made = {}
    quick = ("--epochs", 2) if bench.is_quick else ()
    published = ("--base", "diag-all", "--prior-precision", f"{PRIOR:g}", "--flow", "radial", "--length")
    flows: dict[str, tuple[object, ...]] = {f"radial-{length}-all": (*published, length) for length in LENGTHS}
    flows |= {
        "affine-all": ("--base", OF_TARGET, "--flow", "affine"),
        "subspace-all": ("--base", OF_TARGET, "--subspace", 100),
    }
    for name, words in flows.items():
        made[name] = folder.bnncli("refine", "--layers", "all", *words, "--name", name, "--resume", *quick)
    return made


def _mixed(metrics: dict[str, Any]) -> str:
    """How far the chains agree: of the weights, which need not, and of the val labels' log probabilities, which decide."""
    weights, labels = (
        f"R-hat {metrics[f'{of}max_rhat']:.3f}, ESS {metrics[f'{of}min_ess_bulk']:.0f}" for of in ("", "heldout_")
    )
    steps = f"{metrics['mean_steps']:.0f} steps of {metrics['step_size']:.3g} a draw"
    return f"hmc-all: worst weight {weights}; worst val label {labels}; {steps}, {100 * metrics['acceptance_rate']:.0f}% accepted"


def _hmc(bench: Bench, folder: Folder) -> dict[str, Done]:
    """The last layer's draws, and all layers', whitened by the target's own Gaussian."""
    sizes = ("--warmup", 10, "--draws", 10) if bench.is_quick else ("--warmup", 50, "--draws", 150)
    words = ("--layers", "all", "--base", OF_TARGET, "--chains", 4, *sizes, "--name", "hmc-all", "--resume")
    return {"hmc": folder.bnncli("hmc", "--resume"), "hmc-all": folder.bnncli("hmc", *words)}
