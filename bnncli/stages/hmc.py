"""hmc: features in, draws from the exact posterior out, and whether the chains agree."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bnncli import __version__, memory
from bnncli.errors import CheckFailed, UsageError
from bnncli.evaluation.convergence import GOOD_RHAT, STUCK_ACCEPTANCE, Convergence, convergence
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.options import HmcOptions
from bnncli.stages._inputs import Split, gaussian_prior_precision, load_split, posterior_source
from bnncli.stages._produce import Computed, Request, produce
from bnncli.stages._run import Result, Run
from bnncli.storage.headers import Header
from bnncli.storage.samples import SampleFile, write_samples

ALGO_REV = 1


def run(run: Run, options: HmcOptions) -> Result:
    """Sample and publish; the result's metrics have R-hat, effective sample sizes, acceptance and divergences."""
    train = load_split(run, "train").check_labeled()
    sources = [train.source]
    prior_precision, base = options.prior_precision, None
    if prior_precision is None:
        path = run.folder.find_posterior(options.base, flag="--base", maker=run.suggest("fit-laplace"))
        header, source = posterior_source(run, path, "base")
        prior_precision = gaussian_prior_precision(path, header)
        sources.append(source)
        base = path.stem
    elif options.base != "laplace":
        raise UsageError("--prior-precision and --base exclude each other: both say what the prior precision is")
    params = {**options.params(), "base": base, "seed": run.compute.seed}
    target = Path(run.naming.out) if run.naming.out else run.folder.posterior(run.naming.name or "hmc", suffix=".nc")
    size = options.chains * options.draws * (train.layout.num_params * 4 + 64)
    run.folder.check_name_is_free(target)
    request = Request(target, "samples", target.stem, params, ALGO_REV, sources, train.checkpoint, size)

    memory.require_sampling(train.layout, run.device, num_chains=options.chains)

    def compute() -> Computed:
        return _compute(run, options, train, prior_precision, target)

    return produce(run, request, compute, when_fresh=lambda header: _when_fresh(header, options.max_rhat))


def _compute(run: Run, options: HmcOptions, train: Split, prior_precision: float, path: Path) -> Computed:
    target = train.target(prior_precision, run.device)
    whitening = memory.automatic_structure(train.layout, memory.budget(run.device))
    start = train.start().to(run.device)
    fit = fit_gaussian(target, structure=whitening, center="mode", start=start, progress=run.console)
    common: dict[str, Any] = {
        "mode": fit.gaussian.mean,
        "covariance": fit.gaussian.covariance,
        "num_chains": options.chains,
        "num_warmup": options.warmup,
        "num_draws": options.draws,
        "progress": run.console,
    }
    if options.sampler == "nuts":
        from bnncli.inference.nuts import sample_nuts

        drawn = sample_nuts(
            target, target_accept=options.target_accept, seed=run.stream("hmc/nuts").initial_seed() % 2**31, **common
        )
        library = ("pyro", version("pyro-ppl"))
    else:
        drawn = sample_hmc(
            target,
            target_accept=options.target_accept,
            dynamics=options.dynamics,
            generator=run.stream("hmc/chains"),
            **common,
        )
        library = ("bnncli", __version__)
    judged = convergence(drawn.draws.cpu().numpy())
    metrics = _metrics(drawn, judged, options, prior_precision)
    for text in _warnings(metrics):
        run.console.warn(text)
    content = _content(drawn, train, prior_precision)
    outputs = train.content.classes if train.layout.num_outputs > 1 else ["logit"]
    meta = {
        "method": "hmc",
        "type": "samples",
        "prior_precision": prior_precision,
        "param_layout": train.layout.to_json(),
        "num_examples": len(train.content.features),
        "metrics": metrics,
        "classes": train.content.classes,
        "whitening": whitening,
    }

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_samples(
            path,
            content,
            outputs=outputs,
            created_at=provenance["created_at"],
            name=run.checkpoint_path.stem,
            sampler_library=library,
            meta=meta,
            provenance=provenance,
            may_replace=may_replace,
        )

    return Computed(publish, metrics, _summary(metrics), _verdict(metrics, options.max_rhat))


