"""What people would otherwise use, in its ordinary form: Pyro's SVI and NUTS, and laplace-torch.

Pyro: Bingham et al. (2019), JMLR 20(28); laplace-torch: Daxberger et al. (2021), arXiv:2106.14806. Each gets the same
features on the same device, and rows by index in place of a loader of single images, which would slow it down.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from typing import Any, NamedTuple

import torch
from problem import Problem
from torch import Tensor
from torch.nn.functional import cross_entropy

from bnncli.flows import build_layers
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian

LAPLACE_BACKENDS = ("CurvlinopsGGN", "BackPackGGN")  # the default one first
MIN_DRAWS = 8  # of NUTS, however long they take: fewer have no effective sample size


def make_model(problem: Problem) -> Any:
    """The Pyro model of the last layer: theta from the prior, labels in a plate; all data, or the rows of a minibatch."""
    import pyro
    from pyro import distributions as dist

    layout, features, labels = problem.layout, problem.features, problem.labels
    scale = torch.tensor(1 / math.sqrt(problem.prior_precision), device=features.device)

    def model(rows: Tensor | None = None) -> None:
        theta = pyro.sample("theta", dist.Normal(0.0, scale).expand([layout.num_params]).to_event(1))
        weight, bias = layout.split(theta)
        with pyro.plate("data", size=len(features), subsample=rows):
            x, y = (features, labels) if rows is None else (features[rows], labels[rows])
            logits = x @ weight.T if bias is None else x @ weight.T + bias
            pyro.factor("likelihood", -cross_entropy(logits, y, reduction="none"))

    return model


class SviRun(NamedTuple):
    """A refinement by Pyro: seconds of all its steps, and the flow that came out."""

    seconds: float
    num_steps: int
    posterior: Flow


def refine_by_svi(
    problem: Problem, base: Gaussian, *, length: int, batch_size: int, num_steps: int, learning_rate: float, seed: int
) -> SviRun:
    """Radial layers in weight space on base, by SVI with Trace_ELBO: one draw a step, Adam with a cosine to zero each step.

    As the published code of Kristiadi, Eschenhagen and Hennig (2022) does it.
    """
    import pyro
    from pyro import distributions as dist
    from pyro.infer import SVI, Trace_ELBO

    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    device, count = problem.features.device, len(problem.features)
    mean, root = base.mean.float().to(device), base.covariance.scale_tril.float().to(device)  # type: ignore[attr-defined]
    layers = [dist.transforms.Radial(problem.layout.num_params).to(device) for _ in range(length)]
    module = torch.nn.ModuleList(layers)

    def guide(rows: Tensor | None = None) -> None:
        pyro.module("flow", module)
        start = dist.MultivariateNormal(mean, scale_tril=root)
        pyro.sample("theta", dist.TransformedDistribution(start, layers))

    rate = {"lr": learning_rate}
    schedule = pyro.optim.CosineAnnealingLR({"optimizer": torch.optim.Adam, "optim_args": rate, "T_max": num_steps})
    svi = SVI(make_model(problem), guide, schedule, Trace_ELBO())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start, done = time.perf_counter(), 0
    while done < num_steps:
        for rows in torch.randperm(count, device=device).split(batch_size):
            svi.step(rows)
            schedule.step()
            done += 1
            if done == num_steps:
                break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return SviRun(seconds, num_steps, _as_flow(layers, base))


def _as_flow(layers: list[Any], base: Gaussian) -> Flow:
    """Our posterior with the parameters of Pyro's radial layers: the formula is the same."""
    ours = build_layers("radial", base.layout, torch.Generator(), length=len(layers))
    for mine, their in zip(ours, layers, strict=True):
        their_parameters = {"x0": their.x0, "raw_alpha": their.alpha_prime, "raw_beta": their.beta_prime}
        mine.load_state_dict({name: value.detach().double().cpu() for name, value in their_parameters.items()})
        mine.requires_grad_(False)
    device = base.mean.device
    return Flow(base, tuple(layer.to(device=device, dtype=torch.float64) for layer in ours), "radial", "weight")


