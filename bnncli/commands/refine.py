"""refine: push a Gaussian posterior through a normalizing flow, and report whether it was worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, cast

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.errors import DataError, NumericError, UsageError
from bnncli.evaluation.verdict import CLOSE_LOG_WEIGHT_SD, NEGLIGIBLE_NATS, reach
from bnncli.flows import Recipe, build_layers, choose_recipe, choose_space, resolve_settings, settings_of
from bnncli.flows._affine_sizes import num_elements
from bnncli.inference import memory
from bnncli.inference.elbo import log_weight_spread, measure_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.memory import NetworkDraws
from bnncli.inference.prior_variants import PriorTrial, losses_if_close, search_prior
from bnncli.inference.refine import RefineFit, fit_flow
from bnncli.inference.row_space import reduce_gaussian, reduce_target, replace_outside
from bnncli.integrators.mc import Mc, affordable_draws
from bnncli.lazy import torch
from bnncli.names import count_noun, percent
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import declare_option_group, option
from bnncli.options.shared import AUTO, INHERIT, LayersOptions, SearchedPriorOptions
from bnncli.parameters.layouts import HeadLayout, MatrixLayout, vector_layout
from bnncli.parameters.module import LAST, ModuleLayout, recorded_layout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import is_idle
from bnncli.posteriors.gaussian import Gaussian
from bnncli.registry import list_declaring, names
from bnncli.session import revisions as _revisions
from bnncli.session.costs import Cost
from bnncli.session.fits import Base, FitInputs, FitOutput, Fitting, Method, Report, run_fit
from bnncli.session.inputs import (
    Split,
    keep_if_held_out,
    load_fitted,
    open_posterior,
    posterior_prior,
    posterior_source,
    require_features,
)
from bnncli.session.metrics import RefineMetrics
from bnncli.session.out_of_fold import fit_on_meta, read_fitted_splits
from bnncli.session.predictions import find_base
from bnncli.session.predictor import default_integrator
from bnncli.session.prior_choice import (
    prior_line,
    prior_metrics,
    read_stored_search,
    resolve_prior_choice,
    search_identity,
)
from bnncli.session.produce import Request, prepare_resumable_training
from bnncli.session.row_spaces import span_of
from bnncli.session.run import Result, Run
from bnncli.session.states import advise_predict, fresh_posterior
from bnncli.session.val_report import (
    SIMPLER_PREDICTIVES,
    UNMEASURED,
    find_better_predictives,
    load_labeled_val,
    measure_on_val,
    val_lines,
    warn_if_worse,
)
from bnncli.structures.diag import Diag
from bnncli.structures.directions import Subspace
from bnncli.structures.row_space import rows_of
from bnncli.system.memory import budget, bytes_text
from bnncli.targets.target import Target, counting_passes

TRIAL_DRAWS = 256  # draws that score a prior precision on val; fewer for large heads
BASE = "laplace"  # default base of the last layer; those of other layers add a suffix


@dataclass(frozen=True)
class RefineOptions(SearchedPriorOptions):
    """Options of refine. `settings` holds the options that flows declare."""

    may_follow_base: ClassVar[bool] = True
    base: str = option(
        BASE,
        "Gaussian to refine, by name or file, or `prior`. Default: laplace, or laplace-all for \0layers\0 all.",
        metavar="NAME|FILE|prior",
        numeric=False,
        group="Target",
    )
    flow: str | None = option(
        None,
        "Flow. Default: affine (shift and linear map); radial for other layers without \0subspace\0.",
        family="flows",
        group="Flow",
    )
    length: int | None = option(None, "Number of flow layers. Default: affine 2, radial 5.", minimum=1, group="Flow")
    epochs: int | None = option(
        None, "Maximum passes over the training split. Default: affine 600, radial 20.", minimum=1, group="Training"
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: affine 65536, radial 128.", minimum=1, group="Training", is_rare=True
    )
    learning_rate: float | None = option(
        None,
        "Initial learning rate of Adam, with cosine decay. Default: affine 0.03, radial 0.001.",
        minimum=1e-12,
        group="Training",
    )
    patience: int = option(
        5,
        "Stop after this many rounds without a better ELBO (a round is an epoch, or 25 steps), or after 1 where the "
        "base leaves at most half a nat to gain. With 0, never stop early.",
        minimum=0,
        group="Training",
        is_rare=True,
    )
    space: str = option(
        "auto",
        "Coordinates in which the flow works: whitened by the base posterior, or the weights themselves. auto "
        "uses the flow's default.",
        choices=("auto", "whitened", "weight"),
        group="Flow",
        is_rare=True,
    )
    subspace: int | None = option(
        None,
        "Restrict the flow to this many directions, those with the largest variance. Default: all directions.",
        minimum=1,
        numeric=False,  # recorded where it is given
        group="Flow",
    )
    settings: dict[str, Any] = declare_option_group("flows", recorded=("rank", "hidden", "scale"))
    num_draws: int | None = option(
        None, "Draws per step. Default: affine 8, radial 1.", minimum=1, group="Training", is_rare=True
    )
    elbo_draws: int | None = option(
        None,
        "Draws for the ELBO before and after refining; up to 16 times as many are used if the gain is unclear. "
        "Default: 256; other layers 32.",
        minimum=2,
        group="Training",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Training"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every round.",
        minimum=0,
        numeric=False,
        group="Training",
        is_rare=True,
    )

    @property
    def chosen_flow(self) -> str:
        """Return the flow, with the default filled in.

        For a whole network the default is radial, which moves the weights less. The prior precision chosen for linearised predictions
        is far from one at which draws from the target predict well, and affine flows move all the way to that target.
        """
        if self.flow is not None:
            return self.flow
        has_settings = any(value is not None for value in self.settings.values())  # radial flows have none
        return "affine" if self.is_last_layer or self.subspace is not None or has_settings else "radial"

    @property
    def trial_epochs(self) -> int:
        """Return the epochs of a trial refinement, which continues from the layers of a neighbouring prior precision.

        On 397 digits with six priors, the val NLL is within 0.007 of that after all epochs.
        """
        return -(-(self.epochs or 1) // 8)

    @property
    def num_elbo_draws(self) -> int:
        """Return the draws for the ELBO, with the default filled in."""
        if self.elbo_draws is not None:
            return self.elbo_draws
        return 256 if self.is_last_layer else 32

    @property
    def default_base(self) -> str:
        """Return the default name of fit-laplace's posterior over these layers."""
        return f"{BASE}{self.layers_suffix}"

    def params(self) -> dict[str, Any]:
        """Return the options that change numbers."""
        inside = {} if self.subspace is None else {"subspace": self.subspace}
        return {**super().params(), **self.layers_params, **inside}


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


