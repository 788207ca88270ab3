"""What chains are judged by besides their parameters: log probabilities of the labels of a few hundred examples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from bnncli.evaluation.convergence import Convergence, convergence
from bnncli.evaluation.predictive_convergence import MAX_ROWS, held_out_convergence, label_convergence
from bnncli.lazy import torch
from bnncli.run.inputs import Split
from bnncli.run.network_splits import NetworkSplit
from bnncli.run.session import Run
from bnncli.targets.network import NetworkTarget

Judge: TypeAlias = "Callable[[torch.Tensor], Convergence]"  # of draws (C, T, P)


def parameter_judge(run: Run) -> Judge:
    """How the chains agree on every parameter; judged on the device."""
    return lambda draws: convergence(draws.cpu().numpy(), device=run.device, progress=run.console)


def head_judges(run: Run, train: Split, held_out: Split | None) -> dict[str, Judge]:
    """How chains of a last layer agree on the val split, by the name `heldout`; nothing without labels there."""
    if held_out is None or held_out.content.labels is None:
        return {}
    return {"heldout": partial(_judge_held_out, run, train, held_out)}


def network_judge(run: Run, target: NetworkTarget, split: NetworkSplit) -> Judge:
    """How chains of a network's parameters agree on a split."""
    rows = judged_rows(run, split)
    examples = target.held_out(split.stored[rows].to(run.device), split.labels(run.device)[rows.to(run.device)])
    return lambda draws: label_convergence(draws, examples, progress=run.console)


def judged_rows(run: Run, split: Split) -> torch.Tensor:
    """The seeded examples of a split, ascending, whose predictions are judged: MAX_ROWS of them, or all."""
    order = torch.randperm(len(split.content.features), generator=run.stream("hmc/held-out"))
    return order[:MAX_ROWS].sort().values


def _judge_held_out(run: Run, train: Split, held_out: Split, draws: torch.Tensor) -> Convergence:
    """On a few hundred seeded examples of the val split."""
    rows = judged_rows(run, held_out)
    return held_out_convergence(
        draws,
        torch.from_numpy(held_out.content.features)[rows],
        held_out.labels(torch.device("cpu"))[rows],
        layout=train.layout,
        device=run.device,
        progress=run.console,
    )