class NutsRun(NamedTuple):
    """Draws (1, T, P) of one chain, and the seconds of its warm-up and of its draws."""

    draws: Tensor
    num_warmup: int
    warmup_seconds: float
    draw_seconds: float
    num_gradients: int


class _OutOfTime(Exception):
    """The time limit came; what was drawn so far is kept."""


def sample_by_nuts(problem: Problem, *, num_warmup: int, max_seconds: float, max_draws: int, seed: int) -> NutsRun:
    """Pyro's NUTS in its defaults on the ordinary model, autograd through cross_entropy, stopped at the time limit."""
    import pyro
    from pyro.infer import MCMC, NUTS

    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model, draws, marks, gradients = make_model(problem), [], [time.perf_counter()], [0]

    def counted() -> None:
        gradients[0] += 1
        model()

    def after(kernel: Any, parameters: dict[str, Tensor], stage: str, iteration: int) -> None:
        if stage.startswith("Warmup"):
            marks[1:] = [time.perf_counter()]
            return
        draws.append(parameters["theta"].detach().clone())
        if len(draws) >= MIN_DRAWS and time.perf_counter() - marks[0] > max_seconds:
            raise _OutOfTime

    # The head as trained is where its users would start; Pyro's own start is uniform in (-2, 2).
    sampler = MCMC(
        NUTS(counted),
        num_samples=max_draws,
        warmup_steps=num_warmup,
        initial_params={"theta": problem.head.float()},
        disable_progbar=True,
        hook_fn=after,
    )
    with contextlib.suppress(_OutOfTime):
        sampler.run()
    end = time.perf_counter()
    return NutsRun(torch.stack(draws).unsqueeze(0).cpu(), num_warmup, marks[1] - marks[0], end - marks[1], gradients[0])


def laplace_torch_problem() -> str | None:
    """Why laplace-torch cannot be used here; None when it can."""
    return _import_problem("laplace")


def curvlinops_problem() -> str | None:
    """The same of curvlinops."""
    return _import_problem("curvlinops")


def _import_problem(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except (
        ImportError,
        RuntimeError,
    ) as error:  # a torchvision of another torch, which laplace-torch asks for, raises the latter
        return f"not importable ({str(error).splitlines()[0]})"
    return None


def fit_by_laplace_torch(problem: Problem, structure: str, *, backend: str, batch_size: int) -> Any:
    """laplace-torch fitted to the head as a network of its own, all its weights: the cheapest form for a last layer."""
    from laplace import Laplace, curvature
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    data = TensorDataset(problem.features, problem.labels)
    rows = BatchSampler(SequentialSampler(data), batch_size, drop_last=False)
    loader = DataLoader(data, sampler=rows, batch_size=None)  # whole batches by index: the fastest loader there is
    fit = Laplace(
        _head_module(problem), "classification", subset_of_weights="all", backend=getattr(curvature, backend),
        hessian_structure=structure, prior_precision=problem.prior_precision,
    )  # fmt: skip
    fit.fit(loader)
    return fit


def _head_module(problem: Problem) -> torch.nn.Linear:
    layout = problem.layout
    module = torch.nn.Linear(layout.num_features, layout.num_outputs, bias=layout.has_bias)
    torch.nn.utils.vector_to_parameters(problem.head.float(), module.parameters())
    return module.to(problem.features.device)


def predict_by_laplace_torch(fit: Any, features: Tensor, *, link: str, num_samples: int, batch_size: int) -> Tensor:
    """Class probabilities (N, K) of its linearised ("glm") predictive: link probit, bridge or mc."""
    parts = [
        fit(rows, pred_type="glm", link_approx=link, n_samples=num_samples).detach()
        for rows in features.split(batch_size)
    ]
    return torch.cat(parts)


def logit_moments_by_laplace_torch(fit: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    """Means (n, K) and covariances (n, K, K) of the logits that its predictive starts from."""
    mean, covariance = fit._glm_predictive_distribution(features)
    return mean.detach(), covariance.detach()