def execute(run: Run, options: RefineOptions) -> Result:
    """Refine and publish. The result's metrics have the ELBO before and after."""
    inputs = open_inputs(run, options)
    options = cast(RefineOptions, inputs.options)
    if inputs.base is not None:
        run.require_device()
    elif options.prior_precision == AUTO:
        options = replace(options, prior_precision=INHERIT)
    layout = _read_layout(inputs)
    span = span_of(inputs.base.header.meta) if inputs.base else None
    sizes = Sizes.of(span or layout, options.subspace, inputs.num_examples)
    options = resolve(run, options, sizes)
    options = _choose_prior_mode(options, inputs, layout.num_params)
    prior, more = _find_prior(run, options, inputs.base)
    return run_fit(Refinement(replace(inputs, more=more), options, sizes, layout.num_params, prior))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a refinement.

    Attributes:
        layout: layout of theta: a last layer, in the row space if the base was fitted there, or a network's parameters.
        acted: layout of what the flow acts on: the same, or the coordinates along a subspace.
        num_examples: N.
    """

    layout: HeadLayout | ModuleLayout
    acted: MatrixLayout | ModuleLayout
    num_examples: int

    @classmethod
    def of(cls, layout: HeadLayout | ModuleLayout, num_directions: int | None, num_examples: int) -> Sizes:
        """Raise UsageError where theta has fewer than `num_directions` parameters."""
        if num_directions is None:
            return cls(layout, layout, num_examples)
        if num_directions > layout.num_params:
            raise UsageError(
                f"\0subspace\0: expected 1 to {layout.num_params} (the number of parameters); got {num_directions}"
            )
        return cls(layout, vector_layout(num_directions), num_examples)


@dataclass(frozen=True)
class Refinement(Method):
    """One refinement of a Gaussian.

    Args:
        options: options, resolved.
        num_params: P.
        prior: prior of the base, or as given. The search for a prior precision starts there.
    """

    name: ClassVar[str] = "refine"
    options: RefineOptions
    sizes: Sizes
    num_params: int
    prior: Prior

    @property
    def algo_rev(self) -> int:
        """Return the revision of the algorithm."""
        return _revisions.of_refine(self.options.chosen_flow, self.options.settings.get("scale"))

    @property
    def params(self) -> dict[str, Any]:
        """Return what identifies the fit, besides its sources."""
        found = super().params
        return found if self.inputs.base else {**found, "base": "prior"}

    @cached_property
    def num_layer_params(self) -> int:
        """Return the number of parameters in all layers of the flow."""
        options = self.options
        layer = build_layers(options.chosen_flow, self.sizes.acted, torch.Generator(), length=1, **options.settings)[0]
        return (options.length or 0) * sum(part.numel() for part in layer.parameters())

    @property
    def base_bytes(self) -> int:
        """Return the size of the base's file; 0 for the prior."""
        return 0 if self.inputs.base is None else self.inputs.base.path.stat().st_size

    def estimate_memory(self) -> int | None:
        """Return the bytes of memory; None for a last layer, where it is only checked. Raises DeviceError if it is short."""
        inputs, options, device = self.inputs, self.options, self.inputs.run.device_name
        if not options.is_last_layer:
            layout = cast(ModuleLayout, inputs.layout)
            plan = NetworkDraws(layout, inputs.num_examples, inputs.num_val, self.base_bytes or 16 * layout.num_params)
            return plan.require_refinement(
                inputs.run.device,
                training=self.estimate_training_bytes(),
                num_drawn=_recipe(options).num_draws,
                num_judging=options.num_elbo_draws,
                num_predicting=Mc().default_for(layout.num_params, is_last_layer=False),
            )
        if inputs.base is not None:
            structure = str(inputs.base.header.meta.get("structure"))
            memory.require_refinement(
                structure,
                cast(HeadLayout, self.sizes.layout),
                device,
                whole=inputs.train.layout if self.sizes.layout != inputs.train.layout else None,
                num_draws=options.num_elbo_draws,
                training=self.estimate_training_bytes(),
                **({} if structure in names("curvature") else {"elements": self.base_bytes // 4}),
            )
        return None

    def estimate_training_bytes(self) -> int:
        """Return the bytes of memory that training takes."""
        return estimate_training_bytes(self.options, self.sizes, self.num_layer_params)

    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""
        num_stored = self.num_params * (4 + (self.options.subspace or 0)) + self.num_layer_params
        return self.base_bytes + 8 * num_stored

    def fit(self, fitting: Fitting) -> FitOutput:
        """Choose the prior precision if asked, train the flow, and measure the gain and the scores on val."""
        run, options, train, val, prior = fitting.run, self.options, fitting.train, fitting.val, self.prior
        prior_search: dict[str, Any] = {}

        def fit_at(prior: Prior, **choices: Any) -> RefineFit:
            base = _open_base(fitting, prior)
            given = {
                "flow": options.chosen_flow,
                "length": options.length,
                "epochs": options.epochs,
                "batch_size": options.batch_size,
                "learning_rate": options.learning_rate,
                "num_draws": options.num_draws,
                "patience": options.patience,
                "space": options.space,
                "settings": options.settings,
                "subspace": _subspace(run, options, base),
                "generator": run.stream("refine/train"),
                "progress": run.console,
            }
            return _fit_flow(train.target(prior, run.device), base, **{**given, **choices})

        if options.prior_precision == AUTO and val is not None:
            num_draws = affordable_draws(TRIAL_DRAWS, train.layout.num_params)
            # A Hessian takes as long as P / 4 gradients: with more parameters, longer than a trial.
            most_params = 4 * options.trial_epochs * (options.num_draws or 1)
            gaussian_at = partial(_gaussian_at, fitting, most_params=most_params)
            prior_search = (read_stored_search(fitting.request) if options.resume else None) or choose_prior(
                run, options, prior, (train, val), fit_at, gaussian_at, num_draws=num_draws
            )
            prior = Prior.from_meta(prior_search, mean=prior.mean) or prior
        also = search_identity(prior_search)
        resumable = prepare_resumable_training(
            run, fitting.request, resume=options.resume, save_every=options.save_every, also=also
        )
        with resumable.hint():
            base, target = _open_base(fitting, prior), train.target(prior, run.device)
            patience = _choose_patience(run, options, base, target)
            found = fit_at(prior, patience=patience, state=resumable.restore(), save=resumable.save)
            metrics = _measure(run, options, found, base, target) | prior_search
            passes = len(found.history) * (options.num_draws or 1)
            passes += prior_search.get("prior_precision_search_passes", 0)
            metrics |= Cost.of_fit(passes, is_last_layer=options.is_last_layer).to_metrics()
            if val is not None:
                others = {} if fitting.base is None else {"base": (base, default_integrator(fitting.base.header))}
                metrics |= measure_on_val(run, found.posterior, val, method="refine", others=others)
        if metrics["verdict"] == "hurt":
            run.console.warn("the refined posterior is farther from its target than the base is")
        tensors, meta = found.posterior.to_tensors()
        tensors |= prior.to_tensors()
        tensors["history.elbo"] = found.history.double().cpu()
        meta |= {
            "method": "refine",
            **options.layers_params,
            **prior.to_meta(),
            **fit_on_meta(fitting.base.header if fitting.base else None),
            "param_layout": train.layout.to_json(),
            "maps": found.posterior.layers[0].maps,
        }
        return FitOutput(tensors, meta, metrics, train, publishing=resumable.publishing)

    def summarize(self, metrics: RefineMetrics) -> list[str]:
        """Return the summary for people."""
        return format_summary(metrics)

    def describe(self, request: Request, meta: Mapping[str, Any]) -> Report:
        """Return the metrics and the summary. Warn where val prefers the network, its best temperature or the base."""
        run, metrics, also = self.inputs.run, meta["metrics"], []
        if "base" in find_better_predictives(metrics):
            measured = metrics["val"]["base"]
            command = advise_predict(run, str(request.params["base"]), measured["integrator"], is_default=True)
            also.append(f"{command} ({measured['nll']:.4f})")
        warn_if_worse(run, request.target, metrics, method="refine", also=also)
        return Report(metrics, format_summary(metrics, has_draws=_has_draws(run, meta)))


def open_inputs(run: Run, options: RefineOptions) -> FitInputs:
    """Open the base and the rows it was fitted to. Raises BnnError where one is missing or does not fit the options."""
    require_features(run)
    base = None
    if options.base != "prior":
        path = find_base(run, options, None if options.base == BASE else options.base)
        header, source = posterior_source(run, path, "base")
        _check_is_gaussian(run, path, header)
        options = _copy_layers(options, header)
        base = Base(path, header, source, posterior_prior(path, header))
    train = load_fitted(run, read_fitted_splits(base.header if base else None))
    val = keep_if_held_out(train, load_labeled_val(run))
    options.check_trust()
    return FitInputs(run, options, train, val, base)


def _read_layout(inputs: FitInputs) -> HeadLayout | ModuleLayout:
    """Return the layout of theta without opening a network.

    Raises:
        MissingInput: no Gaussian records the layout of other layers than the last.
    """
    if inputs.options.is_last_layer:
        return inputs.train.layout
    options = cast(RefineOptions, inputs.options)
    header = inputs.base.header if inputs.base else read_header(find_base(inputs.run, options, None))
    return recorded_layout(header.meta)


def _check_is_gaussian(run: Run, path: Path, header: Header) -> None:
    kind = "samples" if header.kind == "samples" else header.meta.get("type")
    if kind != "gaussian":
        layers = header.meta.get("layers", LAST)
        also = {} if layers == LAST else {"layers": layers, "trust_code": True}
        raise DataError(
            f"--base: expected a gaussian posterior; {path} has type {kind}",
            code="wrong_type",
            hint=run.suggest("fit-laplace", **also),
            path=path,
        )
    if "num_varying" in header.meta:
        raise UsageError(
            f"--base: {path.stem} fixes all but {header.meta['num_varying']:,} parameters, but a flow moves all "
            "of them; use a base that fixes none",
            hint=run.suggest("fit-laplace", layers=header.meta["layers"], trust_code=True),
        )


def _copy_layers(options: RefineOptions, header: Header) -> RefineOptions:
    """Return the options with the layers of the base. Raises UsageError where --layers names others."""
    layers = str(header.meta.get("layers", LAST))
    if not options.is_last_layer and layers != options.layers:
        raise UsageError(
            f"--layers {options.layers}: the base {header.path} is over --layers {layers}; omit --layers to "
            "refine it unchanged"
        )
    return replace(options, layers=layers)


def resolve(run: Run, options: RefineOptions, sizes: Sizes) -> RefineOptions:
    """Return the options with the flow's defaults filled in.

    Raises:
        UsageError: the flow does not take a given option, or not over these layers.
    """
    options = replace(options, flow=options.chosen_flow, elbo_draws=options.num_elbo_draws)
    options = _choose_scale(run, options, sizes)
    settings = resolve_settings(options.chosen_flow, sizes.acted, **options.settings)
    recipe = _recipe(options)
    space = choose_space(options.chosen_flow, options.space)
    if options.subspace is not None and space != "whitened":
        raise UsageError(
            f"\0subspace\0 needs the base's whitened coordinates, but \0flow\0 {options.chosen_flow} acts in "
            f"{space} space here"
        )
    return replace(options, space=space, **recipe._asdict(), settings={**options.settings, **settings})


def _choose_scale(run: Run, options: RefineOptions, sizes: Sizes) -> RefineOptions:
    """Return the options with a linear part of an affine flow that fits in memory, where none was given."""
    if options.chosen_flow != "affine":
        return options
    is_of_network = not options.is_last_layer and options.subspace is None
    scale = options.settings.get("scale")
    if is_of_network and scale in ("kron", "block"):
        raise UsageError(
            f"\0scale\0 {scale} needs a single weight matrix; over \0layers\0 {options.layers} use low-rank or diag"
        )
    if is_of_network and scale is None:
        scale = "low-rank" if "rank" in options.settings else "diag"
        return replace(options, settings={**options.settings, "scale": scale})
    if {"scale", "rank"} & options.settings.keys():
        return options
    length = choose_recipe("affine", length=options.length).length
    needed = {
        scale: estimate_training_bytes(options, sizes, length * num_elements(cast(MatrixLayout, sizes.acted), scale))
        for scale in ("kron", "low-rank")
    }
    available = budget(run.device_name)
    if needed["kron"] <= available or needed["low-rank"] >= needed["kron"]:
        return options
    run.console.warn(
        f"using --scale low-rank: --scale kron, the default, needs about {bytes_text(needed['kron'])} of memory, "
        f"but only {bytes_text(available)} can be used on {run.device_name}"
    )
    return replace(options, settings={**options.settings, "scale": "low-rank"})


_LEAST_STEPS = 25  # in a trial; with fewer the flow hardly moves from its neighbour's


def _choose_prior_mode(options: RefineOptions, inputs: FitInputs, num_params: int) -> RefineOptions:
    """Return the options, with inherit in place of auto where a trial would have too few steps."""
    assert options.epochs is not None
    assert options.batch_size is not None
    num_steps = options.trial_epochs * -(-inputs.num_examples // options.batch_size)
    too_short = f"an eighth of the epochs is {count_noun(num_steps, 'step')}" if num_steps < _LEAST_STEPS else None
    num_drawn = affordable_draws(TRIAL_DRAWS, num_params)
    return resolve_prior_choice(inputs.run, options, inputs.val, num_drawn=num_drawn, too_short=too_short)


def _find_prior(run: Run, options: RefineOptions, base: Base | None) -> tuple[Prior, tuple[Source, ...]]:
    """Return the target's prior: as given, or the base's. With --base prior, that of laplace, and its source."""
    if options.given_precision is not None:
        return Prior(options.given_precision), ()
    if base is not None:
        return base.prior, ()
    path = run.folder.posterior(options.default_base)
    if not path.is_file():
        raise UsageError("--base prior: give --prior-precision NUMBER, or run fit-laplace first")
    header, source = posterior_source(run, path, "prior_precision")
    return posterior_prior(path, header), (source,)


def estimate_training_bytes(options: RefineOptions, sizes: Sizes, num_layer_params: int) -> int:
    """Return the bytes of memory that training takes."""
    recipe = _recipe(options)
    batch_size = recipe.batch_size if recipe.batch_size < sizes.num_examples else 0
    plan = {"num_layer_params": num_layer_params, "num_draws": recipe.num_draws, "batch_size": batch_size}
    needed = memory.training_bytes(sizes.layout, **plan)
    if options.subspace is not None:
        needed += memory.subspace_bytes(sizes.layout.num_params, options.subspace)
    return needed


def _recipe(options: RefineOptions) -> Recipe:
    return choose_recipe(
        options.chosen_flow,
        is_of_network=not options.is_last_layer,
        length=options.length,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        num_draws=options.num_draws,
    )


def _open_base(fitting: Fitting, prior: Prior) -> Gaussian:
    """Return the Gaussian that the flow starts from, for a target with this prior: that of a file, or the prior itself."""
    run, train = fitting.run, fitting.train
    if fitting.base is None:
        zeros = torch.zeros(train.layout.num_params, dtype=torch.float64)
        covariance = Diag.from_hessian({"hessian.diag": zeros}, prior, train.layout)
        return Gaussian(prior.center(train.layout), covariance, train.layout, prior).to(run.device)
    path = fitting.base.path
    base, _ = open_posterior(path)
    if base.layout != train.layout:
        raise DataError(
            f"--base: {path} takes {base.layout}, but the features have {train.layout}",
            code="wrong_layout",
            path=path,
        )
    within = rows_of(base.covariance)
    if within is not None and not within.rows.has(torch.from_numpy(train.content.features)):
        raise DataError(
            f"--base: {path} was fitted in the row space of other training features",
            code="wrong_row_space",
            hint=run.suggest("fit-laplace"),
            path=path,
        )
    base = replace(base, layout=train.layout)  # this layout is bound to the network, if there is one
    return replace_outside(base, prior).to(run.device)


def _subspace(run: Run, options: RefineOptions, base: Gaussian) -> Subspace | None:
    """Return the directions that the flow acts in, within the row space if the base was fitted there; None for all."""
    if options.subspace is None:
        return None
    return Subspace.widest(reduce_gaussian(base).covariance, options.subspace, run.stream("refine/subspace"))


def _fit_flow(target: Any, base: Gaussian, **choices: Any) -> RefineFit:
    """Train the flow on the base, within the row space if the base was fitted there."""
    fit = fit_flow(reduce_target(target, base), reduce_gaussian(base), **choices)
    return replace(fit, posterior=replace(fit.posterior, base=base))


def _gaussian_at(fitting: Fitting, prior: Prior, near: Gaussian | None, *, most_params: int) -> Gaussian | None:
    """Return the Gaussian at the mode under a prior; None unless the base is one over all of theta, with the whole Hessian.

    Args:
        near: that under a neighbouring prior, if it is close to the posterior.
        most_params: of a Gaussian to fit.
    """
    run, base = fitting.run, fitting.base
    if base is None or span_of(base.header.meta) is not None:
        return None
    structure = base.header.meta.get("structure")
    if base.header.meta.get("center") != "mode" or structure not in list_declaring("curvature", "is_exact"):
        return None
    if base.prior.is_close(prior):
        return _open_base(fitting, prior)
    if near is None or fitting.train.layout.num_params > most_params:
        return None
    target = fitting.train.target(prior, run.device)
    return fit_gaussian(target, structure=str(structure), center="mode", start=near.mean, progress=run.console).gaussian


_BRIEF_PATIENCE = 1  # rounds


def _choose_patience(run: Run, options: RefineOptions, base: Gaussian, target: Target) -> int:
    """Return the rounds without a better ELBO after which training stops: few if it can hardly rise.

    The KL divergence of a base whose log importance weights are normal is half the square of their standard deviation.
    """
    if options.patience <= _BRIEF_PATIENCE or not options.is_last_layer:
        return options.patience
    spread = log_weight_spread(target, base, run.stream("refine/patience"))
    return _BRIEF_PATIENCE if 0.5 * spread**2 < NEGLIGIBLE_NATS else options.patience


def choose_prior(
    run: Run,
    options: RefineOptions,
    prior: Prior,
    splits: tuple[Split, Split],
    fit_at: Callable[..., RefineFit],
    gaussian_at: Callable[[Prior, Gaussian | None], Gaussian | None],
    *,
    num_draws: int,
) -> dict[str, Any]:
    """Search for the prior precision with the lowest NLL on val, and return the metrics of the search.

    Args:
        prior: prior of the base, where the search starts.
        splits: train and labelled val.
        fit_at: refines under a prior, for `epochs`, continuing from the posterior `go_on` if given.
        gaussian_at: returns the Gaussian at the mode under a prior, given that of a neighbouring one; None if unavailable.
        num_draws: draws that predict val.
    """
    train, val = splits
    features, labels = val.features(run.device), val.labels(run.device)

    def try_at(precision: float, before: PriorTrial | None) -> PriorTrial:
        own_prior = prior.times(precision / prior.weight_precision)
        target, limit = train.target(own_prior, run.device), float(options.epochs or 0)
        held_out, generator = target.held_out(features, labels), run.stream("refine/prior-draws")
        flow, near = (None, None) if before is None else before.found[1:]
        with counting_passes() as tally:
            gaussian = gaussian_at(own_prior, near)
        cost = tally.passes / (options.num_draws or 1)
        losses = None if gaussian is None else losses_if_close(target, gaussian, held_out, num_draws, generator)
        if losses is not None:
            return PriorTrial(precision, losses.cpu(), cost, limit, (own_prior, flow, gaussian), is_gaussian=True)
        epochs = options.trial_epochs * (2 if flow is None else 1)  # the first starts from the base
        fit = fit_at(own_prior, epochs=epochs, go_on=flow)
        losses = held_out.losses(fit.posterior.sample(num_draws, run.stream("refine/prior-draws")))
        cost += len(fit.history)
        return PriorTrial(precision, losses.cpu(), cost, limit, (own_prior, fit.posterior, None))

    found = search_prior(try_at, prior.weight_precision, progress=run.console)
    passes = sum(trial.cost for trial in found.trials) * (options.num_draws or 1)
    return prior_metrics(found, found.best.found[0], passes=passes)


def _measure(run: Run, options: RefineOptions, fit: RefineFit, base: Gaussian, target: Target) -> dict[str, Any]:
    """Return the ELBO before and after, from fresh draws with the same noise on the full data, and what describes the fit."""
    found = measure_gain(
        target,
        base,
        fit.posterior,
        generator=run.stream("refine/elbo"),
        num_samples=options.num_elbo_draws,
        progress=run.console,
    )
    before, after = found.before, found.after
    if not all(math.isfinite(value) for value in (before.value, after.value, found.value, found.standard_error)):
        raise NumericError(
            f"the ELBO is not finite (before {before.value:.4g}, after {after.value:.4g})",
            hint=f"use a --learning-rate below {options.learning_rate}",
        )
    metrics: dict[str, Any] = {}
    for name, estimate in (("before", before), ("after", after)):
        metrics[f"elbo_{name}"] = {"value": estimate.value, "standard_error": estimate.standard_error}
        metrics[f"log_weight_sd_{name}"] = estimate.log_weight_sd
    if fit.posterior.subspace is not None:
        metrics["subspace"] = _subspace_metrics(base, fit.posterior.subspace)
    if not options.is_last_layer:
        metrics["over_layers"] = options.layers
    return metrics | {
        "elbo_gain": {"value": found.value, "standard_error": found.standard_error},
        "elbo_draws": len(before.log_weights),
        "verdict": found.verdict,
        "is_idle": is_idle(fit.posterior, fit.posterior.noise(64, run.stream("refine/idle"))),
        "flow": options.chosen_flow,
        "length": options.length,
        "space": options.space,
        "settings": settings_of(fit.posterior.layers[0]),
        "layers": [dict(layer.summary()) for layer in fit.posterior.layers],
        "epochs": options.epochs,
        "epochs_run": len(fit.history),
        "ended_early": fit.is_early,
        **UNMEASURED,
    }


def _subspace_metrics(base: Gaussian, subspace: Subspace) -> dict[str, Any]:
    """Return the number of directions, and the smallest and largest ratio of the base's variance to the prior's along one."""
    inner = reduce_gaussian(base)
    moved = inner.covariance.unwhiten(subspace.basis.T)
    variances = moved.square().sum(dim=1)
    precisions = base.require_prior().diagonal(inner.layout, device=moved.device)
    of_prior = (moved.square() / precisions).sum(dim=1) / variances
    shares = (variances / of_prior).tolist()
    return {"dimensions": len(shares), "share_of_prior": [min(shares), max(shares)]}


def format_summary(metrics: RefineMetrics, *, has_draws: bool = False) -> list[str]:
    """Return the summary for people, with advice.

    Args:
        has_draws: True where the run has up-to-date hmc draws from the same target.
    """
    advice = _suggest_next_step(metrics, "the run's hmc draws" if has_draws else "hmc")
    before, after, gain = (metrics[name] for name in ("elbo_before", "elbo_after", "elbo_gain"))
    lines = [
        *prior_line(metrics),
        f"ELBO before {before['value']:.2f} +- {before['standard_error']:.2f}, after {after['value']:.2f} +- {after['standard_error']:.2f} nats; "
        f"gain {gain['value']:+.2f} +- {gain['standard_error']:.2f} ({metrics['elbo_draws']} fresh draws, full data)",
    ]
    if metrics["ended_early"]:
        lines.append(
            f"stopped after {metrics['epochs_run']} of {metrics['epochs']} epochs because the ELBO no longer improved"
        )
    if "subspace" in metrics:
        lines += _subspace_lines(metrics["subspace"])
    lines += val_lines(metrics)
    spread = metrics["log_weight_sd_before"]
    if metrics["verdict"] == "helped":
        lines += _helped_lines(metrics, advice)
    elif metrics["verdict"] == "hurt":
        lines.append(
            f"refinement made the posterior worse: use the base, or {advice}; or use a smaller --learning-rate with "
            "--patience 0"
        )
    elif metrics["verdict"] == "undecided":
        lines.append(_undecided_line(metrics, advice))
    elif spread < CLOSE_LOG_WEIGHT_SD:
        lines.append(
            "refinement made no difference that matters: the base already matches the target closely (standard "
            f"deviation of its log importance weights {spread:.2f})"
        )
    else:
        lines.append(
            "refinement made no difference that matters, but the base is still far from the target (standard "
            f"deviation of its log importance weights {spread:.2f}): {advice}"
        )
    return lines


def _suggest_next_step(metrics: RefineMetrics, draws: str) -> str:
    """Return what most likely comes closer to the target, judged by what flows reached on diagonal bases and weak priors."""
    if "subspace" in metrics:
        return "try a larger --subspace or none"
    if metrics["flow"] != "affine":
        return f"try --flow affine, or {draws}"
    if "over_layers" in metrics:
        wider = "--scale low-rank" if metrics["settings"]["scale"] == "diag" else "a larger --rank"
        return f"try {wider}, a base of another structure, or {draws}"
    if metrics["settings"]["scale"] != "block":
        return f"try --scale block, a longer --length, or {draws}"
    return f"try more --epochs, or {draws}"


_NEARLY_ALL = 0.95  # fraction of the prior's variance that is left where the data say next to nothing


def _subspace_lines(inside: dict[str, Any]) -> list[str]:
    least, most = inside["share_of_prior"]
    lines = [
        f"the flow acts in {inside['dimensions']} directions, where the base has {percent(least, '.3g')} to "
        f"{percent(most, '.3g')} of the prior's variance"
    ]
    if least > _NEARLY_ALL:
        lines.append("the data say almost nothing about these directions: use a larger --subspace")
    return lines


FAR_LOG_WEIGHT_SD = 5.0


def _helped_lines(metrics: RefineMetrics, advice: str) -> list[str]:
    """Describe how much closer refinement came to the target. Call it help only if val does not prefer something simpler."""
    gain, spread = metrics["elbo_gain"]["value"], metrics["log_weight_sd_after"]
    is_far = spread > FAR_LOG_WEIGHT_SD
    small = f", but by less than {NEGLIGIBLE_NATS} nats" if gain < NEGLIGIBLE_NATS else ""
    worse = " and ".join(SIMPLER_PREDICTIVES.get(name, name) for name in find_better_predictives(metrics))
    line = f"the refined posterior is closer to the target than the base{small}"
    if not worse:
        lines = [f"refinement helped: {line}"]
    else:
        line += f", but predicts val worse than {worse}"
        cause = "" if is_far else ": the model and its prior cause this, not the approximation"
        other_prior = (  # a network's prior was chosen for linearised predictions
            "; try the --prior-precision that the network was trained with (weight decay times examples), or --flow radial"
            if "over_layers" in metrics
            else ""
        )
        lines = [f"{line}{cause}{other_prior}"]
    if is_far:
        lines.append(
            f"it is still far from the target (standard deviation of its log importance weights {spread:.1f}): {advice}"
        )
    return lines


def _undecided_line(metrics: RefineMetrics, advice: str) -> str:
    gain, draws = metrics["elbo_gain"], metrics["elbo_draws"]
    margin = reach(draws) * gain["standard_error"]
    ends = f"{gain['value'] - margin:+.2f} and {gain['value'] + margin:+.2f}"
    return (
        f"undecided after {draws} draws: the gain is between {ends} nats, so refinement may have helped, hurt or "
        f"had no effect: {advice}; or use more --elbo-draws"
    )


# What a header records of the target.
_TARGET = ("layers", "fit_on", "prior_precision", "bias_precision", "part_precisions", "prior_mean_scale")


def _has_draws(run: Run, meta: Mapping[str, Any]) -> bool:
    """True where the run has up-to-date hmc draws from the target that `meta` records."""
    draws = fresh_posterior(run, f"hmc{LayersOptions(meta.get('layers', LAST)).layers_suffix}", {})
    return draws is not None and all(draws.meta.get(name) == meta.get(name) for name in _TARGET)
