"""fit-ensemble: combine networks that were trained apart into one posterior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bnncli.artifacts.freshness import is_same_file
from bnncli.artifacts.posteriors import gradient_passes
from bnncli.artifacts.provenance import Source
from bnncli.commands.fit_laplace import LOO, FitLaplaceOptions
from bnncli.commands.fit_laplace.last_layer import LastLayerLaplace, fit_last_layer
from bnncli.errors import DataError, UsageError
from bnncli.evaluation.recommendation import score_predictive
from bnncli.inference.stacking import SHARED_RANGE, fit_shared_temperature
from bnncli.inference.structure_choice import MOST_LEFT_OUT
from bnncli.lazy import no_grad, torch
from bnncli.models.checkpoints import load_checkpoint
from bnncli.models.head import Head
from bnncli.models.sharded import checkpoint_sha256
from bnncli.options.command import CKPT, COMPUTE, Argument, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.options.shared import trust_code_option
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import STATE, ModuleLayout
from bnncli.posteriors.ensemble import Ensemble
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.mixture import MemberLayout, Mixture
from bnncli.session import revisions as _revisions
from bnncli.session.fits import FitInputs, FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import Split, load_split
from bnncli.session.network import Network
from bnncli.session.network_splits import BATCH, NetworkReader, network_sources
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import (
    load_labeled_val,
    measure_probs_on_val,
    predict_split_probs,
    require_labeled_val,
    val_lines,
    warn_if_worse,
)
from bnncli.system.input_files import open_regular
from bnncli.system.memory import require

if TYPE_CHECKING:
    from torch import Tensor, nn


TRAINED, TEMPERATURE, LAPLACE = "trained", "temperature", "laplace"


@dataclass(frozen=True)
class FitEnsembleOptions(CheckedOptions):
    """Options of fit-ensemble."""

    each: str = option(
        TRAINED,
        "What each member predicts with: its network as trained, the network at one shared temperature, or a "
        "Gaussian over its last layer.",
        choices=(TRAINED, TEMPERATURE, LAPLACE),
        numeric=False,  # recorded by `each_params`
    )
    trust_code: bool = trust_code_option(is_recorded=False)

    @property
    def each_params(self) -> dict[str, Any]:
        """Return what requests record of --each; nothing for networks as trained."""
        return {} if self.each == TRAINED else {"each": self.each}


COMMAND = Command(
    "Combine networks that were trained separately into an ensemble.",
    "CKPT is the first member; each MEMBER is another checkpoint of the same architecture. All members have "
    "equal weight. Writes posteriors/ensemble.safetensors, or posteriors/mola.safetensors with --each laplace.",
    (FitEnsembleOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-ensemble lenet-0.safetensors lenet-1.safetensors lenet-2.safetensors",
        "bnncli fit-ensemble a.pt b.pt c.pt d.pt e.pt --name five",
        "bnncli fit-ensemble a.pt b.pt c.pt --each laplace",
    ),
    (CKPT, Argument("member", "Checkpoints of the other members.", is_many=True)),
    section="Fit",
    place=60,
)


def execute(run: Run, options: FitEnsembleOptions) -> Result:
    """Combine the networks and publish. The result's metrics have the cost and the scores on val."""
    members = sorted((Path(one) for one in run.arguments["member"]), key=lambda path: (path.name, str(path)))
    first = load_split(run, "train" if options.each == LAPLACE else (run.folder.splits() or ["train"])[0])
    val = (
        require_labeled_val(run, "the temperature is chosen") if options.each == TEMPERATURE else load_labeled_val(run)
    )
    if first.content.head_weight is None or first.checkpoint is None:
        raise UsageError("this run has only features, no network; an ensemble needs checkpoints")
    _check_apart(run, members)
    used = [first] if val is None or val.source.role == first.source.role else [first, val]
    sources = [split.source for split in used] + network_sources(used)
    for number, path in enumerate(members, start=2):
        with open_regular(path):  # raises where it is missing
            pass
        sources.append(
            Source(f"member.{number}", path, f"sha256:{checkpoint_sha256(path, run.console)}", is_artifact=False)
        )
    method = "mola" if options.each == LAPLACE else "ensemble"
    seeded = {"seed": run.compute.seed} if options.each == LAPLACE else {}
    request = posterior_request(
        run,
        method,
        params={"members": [path.name for path in members], **options.each_params, **seeded},
        algo_rev=_revisions.FIT_ENSEMBLE,
        sources=sources,
        checkpoint=first.checkpoint,
        estimated_bytes=lambda: sum(path.stat().st_size for path in (run.checkpoint_path, *members)),
    )

    def fit() -> FitOutput:
        return fit_members(run, options, first, val, members)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request, meta))


def _check_apart(run: Run, members: list[Path]) -> None:
    """Raise UsageError where a file is given twice."""
    given = [run.checkpoint_path, *members]
    for place, path in enumerate(given):
        for other in given[:place]:
            if path == other or is_same_file(path, other):
                raise UsageError(f"MEMBER: {path} is given twice; members must be different networks")


