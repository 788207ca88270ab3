"""Metrics that fits record in their artifacts, with the meaning and the units of each.

They are stored as JSON under `metrics` of a header and returned by `--json`. A key that a class lists may be missing
from an artifact: because it does not apply to the fit, or because an earlier version wrote the file.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Estimate(TypedDict):
    """A Monte Carlo estimate, in nats."""

    value: float
    standard_error: float


class ValScore(TypedDict, total=False):
    """Scores of one predictive on val.

    Attributes:
        nll: nats per example, with its standard_error.
        ece: expected calibration error, 0 to 1.
        integrator, samples: that made the predictions, and its number of draws, if any.
        temperature: that scaled the logits.
    """

    nll: float
    standard_error: float | None
    ece: float
    accuracy: float
    integrator: str
    samples: int | None
    temperature: float


class ValGap(TypedDict):
    """How much worse the default predictive is than another: paired mean difference in nats per example."""

    value: float
    standard_error: float | None
    p_adjusted: float | None
    is_worse: bool


class ValMetrics(TypedDict, total=False):
    """Comparison with simpler predictives on val; None without labelled val.

    Attributes:
        val: scores by predictive, see `measure_on_val`.
        val_excess: gaps to the predictives compared with.
        val_false_alarm: level at which a gap counts as worse.
        val_num_examples: N.
        val_gain: shares of the gain over the network, nats per example.
        recommended_integrator: what predict uses by default.
    """

    val: dict[str, ValScore] | None
    val_excess: dict[str, ValGap] | None
    val_false_alarm: float
    val_num_examples: int
    val_gain: dict[str, Any] | None
    recommended_integrator: str | None


class FitMetrics(ValMetrics, total=False):
    """Metrics that all fits of a posterior share.

    Attributes:
        prior_precision: of the weights; a geometric mean if part_precisions lists several.
        bias_precision: of the biases, if it differs.
        prior_mean_scale: factor of the checkpoint's last layer in the prior's mean.
        cost: gradient passes over the training data, and through what (see `session.costs`).
    """

    structure: str
    num_params: int
    prior_precision: float
    bias_precision: float
    part_precisions: list[float]
    prior_mean_scale: float
    prior_precision_by: str
    cost: dict[str, Any]


class LaplaceMetrics(FitMetrics, total=False):
    """Metrics of fit-laplace.

    Attributes:
        prior_precision_for: mc or plug-in, for which the precision was chosen.
        prior_precision_at_edge: True where the best precision is at the edge of the range.
        structure_nll: val NLL of the structures compared.
        fit_on, num_folds: rows fitted to, if val is among them, and folds of its cross-validation.
        row_space_rank, num_features: of a fit in the span of the features.
        log_marginal_likelihood: nats; None where undefined, with the reason.
        newton_decrement: distance from the mode in posterior standard deviations.
        mode_distance, mode_distance_in_sd: of the mode from the checkpoint, the latter rms over parameters.
        effective_params: number of parameters that the data determine.
        captured_trace: share of the curvature's trace that a low-rank structure keeps.
        solver_steps, solver_passes, solver_residual: of draws by conjugate gradients.
        columns_drawn, num_diagonal_params: of Kronecker factors.
        val_drawn_from: size of val if a fit over a network used only some examples of it.
        subnetwork_size, subnetwork_params, subnetwork_as_prior: parameters that vary, by tensor, and those that keep
            nearly all of the prior's variance.
    """

    center: str
    layers: str
    curvature: str
    fit_on: str
    num_folds: int
    prior_precision_for: str | None
    prior_precision_at_edge: bool | None
    prior_precision_structure: str
    prior_precision_compared_at: str | None
    structure_nll: dict[str, float] | None
    val_drawn_from: int
    layer_precisions: dict[str, float]
    layer_precisions_gain: float
    row_space_rank: int
    num_features: int
    log_marginal_likelihood: float | None
    log_marginal_likelihood_undefined: str | None
    newton_decrement: float | None
    mode_distance: float | None
    mode_distance_in_sd: float | None
    mode_passes: int
    mode_shortfall: str | None
    effective_params: float
    rank: int
    captured_trace: float
    captured_trace_standard_error: float
    draws: int
    solver_steps: int
    solver_passes: int
    solver_residual: float
    columns_drawn: int
    num_diagonal_params: int
    subnetwork_size: int
    subnetwork_params: dict[str, int]
    subnetwork_as_prior: int
    val_nll_network: float | None
    val_nll_laplace: float | None


class SearchMetrics(FitMetrics, total=False):
    """Metrics of a search for the prior precision by short runs, scored on val.

    Attributes:
        prior_precision_base: where the search began.
        prior_precision_curve: pairs of precision and val NLL.
        prior_precision_search_cut: True where the search stopped because it had taken as long as the run itself.
        prior_precision_by_gaussians: precisions scored by draws of the Gaussian at the mode, which is close to the posterior.
    """

    prior_precision_base: float
    prior_precision_curve: list[tuple[float, float]] | None
    prior_precision_search_cut: bool
    prior_precision_search_passes: float
    prior_precision_by_gaussians: int


class RefineMetrics(SearchMetrics, total=False):
    """Metrics of refine.

    Attributes:
        elbo_before, elbo_after, elbo_gain: from elbo_draws fresh draws with the same noise.
        log_weight_sd_before, log_weight_sd_after: standard deviation of the log importance weights, nats.
        verdict: helped, hurt, negligible or undecided.
        is_idle: True where the flow hardly moves draws.
        subspace: number of directions, and their share of the prior's variance.
        over_layers: layers of a network's flow.
    """

    elbo_before: Estimate
    elbo_after: Estimate
    elbo_gain: Estimate
    elbo_draws: int
    log_weight_sd_before: float
    log_weight_sd_after: float
    verdict: str
    is_idle: bool
    flow: str
    length: int
    space: str
    settings: dict[str, Any]
    layers: list[dict[str, Any]]
    epochs: int
    epochs_run: int
    ended_early: bool
    subspace: dict[str, Any]
    over_layers: str


class ChainMetrics(SearchMetrics, total=False):
    """Metrics of chains.

    Attributes:
        max_rhat, min_ess_bulk, min_ess_tail: worst over parameters; None where undefined, with the reason.
        heldout_*, train_*: the same of log probabilities of held-out or training labels.
        judged_by: heldout or train, where predictions decide on convergence.
    """

    sampler: str
    chains: int
    draws: int
    max_rhat: float | None
    min_ess_bulk: float | None
    min_ess_tail: float | None
    undefined: str | None
    heldout_max_rhat: float | None
    heldout_min_ess_bulk: float | None
    heldout_min_ess_tail: float | None
    heldout_undefined: str | None
    train_max_rhat: float | None
    train_min_ess_bulk: float | None
    train_min_ess_tail: float | None
    train_undefined: str | None
    judged_by: str


class HmcMetrics(ChainMetrics, total=False):
    """Metrics of hmc.

    Attributes:
        stopped_by: conditions of --until that were met.
        until_looks: times that they were checked.
        gradient_examples: examples whose gradients moved the chains; absent if all of them did.
        min_bfmi: lowest energy Bayesian fraction of missing information over chains.
        mean_steps: leapfrog steps per draw.
    """

    dynamics: str | None
    gradients: str
    gradient_examples: int
    stopped_by: str | None
    until_looks: int
    min_bfmi: float | None
    acceptance_rate: float
    lowest_chain_acceptance: float
    divergences: int
    step_size: float
    mean_steps: float


class SghmcMetrics(ChainMetrics, total=False):
    """Metrics of fit-sghmc.

    Attributes:
        excess_by_steps, excess_by_batches: relative excess of the variance along the stiffest direction; None if unbounded.
        stiffness: largest curvature.
        learning_rate_by: given or stiffness.
    """

    is_exact: bool
    epochs: int
    cycles: int
    exploring_epochs: int
    batch_size: int
    momentum_decay: float
    temperature: float
    start: str
    log_joint_first: float
    log_joint_last: float
    learning_rate: float
    learning_rate_by: str
    stiffness: float
    excess_by_steps: float | None
    excess_by_batches: float | None
    preconditioner: str


class SwagMetrics(FitMetrics, total=False):
    """Metrics of fit-swag.

    Attributes:
        num_still: parameters that did not move.
        median_share_of_prior, largest_share_of_prior, median_share_of_base: ratios of variances.
        share_wider_than_prior: share of the parameters with a larger variance than under the prior.
        log_joint_start, log_joint_mean: nats.
        learning_rate_by: given, noise, stability or pilot.
    """

    warmup: int
    iterates: int
    rank: int
    batch_size: int
    momentum: float
    scale: float
    num_still: int
    median_share_of_prior: float
    largest_share_of_prior: float
    base: str | None
    median_share_of_base: float | None
    share_wider_than_prior: float
    log_joint_start: float
    log_joint_mean: float
    learning_rate: float
    learning_rate_by: str


class BaseMetrics(TypedDict):
    """Comparison of a Gaussian with its base, by parameter; distances in standard deviations of the base."""

    name: str
    median_share: float
    rms_distance: float
    largest_distance: float


class ViMetrics(FitMetrics, total=False):
    """Metrics of fit-vi.

    Attributes:
        elbo: from elbo_draws draws on the full data.
        log_weight_sd: standard deviation of the log importance weights, nats.
        shortfall: distance of the objective from its maximum, where known.
        median_share_of_prior: median ratio of variances.
        beside_base: comparison with the base.
    """

    elbo: Estimate
    elbo_draws: int
    log_weight_sd: float
    estimator: str
    optimizer: str
    learning_rate: float
    batch_size: int
    num_draws: int
    kl_weight: float
    epochs: int
    epochs_run: int
    ended_early: bool
    start: str
    median_share_of_prior: float
    shortfall: dict[str, Any] | None
    beside_base: BaseMetrics | None


RECORDS: dict[str, type[Any]] = {
    "laplace": LaplaceMetrics,
    "refine": RefineMetrics,
    "hmc": HmcMetrics,
    "sghmc": SghmcMetrics,
    "swag": SwagMetrics,
    "vi": ViMetrics,
}
"""The record of each method that takes the path of `run_fit`."""