def _content(drawn: HmcRun, train: Split, prior_precision: float) -> SampleFile:
    """Draws and statistics under the names of the ArviZ schema."""
    weight, bias = train.layout.split(drawn.draws.float().cpu())
    stats = {
        "lp": drawn.log_joint,
        "energy": drawn.energy,
        "acceptance_rate": drawn.acceptance_rate,
        "diverging": drawn.diverging,
        "step_size": torch.full_like(drawn.acceptance_rate, drawn.step_size),
        "n_steps": drawn.n_steps,
    }
    return SampleFile(
        head_weight=weight.numpy(),
        head_bias=None if bias is None else bias.numpy(),
        stats={name: values.cpu().numpy() for name, values in stats.items() if values is not None},
        constants={"prior_precision": np.array([prior_precision])},
    )


def _metrics(drawn: HmcRun, judged: Convergence, options: HmcOptions, prior_precision: float) -> dict[str, Any]:
    return {
        "sampler": options.sampler,
        "dynamics": options.dynamics if options.sampler == "hmc" else None,
        "chains": options.chains,
        "draws": options.draws,
        "prior_precision": prior_precision,
        "max_rhat": judged.r_hat,
        "min_ess_bulk": judged.ess_bulk,
        "min_ess_tail": judged.ess_tail,
        "undefined": judged.undefined,
        "acceptance_rate": float(drawn.acceptance_rate.double().mean()),
        "lowest_chain_acceptance": float(drawn.acceptance_rate.double().mean(dim=1).min()),
        "divergences": int(drawn.diverging.sum()),
        "step_size": drawn.step_size,
        "mean_steps": float(drawn.n_steps.double().mean()),
    }


def _summary(metrics: dict[str, Any]) -> list[str]:
    head = f"{metrics['chains']} chains of {metrics['draws']} draws"
    if metrics["max_rhat"] is None:
        lines = [f"{head}: R-hat undefined ({metrics['undefined']})"]
    else:
        lines = [
            f"{head}: largest R-hat {metrics['max_rhat']:.3f}, smallest effective sample size {metrics['min_ess_bulk']:.0f} bulk, "
            f"{metrics['min_ess_tail']:.0f} tail"
        ]
    lines.append(
        f"acceptance {metrics['acceptance_rate']:.2f}, {metrics['divergences']} divergences, step size {metrics['step_size']:.3f}, "
        f"{metrics['mean_steps']:.1f} steps a draw"
    )
    return lines


def _warnings(metrics: dict[str, Any]) -> list[str]:
    """Why these draws may not be the posterior's; empty when nothing speaks against them."""
    found = []
    if metrics["max_rhat"] is not None and metrics["max_rhat"] > GOOD_RHAT:
        found.append(
            f"the chains do not agree: largest R-hat {metrics['max_rhat']:.3f} (above {GOOD_RHAT}); {_remedy(metrics)}"
        )
    if metrics["lowest_chain_acceptance"] < STUCK_ACCEPTANCE:
        lowest = metrics["lowest_chain_acceptance"]
        found.append(f"a chain is stuck: it accepts {lowest:.1%} of its moves; {_remedy(metrics)}")
    if metrics["divergences"]:
        found.append(f"{metrics['divergences']} trajectories diverged; try a higher --target-accept")
    return found


def _remedy(metrics: dict[str, Any]) -> str:
    """What most likely helps."""
    if metrics["chains"] == 1:
        return "use more --chains"
    if metrics["lowest_chain_acceptance"] < STUCK_ACCEPTANCE:
        return "use a higher --target-accept and more --warmup"
    return "use more --warmup and --draws"


def _verdict(metrics: dict[str, Any], max_rhat: float | None) -> CheckFailed | None:
    """The failure that --max-rhat asks for; an undefined R-hat does not pass."""
    if max_rhat is None or (metrics["max_rhat"] is not None and metrics["max_rhat"] <= max_rhat):
        return None
    got = "undefined" if metrics["max_rhat"] is None else f"{metrics['max_rhat']:.4f}"
    return CheckFailed(
        f"--max-rhat {max_rhat}: the largest R-hat is {got}",
        hint=_remedy(metrics),
        code="max_rhat",
    )


def _when_fresh(header: Header, max_rhat: float | None) -> Computed:
    metrics = header.meta.get("metrics", {})
    return Computed(
        lambda provenance, may_replace: header.content_digest,
        metrics,
        _summary(metrics),
        _verdict(metrics, max_rhat),
    )