def fit_members(
    run: Run, options: FitEnsembleOptions, first: Split, val: Split | None, members: list[Path]
) -> FitOutput:
    """Return the members as a posterior, with metrics."""
    reader = NetworkReader(run, options.trust_code)
    with reader.recorded.visible():
        layout = reader.layout(first, STATE)
        networks = {run.checkpoint_path: reader.recorded.network}
        networks |= {path: open_member(run, reader.recorded.network, path) for path in members}
        _check_different(networks)
        thetas = [read_theta(network.module, layout, path, run.checkpoint_path) for path, network in networks.items()]
        if options.each == LAPLACE:
            tensors, meta, found = _fit_mixture(run, reader, list(networks.values()), torch.stack(thetas), layout, val)
        else:
            tensors, meta, found = _build_ensemble(
                run, reader, options.each, Ensemble(torch.stack(thetas), layout), first, val
            )
    costs = [gradient_passes(path) for path in networks]
    known = [cost for cost in costs if cost is not None]
    metrics = {
        "num_members": len(networks),
        "members": [path.name for path in networks],
        "gradient_passes": sum(known) if len(known) == len(costs) else None,
        **found,
    }
    return FitOutput(tensors, {**meta, "layers": STATE}, metrics, first)


def open_member(run: Run, first: Network, path: Path) -> Network:
    """Open the network of another checkpoint as the run's own. Raises what load_checkpoint and load_network raise."""
    wanted = None if first.checkpoint is None or not first.checkpoint.selected_key else first.checkpoint.selected_key
    checkpoint = load_checkpoint(path, wanted=wanted, progress=run.console)
    for note in checkpoint.notes:
        run.console.warn(f"{path.name}: {note}")
    return Network(run, first.spec, first.arguments, first.last_layer, checkpoint, first.saved, first.output)


def _check_different(networks: Mapping[Path, Network]) -> None:
    """Raise UsageError where two networks have the same weights."""
    digests: dict[str, Path] = {}
    for path, network in networks.items():
        assert network.checkpoint is not None
        same = digests.setdefault(network.checkpoint.weights_digest, path)
        if same != path:
            raise UsageError(f"MEMBER: {path} has the same weights as {same}; members must be different networks")


def read_theta(module: nn.Module, layout: ModuleLayout, path: Path, first: Path) -> Tensor:
    """Return theta (P,) float32 of a member, on the CPU. Raises DataError where it has another architecture."""
    state: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for part in layout.parts:
        theirs = tuple(state[part.name].shape) if part.name in state else None
        if theirs != part.shape:
            raise DataError(
                f"{path}: {part.name!r} has shape {theirs or 'none'}, but {part.shape} in {first}; members must "
                "have the same architecture",
                code="wrong_shape",
                path=path,
            )
    return layout.join({part.name: state[part.name].detach() for part in layout.parts}).float().cpu()


