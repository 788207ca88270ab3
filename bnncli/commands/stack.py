"""stack: refit last layers in several ways, and mix them by held-out predictive density."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.errors import DeviceError, UsageError
from bnncli.evaluation.temperature import LabelledLogits, fit_temperature
from bnncli.inference.prior_variants import stratified_folds
from bnncli.inference.stacking import RefittedHead, count_modes, refit_head, stacking_weights
from bnncli.inference.structure_choice import NUM_FOLDS, fit_seconds
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.parameters.prior import Prior
from bnncli.posteriors.stack import Stack
from bnncli.session import revisions as _revisions
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import Split, load_split
from bnncli.session.produce import Request, Resumable
from bnncli.session.run import Result, Run
from bnncli.session.val_report import measure_probs_on_val, require_labeled_val, val_lines, warn_if_worse
from bnncli.system.devices import estimate_speed
from bnncli.targets.last_layer import LastLayerTarget, block_logits

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StackOptions(CheckedOptions):
    """Options of stack, on resuming after an interruption."""

    resume: bool = option(False, "Continue an interrupted run that had the same inputs and options.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every refit.",
        minimum=0,
        numeric=False,
        is_rare=True,
    )


COMMAND = Command(
    "Mix the network with refitted last layers, weighted by how well they predict val.",
    "The members are the network at its best temperature, and last layers refitted to train, to val and to "
    "both. 5-fold cross-validation on val chooses prior precisions and weights. This gives a strong baseline in "
    "seconds. Writes posteriors/stack.safetensors.",
    (StackOptions, NameOptions, InputOptions, *COMPUTE),
    ("bnncli stack ckpt.pt", "bnncli stack ckpt.pt --name heads --seed 1"),
    section="Fit",
    place=20,
)


_MODE_SECONDS = 0.05  # of a mode of few rows: its many small steps


def estimate_seconds(run: Run, train: Split, val: Split) -> float:
    """Estimate the time of a stack, within a factor of about three."""
    speed, layout = estimate_speed(run.device), train.layout
    return sum(
        fit_seconds("diag", layout, num_examples=rows, speed=speed, num_fits=0, num_modes=modes) + modes * _MODE_SECONDS
        for rows, modes in _plan_ways(run, train, val)[0].values()
    )


MOST_ROWS = 20  # of train, as many times those of val, that are refitted together with val, once a fold
NUM_PRECISIONS = 8  # tried by each way, approximately
# Of one way: rows times parameters times modes. About a minute on two cores. By the kind of device alone, as members depend on it.
MOST_WORK = {"cpu": 6e10, "cuda": 4e12}


def _plan_ways(run: Run, train: Split, val: Split) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Return the rows and the approximate number of modes of each way, and the ways that are not tried, with reasons."""
    own, held = len(train.stored), len(val.stored)
    every = {
        "train": (own, NUM_PRECISIONS + 1),
        "val": (held, NUM_PRECISIONS * NUM_FOLDS + NUM_FOLDS + 1),
        "train+val": (own + held, 3 * NUM_FOLDS + NUM_FOLDS + 1),
    }
    most = MOST_WORK.get(run.device.type, MOST_WORK["cpu"])
    found, left_out = {}, []
    for name, (num_rows, num_modes) in every.items():
        if num_rows * val.layout.num_params * num_modes > most:
            left_out.append(f"{name} (would take too long)")
        elif name == "train+val" and num_rows > (1 + MOST_ROWS) * held:
            left_out.append(
                f"{name} (train has more than {MOST_ROWS} times as many rows as val, so val matters little)"
            )
        else:
            found[name] = num_rows, num_modes
    return found, left_out


def execute(run: Run, options: StackOptions) -> Result:
    """Fit and publish. The result's metrics have the members, their weights and the mixture's scores on val."""
    train, val = load_split(run, "train").check_labeled(), _val(run)
    run.require_device()
    request = posterior_request(
        run,
        "stack",
        params={**options.params(), "seed": run.compute.seed},
        algo_rev=_revisions.STACK,
        sources=[train.source, val.source],
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: 8 * 40 * train.layout.num_params,
    )

    def fit() -> FitOutput:
        return fit_stack(run, options, request, train, val)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request.target, meta))


FEWEST_ROWS = 10  # of val


