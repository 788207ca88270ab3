"""Pyro's No-U-Turn sampler on the same whitened potential: an independent reference for hmc, one chain at a time.

Hoffman and Gelman (2014), arXiv:1111.4246; Pyro's implementation. Slow: every trajectory is a tree of gradients of a
single theta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnncli.inference.dynamics import WhitenedPotential
from bnncli.inference.hmc import HmcRun
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress
from bnncli.structures import Covariance
from bnncli.targets.target import Target

if TYPE_CHECKING:
    from torch import Tensor


def sample_nuts(
    target: Target,
    *,
    mode: Tensor,
    covariance: Covariance,
    seed: int,
    target_accept: float = 0.8,
    num_chains: int = 3,
    num_warmup: int = 100,
    num_draws: int = 200,
    progress: Progress = SILENT,
) -> HmcRun:
    """Sample from a target with Pyro's NUTS, one chain after the other; the defaults are the refinement paper's.

    Args:
        target: the log posterior, with all data.
        mode: (P,), origin of the whitened coordinates, theta = mode + L z.
        covariance: L L^T.
        seed: chain c uses seed + c; the caller's random state is restored.
        target_accept: goal of Pyro's step-size adaptation.
        num_chains, num_warmup, num_draws: chains, and transitions of each.
        progress: advances once per transition.

    Returns:
        A run without energies, which Pyro does not record; acceptance (share of transitions that moved) and steps are
        chain averages.
    """
    potential = WhitenedPotential(target, mode.to(target.device).double(), covariance.to(device=target.device))
    task = progress.task(f"nuts, {num_chains} chains", num_chains * (num_warmup + num_draws))
    devices = [target.device] if target.device.type == "cuda" else []
    chains = []
    with torch.random.fork_rng(devices=devices):
        for chain in range(num_chains):
            torch.manual_seed(seed + chain)
            chains.append(_run_chain(potential, num_warmup, num_draws, target_accept, task))
    draws = torch.stack([potential.theta(z) for z, _ in chains]).float()
    shape = draws.shape[:2]
    log_joint = torch.stack([target.log_joint(theta) for theta in draws])
    diverging = torch.zeros(shape, dtype=torch.bool)
    for chain, (_, facts) in enumerate(chains):
        diverging[chain, facts["divergences"]] = True
    acceptance = torch.tensor([facts["acceptance"] for _, facts in chains], dtype=torch.float64)
    steps = torch.tensor([facts["steps"] for _, facts in chains])
    return HmcRun(
        draws=draws,
        log_joint=log_joint,
        energy=None,
        acceptance_rate=acceptance.unsqueeze(1).expand(shape).clone(),
        diverging=diverging,
        step_size=sum(facts["step_size"] for _, facts in chains) / num_chains,
        n_steps=steps.unsqueeze(1).expand(shape).clone(),
    )


def _run_chain(
    potential: WhitenedPotential, num_warmup: int, num_draws: int, target_accept: float, task: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return draws z (T, P) float64 of one chain, and Pyro's diagnostics."""
    from pyro.infer import MCMC, NUTS  # slow import, needed only here

    num_gradients = 0

    def potential_energy(parameters: dict[str, Tensor]) -> Tensor:
        nonlocal num_gradients
        num_gradients += 1
        return -potential.target.log_joint(potential.theta(parameters["z"].unsqueeze(0)))[0]

    told: dict[str, Any] = {}

    def after_transition(kernel: Any, _: Any, stage: str, iteration: int) -> None:
        task.advance()
        if iteration == num_draws - 1 and not stage.startswith("Warmup"):  # Pyro clears them later
            told.update(kernel.diagnostics(), step_size=float(kernel.step_size))

    start = torch.randn(potential.mode.shape[0], dtype=torch.float64, device=potential.mode.device)
    sampler = MCMC(
        NUTS(potential_fn=potential_energy, target_accept_prob=target_accept),
        num_samples=num_draws,
        warmup_steps=num_warmup,
        initial_params={"z": start},
        disable_progbar=True,
        hook_fn=after_transition,
    )
    sampler.run()
    facts = {
        "divergences": told["divergences"],
        "acceptance": told["acceptance rate"],
        "step_size": told["step_size"],
        "steps": round(num_gradients / (num_warmup + num_draws)),
    }
    return sampler.get_samples()["z"], facts