def _fit_mixture(
    run: Run, reader: NetworkReader, networks: list[Network], states: Tensor, layout: ModuleLayout, val: Split | None
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Fit a Gaussian to each network's last layer with fit-laplace's defaults. Return tensors, metadata and metrics."""
    train = load_split(run, "train").check_labeled()
    gaussians, heads, told = [], [], []
    for number, network in enumerate(networks):
        seen = [None if split is None else _member_split(reader, network, split, number) for split in (train, val)]
        fitted, head = _fit_laplace(run, seen[0] or train, seen[1])
        gaussians.append(cast("Gaussian[HeadLayout]", Gaussian.from_tensors(dict(fitted.tensors), dict(fitted.meta))))
        heads.append(head)
        told.append(fitted.metrics)
    posterior = Mixture(gaussians, MemberLayout(train.layout, layout, states, torch.stack(heads).float()))
    found: dict[str, Any] = {"val": None, "val_excess": None, "val_nll_members": None}
    found |= {name: [one[name] for one in told] for name in ("prior_precision", "structure")}
    if val is not None:
        probs = predict_split_probs(run, posterior.to(run.device), reader.split(val, STATE), "mc")
        how: dict[str, Any] = {"method": "mola", "integrator": "mc", "num_draws": posterior.default_samples}
        found |= measure_probs_on_val(run, probs, val, **how)
        found["val_nll_members"] = [one["val_nll_laplace"] for one in told]
    tensors, meta = posterior.to_tensors()
    return tensors, {**meta, "method": "mola", "param_layout": posterior.layout.to_json()}, found


_FEWER = "use fewer rows (SPLIT=SPEC@N), or \0each\0 temperature"


def _member_split(reader: NetworkReader, network: Network, split: Split, number: int) -> Split:
    """Return a split with the features and head of a member; the first member's are the run's own."""
    if number == 0:
        return split
    assert split.content.header is not None
    inputs = reader.input_split(split, split.content.header)
    head = network.head(inputs)
    assert head is not None
    require(4 * split.stored.numel(), "cpu", what=f"the features of {split.content.name}", hint=_FEWER)
    extracted = network.features(inputs, head, batch_size=BATCH, dtype=reader.recorded.dtype)
    bias = None if head.bias is None else head.bias.numpy()
    content = replace(
        split.content, features=extracted.features.numpy(), head_weight=head.weight.numpy(), head_bias=bias
    )
    return replace(split, content=content)


def _fit_laplace(run: Run, train: Split, val: Split | None) -> tuple[FitOutput, Tensor]:
    """Run fit-laplace on a member's features with its defaults. Return the fit and the head (H,) as trained."""
    without_val = LOO if train.layout.num_outputs <= MOST_LEFT_OUT else "marglik"
    options, head = FitLaplaceOptions(), train.head()
    assert head is not None
    inputs = FitInputs(run, options, train, val)
    method = LastLayerLaplace(inputs, options, without_val if val is None else "val")
    method.estimate_memory()
    return fit_last_layer(method, train, val, only_draws=True), head


def _build_ensemble(
    run: Run, reader: NetworkReader, each: str, posterior: Ensemble, first: Split, val: Split | None
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return tensors, metadata and metrics of the networks, as trained or at their best joint temperature on val."""
    found: dict[str, Any] = {"val": None, "val_excess": None, "val_nll_members": None}
    if val is not None:
        assert val.content.labels is not None
        logits, labels = _compute_logits(run, reader, posterior, val), torch.from_numpy(val.content.labels)
        losses = None
        if each == TEMPERATURE:
            posterior, logits, losses, temperature = _apply_temperature(run, reader, posterior, first, logits, labels)
            found["temperature"] = temperature
        probs = posterior.layout.likelihood.class_probabilities(logits.double(), dim=2).numpy()
        own = [score_predictive("member", one, val.content.labels).nll for one in probs]
        how: dict[str, Any] = {"method": "ensemble", "integrator": "mc", "num_draws": len(probs)}
        found |= measure_probs_on_val(
            run, probs.mean(axis=0), val, **how, losses=None if losses is None else losses.numpy()
        )
        found["val_nll_members"] = own
    tensors, meta = posterior.to_tensors()
    return tensors, {**meta, "method": "ensemble", "param_layout": posterior.layout.to_json()}, found


_AT_ONCE = 500  # examples


@no_grad
def _compute_logits(run: Run, reader: NetworkReader, posterior: Ensemble, val: Split) -> Tensor:
    """Return the members' logits (M, N, K) on val, on the CPU."""
    inputs = reader.split(val, STATE).inputs
    task = run.console.task("val", len(posterior.members) * len(inputs))
    found = []
    for member in posterior.members.to(run.device):
        blocks = []
        for block in inputs.split(_AT_ONCE):
            blocks.append(posterior.layout.logits(block.to(run.device), member.unsqueeze(0))[0].cpu())
            task.advance(len(block))
        found.append(torch.cat(blocks))
    return torch.stack(found)


def _apply_temperature(
    run: Run, reader: NetworkReader, posterior: Ensemble, first: Split, logits: Tensor, labels: Tensor
) -> tuple[Ensemble, Tensor, Tensor | None, float]:
    """Return the members and their logits at the best temperature on val, its cross-validated losses, and the temperature. Without a finite optimum, leave them unchanged."""
    layout = posterior.layout
    names = [f"{_head(reader, first).name}.{kind}" for kind in ("weight", "bias")]
    if names[0] not in {part.name for part in layout.parts} or _head(reader, first).form is not None:
        raise UsageError(
            "\0each\0 temperature: the network's last layer has no weight of its own to divide by a temperature",
            hint="omit it, or use \0each\0 laplace",
        )
    fitted = fit_shared_temperature(logits, labels, layout.likelihood)
    if fitted is None:
        low, high = SHARED_RANGE
        run.console.warn(f"val prefers no temperature between {low:g} and {high:g}; the members predict unscaled")
        return posterior, logits, None, 1.0
    temperature, losses = fitted
    parts = {
        name: part / temperature if name in names else part for name, part in layout.split(posterior.members).items()
    }
    return replace(posterior, members=layout.join(parts)), logits / temperature, losses, temperature


def _head(reader: NetworkReader, split: Split) -> Head:
    assert split.content.header is not None
    return reader.network(reader.input_split(split, split.content.header))[1]


def _report(run: Run, request: Request, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    method = str(meta["method"])
    warn_if_worse(run, request.target, metrics, method=method)
    cost = metrics["gradient_passes"]
    lines = [
        f"{metrics['num_members']} members"
        + (f", at temperature {metrics['temperature']:.3g}" if "temperature" in metrics else "")
        + ("" if cost is None else f", trained in {cost} passes over the data")
    ]
    if method == "mola":
        each = zip(metrics["structure"], metrics["prior_precision"], strict=True)
        lines.append(f"prior precisions: {', '.join(f'{value:.4g} ({name})' for name, value in each)}")
    if metrics["val"] is not None:
        own = ", ".join(f"{value:.4f}" for value in metrics["val_nll_members"])
        lines += [*val_lines(metrics), f"val NLL of the members: {own}"]
    return Report(metrics, lines)