def _val(run: Run) -> Split:
    """Return the val split. Raises where it has too few rows for folds."""
    val = require_labeled_val(run, "members are chosen and weighted")
    if len(val.content.features) < FEWEST_ROWS:
        raise UsageError(f"val has only {len(val.content.features)} rows; stacking needs at least {FEWEST_ROWS}")
    if val.groups is not None and len(val.groups) < NUM_FOLDS:
        raise UsageError(f"val has only {len(val.groups)} groups; stacking needs at least {NUM_FOLDS}")
    return val


KEPT = 1e-3  # smallest weight of a member that is kept


class _Val:
    """Rows of val on the device, each with the fold that leaves it out."""

    def __init__(self, run: Run, val: Split) -> None:
        self.layout, self.device = val.layout, run.device
        self.features, self.labels = val.features(run.device), val.labels(run.device)
        folds = stratified_folds(self.labels, NUM_FOLDS, run.stream("stack/folds"), groups=val.groups)
        self.folds = folds.to(run.device)
        self.left_out = [(self.folds == fold).nonzero()[:, 0] for fold in range(NUM_FOLDS)]
        self.order = torch.cat(self.left_out).argsort()

    def _logits(self, theta: Tensor, rows: Tensor) -> Tensor:
        """Return logits (K, M, n) of some rows under theta (M, P)."""
        return block_logits(self.features[rows], theta.to(self.features), self.layout)

    def log_scores(self, theta: Tensor) -> Tensor:
        """Return log p (N, J) float64 of each row's decisions under its fold's theta (K, P), or under one theta (1, P)."""
        parts = theta.expand(NUM_FOLDS, -1)
        logs = [
            self.layout.likelihood.decision_logs(self._logits(parts[fold : fold + 1], rows).double(), self.labels[rows])
            for fold, rows in enumerate(self.left_out)
        ]
        return torch.cat([part[:, 0].T for part in logs])[self.order]

    def mixture(self, theta: Tensor, weights: Tensor) -> Tensor:
        """Return class probabilities (N, C) float32 of each row under its fold's members (K, M, P) and weights (K, M)."""
        found = []
        for fold, rows in enumerate(self.left_out):
            logits = self._logits(theta[fold], rows).double().permute(1, 2, 0)
            probs = self.layout.likelihood.class_probabilities(logits, dim=2)
            found.append((probs * weights[fold].view(-1, 1, 1)).sum(dim=0))
        return torch.cat(found)[self.order].float()


def fit_stack(run: Run, options: StackOptions, request: Request, train: Split, val: Split) -> FitOutput:
    """Fit the mixture and the mixture of each fold."""
    rows, also = _Val(run, val), {"device": run.device.type}
    resumable = Resumable(run, request, resume=options.resume, save_every=options.save_every, also=also)
    with resumable.hint():
        heads, left_out = _heads(run, train, val, rows, resumable)
    scores = torch.stack([rows.log_scores(head.folds) for head in heads], dim=-1)
    weights = stacking_weights(scores.flatten(0, -2))
    by_fold = torch.stack([stacking_weights(scores[rows.folds != fold].flatten(0, -2)) for fold in range(NUM_FOLDS)])
    is_kept = weights >= KEPT
    kept = [head for head, is_in in zip(heads, is_kept, strict=True) if is_in]
    posterior = Stack(torch.stack([head.theta for head in kept]).float(), _normalise(weights[is_kept]), val.layout)
    folds = torch.stack([head.folds.expand(NUM_FOLDS, -1) for head in kept], dim=1)  # (K, M, P)
    fold_weights = _normalise(by_fold[:, is_kept])
    probs = rows.mixture(folds, fold_weights.to(run.device))
    metrics: dict[str, Any] = {
        "num_members": len(kept),
        "num_folds": NUM_FOLDS,
        "heads": [
            {
                "name": head.name,
                "weight": float(weight),
                "prior_precision": head.precision,
                "val_nll": -float(score),
                "is_kept": bool(is_in),
            }
            for head, weight, score, is_in in zip(
                heads, weights, scores.flatten(0, -2).mean(dim=0), is_kept, strict=True
            )
        ],
        "left_out": left_out,
        **measure_probs_on_val(run, probs.cpu().numpy(), val, method="stack", integrator="mc", num_draws=len(kept)),
    }
    tensors, meta = posterior.to_tensors()
    tensors |= {"folds.members": folds.float(), "folds.weights": fold_weights, "folds.rows": rows.folds.to(torch.uint8)}
    meta |= {"method": "stack", "param_layout": val.layout.to_json(), "fit_on": "train+val", "num_folds": NUM_FOLDS}
    return FitOutput(tensors, meta, metrics, train, publishing=resumable.publishing)


