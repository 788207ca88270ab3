"""The commands that a verdict of diagnose may suggest, to be pasted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.evaluation.verdict import Commands, Judged
from bnncli.options.diagnose import DiagnoseOptions
from bnncli.options.hmc import HmcOptions
from bnncli.options.shared import INHERIT, LayersOptions
from bnncli.session.inputs import recorded_prior
from bnncli.session.run import Run
from bnncli.session.states import after_predictions

if TYPE_CHECKING:
    from bnncli.stages.diagnose.diagnosis import Diagnosis


def commands(run: Run, options: DiagnoseOptions, diagnoses: list[Diagnosis], headers: dict[str, Header]) -> Commands:
    """The commands that a verdict may suggest, to be pasted."""

    def sample(judged: Judged) -> str:
        same = [one.judged for one in diagnoses if one.judged.aim == judged.aim]
        if judged.layers is not None:
            return _layers_sampling_command(run, judged.layers, same, headers)
        return _sampling_command(run, options, same, headers)

    def predict(name: str) -> str:
        is_of_layers = headers[name].meta.get("layers") is not None
        following = after_predictions(run, f"{name}.mc")
        return following or run.suggest("predict", posterior=name, integrator="mc", trust_code=is_of_layers)

    return Commands(
        predict=predict,
        sample=sample,
        fit=run.suggest("fit-laplace"),
        tune=run.suggest("fit-laplace", prior_precision="val", name="laplace-val"),
    )


def _layers_sampling_command(run: Run, layers: str, same_target: list[Judged], headers: dict[str, Header]) -> str:
    """The same of draws of other layers than the last: about the base that was judged, for longer than those that lie there."""
    bases = [one for one in same_target if one.type != "samples" and one.num_varying is None]
    base = min(bases, key=_distance_of_base).name if bases else None
    fixing = next((one for one in same_target if one.num_varying is not None), None)  # no base for hmc
    drawn, given_of = _exact_draws(same_target), _prior_of_draws(same_target)
    usual = f"hmc{LayersOptions(layers).layers_suffix}"
    given: dict[str, Any] = {"layers": layers, "base": base, "trust_code": True}
    if base is None and fixing is not None and fixing.target is not None:
        given["prior_precision"] = fixing.target.weight_precision
    if base is None:
        given |= given_of
    if drawn is None:
        is_there = run.folder.posterior(usual, suffix=".nc").is_file()
        return run.suggest("hmc", **given, name=f"hmc-{base or same_target[0].name}" if is_there else None)
    return run.suggest("hmc", **given, **_longer(drawn.name, headers[drawn.name], usual=usual))


def _exact_draws(same_target: list[Judged]) -> Judged | None:
    """Draws of which more would be right: those of stochastic gradients are not, so that hmc goes beside them, not in their place."""
    return next((judged for judged in same_target if judged.type == "samples" and judged.is_exact), None)


def _prior_of_draws(same_target: list[Judged]) -> dict[str, Any]:
    """The option of hmc that says the prior of what is drawn; none where there are no draws, or it takes two precisions or a mean."""
    drawn = next((judged for judged in same_target if judged.type == "samples"), None)
    if drawn is None or drawn.target is None or not drawn.target.is_isotropic or drawn.target.mean is not None:
        return {}
    return {"prior_precision": drawn.target.weight_precision}


def _distance_of_base(base: Judged) -> tuple[bool, float]:
    """What bases are ordered by: Gaussians before others, as they whiten, the nearest to the target first."""
    return base.type != "gaussian", math.inf if base.log_weight_sd is None else base.log_weight_sd


def _longer(name: str, header: Header, *, usual: str = "hmc") -> dict[str, Any]:
    """Options of hmc for draws like these, twice as many, in their place; beside them where they were joined of several runs."""
    params = header.provenance.get("params", {})
    if header.meta.get("method") == "merge":
        return {"name": f"{name}-longer", "warmup": 2 * HmcOptions.warmup, "draws": 2 * header.meta["metrics"]["draws"]}
    twice = {key: 2 * int(params[key]) for key in ("warmup", "draws") if params.get(key)}
    return {**twice, "name": None if name == usual else name, "force": True}


def _sampling_command(run: Run, options: DiagnoseOptions, same_target: list[Judged], headers: dict[str, Header]) -> str:
    """The command that gives draws of a target: for longer than those judged; or to judge those that lie there."""
    bases = [judged.name for judged in same_target if judged.type != "samples"]
    given: dict[str, Any] = {"base": bases[0]} if bases and "laplace" not in bases else {}
    drawn = _exact_draws(same_target)
    if not bases:  # no option of hmc says two precisions: they are those of the draws
        given = _prior_of_draws(same_target) or {"base": same_target[0].name}
    given.setdefault("prior_precision", INHERIT)
    if drawn is not None:
        longer = _longer(drawn.name, headers[drawn.name])
        if given.get("base") == drawn.name:  # no artifact is made from itself
            longer = {**longer, "name": f"{drawn.name}-longer", "force": False}
        return run.suggest("hmc", **given, **longer)
    path = run.folder.posterior("hmc", suffix=".nc")
    if not path.is_file():
        return run.suggest("hmc", **given)
    if recorded_prior(read_header(path)) != same_target[0].target:
        return run.suggest("hmc", **given, name=f"hmc-{(bases or [same_target[0].name])[0]}")
    if options.posterior:  # there, and not among those named
        return run.suggest("diagnose", posterior=[*options.posterior, "hmc"])
    return run.suggest("hmc", **given, force=True)  # there, and skipped as stale
