"""refine: a Gaussian posterior in, a normalizing-flow posterior out, and whether it was worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bnncli.integrators.mc import affordable_draws
from bnncli.names import counted
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.refine import TRIAL_DRAWS, RefineOptions
from bnncli.options.shared import AUTO, INHERIT, LayersOptions
from bnncli.parameters.module import LAST
from bnncli.session import revisions as _revisions
from bnncli.session.out_of_fold import fit_on_meta
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior, with_prior_choice
from bnncli.session.predictor import default_integrator
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.states import fresh_posterior, to_predict
from bnncli.session.val_report import warn_if_worse, worse_than
from bnncli.stages.refine.inputs import StartInputs, open_inputs, prior_of
from bnncli.stages.refine.plan import Sizes, resolve
from bnncli.stages.refine.report import summary
from bnncli.stages.refine.room import Room

COMMAND = Command(
    "Refine a Gaussian posterior with a normalizing flow.",
    "Maximises the ELBO of a flow on top of the base Gaussian and reports, with standard errors, whether the "
    "flow helped. Writes posteriors/refine.safetensors, or refine-all.",
    (RefineOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli refine ckpt.pt",
        "bnncli refine ckpt.pt --flow radial --length 5 --epochs 20",
        "bnncli refine ckpt.pt --base prior --name naive",
        "bnncli refine ckpt.pt --layers all --subspace 20",
    ),
    section="Fit",
    place=40,
)

_TARGET = (
    "layers",
    "fit_on",
    "prior_precision",
    "bias_precision",
    "part_precisions",
    "prior_mean_scale",
)  # in a header
_LEAST_STEPS = 25  # of a trial: of fewer the flow stays where its neighbour's was


def run(run: Run, options: RefineOptions) -> Result:
    """Refine and publish; the result's metrics have the ELBO before and after."""
    given = open_inputs(run, options)
    if given.base_path is not None:
        run.require_device()
    options, layout = given.options, given.layout(run)
    if given.base_path is None and options.prior_precision == AUTO:
        options = replace(options, prior_precision=INHERIT)
    sizes = Sizes.of(given.span or layout, options.subspace, len(given.train.content.features))
    options = resolve(run, options, sizes)
    options = _with_prior_choice(run, options, given, layout.num_params)
    sources = list(given.sources)
    prior = prior_of(run, options, given.base_path, sources)
    room = Room(run, options, sizes, given)
    request = posterior_request(
        run,
        f"refine{options.layers_suffix}",
        params={**options.params(), "base": given.base_name, "seed": run.compute.seed},
        algo_rev=_revisions.of_refine(options.chosen_flow, options.settings.get("scale")),
        sources=sources,
        checkpoint=given.train.checkpoint,
        estimated_bytes=lambda: room.stored_bytes(layout.num_params),
        require=lambda: room.required,
        estimated_memory=lambda: room.required,
    )

    def fit() -> Fitted:
        from bnncli.stages.refine import work

        with work.seen(options, room.reader, given.train, given.val) as splits:
            base_at = partial(work.base_of, run, splits[0], given.base_path)
            rows = fit_on_meta(given.header)
            by = None if given.base_path is None or given.header is None else default_integrator(given.header)
            return work.fit(run, options, splits, base_at, prior=prior, request=request, rows=rows, base_integrator=by)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request, meta))


def _with_prior_choice(run: Run, options: RefineOptions, given: StartInputs, num_params: int) -> RefineOptions:
    """The options, with inherit in place of auto where the epochs are too few to try another prior precision."""
    assert options.epochs is not None
    assert options.batch_size is not None
    num_steps = options.trial_epochs * -(-len(given.train.content.features) // options.batch_size)
    too_short = f"an eighth of the epochs is {counted(num_steps, 'step')}" if num_steps < _LEAST_STEPS else None
    num_drawn = affordable_draws(TRIAL_DRAWS, num_params)
    return with_prior_choice(run, options, given.val, num_drawn=num_drawn, too_short=too_short)


def _warn_of_val(run: Run, path: Path, metrics: dict[str, Any], *, base: str) -> None:
    """Say so where the refined posterior is worse on val than the network, its best temperature or the base."""
    also = []
    if "base" in worse_than(metrics):
        measured = metrics["val"]["base"]
        also.append(f"{to_predict(run, base, measured['integrator'], is_default=True)} ({measured['nll']:.4f})")
    warn_if_worse(run, path, metrics, method="refine", also=also)


def _report(run: Run, request: Request, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    _warn_of_val(run, request.target, metrics, base=str(request.params["base"]))
    return Report(metrics, summary(metrics, has_draws=_has_draws(run, meta)))


def _has_draws(run: Run, meta: Mapping[str, Any]) -> bool:
    """Whether the run has draws by hmc, up to date, of the target of a posterior with this meta."""
    draws = fresh_posterior(run, f"hmc{LayersOptions(meta.get('layers', LAST)).layers_suffix}", {})
    return draws is not None and all(draws.meta.get(name) == meta.get(name) for name in _TARGET)