def _heads(
    run: Run, train: Split, val: Split, rows: _Val, resumable: Resumable
) -> tuple[list[RefittedHead], list[str]]:
    """Return the candidates, the simplest first, and what was not tried, with reasons."""
    heads: list[RefittedHead] = []
    ways, left_out = _plan_ways(run, train, val)
    if not ways:
        raise DeviceError(
            f"refitting {val.layout.num_params:,} parameters would take too long on this device, so there is no "
            "last layer to stack",
            hint="use a GPU, or only fit-laplace",
        )
    done = resumable.restore(lambda state: f" after {len(state) // 3} of {len(ways)} refits") or {}

    def state() -> dict[str, Tensor]:
        """Return what was refitted so far, by way."""
        found: dict[str, Tensor] = {}
        for head in heads:
            if head.name in ways:
                found |= {f"{head.name}.theta": head.theta, f"{head.name}.folds": head.folds}
                found[f"{head.name}.precision"] = torch.tensor(head.precision, dtype=torch.float64)
        return found

    if train.head() is not None:
        heads.append(_fit_temperature(val, rows))
    precisions: list[float] | None = None
    order = list(ways)
    for name in sorted(ways, key=lambda name: ways[name][0] * ways[name][1]):  # the quickest is kept the earliest
        if f"{name}.theta" in done:
            theta, folds = (done[f"{name}.{part}"].to(rows.device) for part in ("theta", "folds"))
            heads.append(RefittedHead(name, theta, folds, float(done[f"{name}.precision"])))
        else:
            targets = _targets(run, name, train, rows)
            given = precisions if name == "train+val" else None
            task = run.console.task(f"refit to {name}", count_modes(len(targets), given))
            heads.append(refit_head(name, targets, rows.log_scores, task=task, precisions=given))
            resumable.offer(state)
        if name == "train":  # with val beside them these rows want about the same prior
            best = heads[-1].precision or 1.0
            precisions = [best * 10**0.5, best, best / 10**0.5]
    return sorted(heads, key=lambda head: order.index(head.name) if head.name in ways else -1), left_out


def _fit_temperature(val: Split, rows: _Val) -> RefittedHead:
    """Fit the network's temperature to all rows of val, and to the rows that each fold keeps."""
    theta = val.start().to(rows.device)
    logits = block_logits(rows.features, theta.to(rows.features).unsqueeze(0), rows.layout)[:, 0].T

    def scaled(some: Tensor) -> Tensor:
        found = fit_temperature(LabelledLogits(logits[some], rows.labels[some], rows.layout.likelihood))
        # Rows that are all right would have any lower temperature; it says nothing of others.
        return theta if found.unbounded == "separable" else theta / found.temperature

    folds = [scaled(rows.folds != fold) for fold in range(NUM_FOLDS)]
    return RefittedHead("network at its best temperature", scaled(rows.folds >= 0), torch.stack(folds))


def _targets(run: Run, name: str, train: Split, rows: _Val) -> list[LastLayerTarget]:
    """Return the log posteriors to refit to: on all rows, then on the rows that each fold keeps; for train only one."""
    if name == "train":
        return [train.target(Prior(1.0), run.device)]
    before = [] if name == "val" else [(train.features(run.device), train.labels(run.device))]

    def with_val(some: Tensor) -> LastLayerTarget:
        parts = [*before, (rows.features[some], rows.labels[some])]
        features, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        return LastLayerTarget(features, labels, rows.layout, Prior(1.0))

    return [with_val(some) for some in (rows.folds >= 0, *(rows.folds != fold for fold in range(NUM_FOLDS)))]


def _normalise(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


def _report(run: Run, path: Any, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    warn_if_worse(run, path, metrics, method="stack")
    heads = ", ".join(
        f"{percent(head['weight'], '.0f')} {head['name']}"
        + ("" if head["prior_precision"] is None else f" (prior precision {head['prior_precision']:.3g})")
        for head in sorted(metrics["heads"], key=lambda head: -float(head["weight"]))
        if head["is_kept"]
    )
    lines = [f"weights of {metrics['num_members']} last layers: {heads}"]
    lines += [f"skipped: {text}" for text in metrics["left_out"]]
    lines += val_lines(metrics, where=" (out of fold)")
    return Report(metrics, lines)
