"""The work of fit-ensemble: every member read into one layout, and what they are worth on val, each and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bnncli.checkpoints.load import load_checkpoint
from bnncli.errors import DataError, UsageError
from bnncli.evaluation.excess import score
from bnncli.options import FitEnsembleOptions
from bnncli.posteriors.ensemble import Ensemble
from bnncli.run.inputs import Split
from bnncli.run.network import Network
from bnncli.run.network_splits import NetworkReader
from bnncli.run.produce_posterior import Fitted
from bnncli.run.session import Run
from bnncli.run.val_report import measure_probs_on_val
from bnncli.storage.trained import gradient_passes
from bnncli.theta.module import STATE, ModuleLayout

_AT_ONCE = 500  # examples


def fit(run: Run, options: FitEnsembleOptions, first: Split, val: Split | None, members: list[Path]) -> Fitted:
    """The members as a posterior, with what is told of them."""
    reader = NetworkReader(run, options.trust_code)
    with reader.recorded.visible():
        layout = reader.layout(first, STATE)
        networks = {run.checkpoint_path: reader.recorded.network}
        networks |= {path: _member(run, reader.recorded.network, path) for path in members}
        digests: dict[str, Path] = {}
        thetas = []
        for path, network in networks.items():
            assert network.checkpoint is not None
            same = digests.setdefault(network.checkpoint.weights_digest, path)
            if same != path:
                raise UsageError(
                    f"MEMBER: {path} has the same weights as {same}; the members of an ensemble are different networks"
                )
            thetas.append(_theta(network.module, layout, path, run.checkpoint_path))
        posterior = Ensemble(torch.stack(thetas), layout)
        scores: dict[str, Any] = {"val": None, "val_excess": None, "val_nll_members": None}
        if val is not None:
            scores = _scores(run, reader, posterior, val)
    costs = [gradient_passes(path) for path in networks]
    known = [cost for cost in costs if cost is not None]
    metrics = {
        "num_members": len(networks),
        "members": [path.name for path in networks],
        "gradient_passes": sum(known) if len(known) == len(costs) else None,
        **scores,
    }
    tensors, meta = posterior.to_tensors()
    meta |= {"method": "ensemble", "layers": STATE, "param_layout": layout.to_json()}
    return Fitted(tensors, meta, metrics, first)


def _member(run: Run, first: Network, path: Path) -> Network:
    """The network of another checkpoint, made as the run's own. Raises what load_checkpoint and load_network raise."""
    wanted = None if first.checkpoint is None or not first.checkpoint.selected_key else first.checkpoint.selected_key
    checkpoint = load_checkpoint(path, wanted=wanted, progress=run.console)
    for note in checkpoint.notes:
        run.console.warn(f"{path.name}: {note}")
    return Network(run, first.spec, first.arguments, first.last_layer, checkpoint, first.saved, first.output)


def _theta(module: nn.Module, layout: ModuleLayout, path: Path, first: Path) -> Tensor:
    """theta (P,) float32 of a member, on the CPU. Raises DataError where it is of another architecture."""
    state: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for part in layout.parts:
        theirs = tuple(state[part.name].shape) if part.name in state else None
        if theirs != part.shape:
            raise DataError(
                f"{path}: {part.name!r} has shape {theirs or 'none'}, and {part.shape} in {first}: the members of an ensemble are "
                "of one architecture",
                code="wrong_shape",
                path=path,
            )
    return layout.join({part.name: state[part.name].detach() for part in layout.parts}).float().cpu()


@torch.no_grad()
def _scores(run: Run, reader: NetworkReader, posterior: Ensemble, val: Split) -> dict[str, Any]:
    """What the ensemble is worth on val, beside the first network as trained and at its best temperature; and each member's NLL."""
    assert val.content.labels is not None
    inputs = reader.split(val, STATE).inputs
    layout, theta = posterior.layout, posterior.members.to(run.device)
    likelihood = layout.likelihood
    task = run.console.task("val", len(theta) * len(inputs))
    probs = []
    for member in theta:
        blocks = []
        for block in inputs.split(_AT_ONCE):
            logits = layout.logits(block.to(run.device), member.unsqueeze(0))[0]
            blocks.append(likelihood.class_probabilities(logits.double(), dim=1).cpu())
            task.advance(len(block))
        probs.append(torch.cat(blocks))
    together = torch.stack(probs).mean(dim=0).numpy()
    own = [score("member", one.numpy(), val.content.labels).nll for one in probs]
    found = measure_probs_on_val(run, together, val, method="ensemble", integrator="mc", num_draws=len(probs))
    return found | {"val_nll_members": own}
