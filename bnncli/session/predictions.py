"""Find posteriors and predictions of a run by name, layers, integrator and split."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bnncli import registry
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.names import near_miss
from bnncli.parameters.module import LAST
from bnncli.session.run import Run

# Commands by the default name of their posterior, followed by "-all" if it is over all layers.
_OF_LAYERS = {
    "laplace": "fit-laplace",
    "refine": "refine",
    "hmc": "hmc",
    "sghmc": "fit-sghmc",
    "swag": "fit-swag",
    "vi": "fit-vi",
}
_OF_THE_HEAD = {"temperature": "fit-temperature", "calibration": "fit-calibration", "lbbnn": "fit-lbbnn"}
_ALL = "-all"


def maker_of(run: Run, name: str, *, trust_code: bool = False) -> str | None:
    """Return the command that creates a posterior of this name by default; None for a user's name.

    Args:
        trust_code: whether the code of the run's network may run.
    """
    command = (_OF_LAYERS | _OF_THE_HEAD).get(name)
    if command is not None:
        return run.suggest(command)
    over_all = _OF_LAYERS.get(name.removesuffix(_ALL)) if name.endswith(_ALL) else None
    return None if over_all is None else run.suggest(over_all, layers="all", trust_code=trust_code)


def find_named(run: Run, name: str, *, flag: str, otherwise: str, trust_code: bool = False) -> Path:
    """Return the file of the posterior called `name`, or `name` itself if it is a file.

    Args:
        flag: the option that gave it, for messages.
        otherwise: the command to suggest for names that are no command's default.
        trust_code: whether the code of the run's network may run.

    Raises:
        MissingInput: there is neither; names the command that creates it, or a similar name.
    """
    maker = maker_of(run, name, trust_code=trust_code)
    return run.folder.find_posterior(name, flag=flag, maker=maker or otherwise, is_meant=maker is not None)


def find_base(run: Run, options: Any, name: str | None) -> Path:
    """Return the file of the named base; for None, the Gaussian of fit-laplace over these layers.

    Args:
        options: with `layers`, `is_last_layer`, `trust_code`, `default_base`.

    Raises:
        MissingInput: there is none; names the command that creates it.
    """
    over = {} if options.is_last_layer else {"layers": options.layers, "trust_code": options.trust_code}
    if name is None or name == options.default_base:
        maker = run.suggest("fit-laplace", **over)
        return run.folder.find_posterior(options.default_base, flag="\0base\0", maker=maker, is_meant=True)
    otherwise = run.suggest("fit-laplace", **over, name=name)
    return find_named(run, name, flag="\0base\0", otherwise=otherwise, trust_code=options.trust_code)


Found = TypeVar("Found")
_UNKNOWN = "unknown layers"


def select_by_layers(
    run: Run,
    layers: str | None,
    found: Sequence[Found],
    file_of: Callable[[Found], Path | None] = lambda path: path,  # type: ignore[assignment,return-value]
    *,
    are_named: bool,
    what: str = "posterior",
    maker: str | None = None,
    trust_code: bool = False,
) -> list[Found]:
    """Return the posteriors over these layers; all if no layers were given.

    Args:
        found: files of posteriors, or objects with a file given by `file_of`.
        are_named: whether the user named them.
        what: noun for messages. maker: command that creates one; fit-laplace by default, with `trust_code`.

    Raises:
        UsageError: a named one is over other layers.
        MissingInput: none is over these; lists those available.
    """
    if layers is None:
        return [*found]
    names: dict[str, dict[str, None]] = {}  # posterior names by layers
    kept = []
    for one in found:
        path = file_of(one)
        over = layers_of(path)
        name = "?" if path is None else path.stem
        names.setdefault(over, {})[name] = None
        if over == layers or (are_named and over == _UNKNOWN):  # unreadable files are reported when opened
            kept.append(one)
        elif are_named:
            raise UsageError(
                f"\0posterior\0 {name} is over \0layers\0 {over}, but got \0layers\0 {layers}; give only one of the two"
            )
    if not kept:
        over_others = {} if layers == LAST else {"layers": layers, "trust_code": trust_code}
        there = "; ".join(f"over {over}: {', '.join(own)}" for over, own in names.items())
        raise MissingInput(
            f"{run.checkpoint_path} has no {what} over \0layers\0 {layers} (have: {there or 'none'})",
            hint=maker or run.suggest("fit-laplace", **over_others),
        )
    return kept


def layers_of(path: Path | None) -> str:
    """Return the layers of the posterior in a file as named; a placeholder if it cannot be read."""
    try:
        return _UNKNOWN if path is None else str(read_header(path).meta.get("layers") or LAST)
    except (DataError, MissingInput):
        return _UNKNOWN


@dataclass(frozen=True)
class PredictionGroup:
    """Predictions of one posterior by one integrator: a header per split, and the posterior's file."""

    name: str
    headers: list[Header]

    @property
    def posterior(self) -> str:
        """Return the posterior's name."""
        return str(self.headers[0].meta["posterior"])

    @property
    def integrator(self) -> str:
        """Return the integrator's name."""
        return str(self.headers[0].meta["integrator"])

    @property
    def variant(self) -> str:
        """Return the integrator's name with its non-default settings."""
        return str(self.headers[0].meta.get("variant", self.integrator))

    @property
    def posterior_path(self) -> Path | None:
        """Return the path of the posterior's file when the predictions were created."""
        for entry in self.headers[0].inputs:
            if entry["role"] == "posterior":
                return Path(os.path.normpath(self.headers[0].input_path(entry)))
        return None

    def splits(self, *, is_ood: bool) -> dict[str, Header]:
        """Return the headers of the in-distribution or out-of-distribution splits by name."""
        return {str(h.meta["split"]): h for h in self.headers if bool(h.meta.get("is_ood")) == is_ood}

    def is_named(self, posteriors: Sequence[str], integrators: Sequence[str]) -> bool:
        """Return whether the group is among these names; an empty list matches all."""
        return (
            not posteriors or not {self.posterior, self.name, f"{self.posterior}.{self.variant}"}.isdisjoint(posteriors)
        ) and (not integrators or not {self.integrator, self.variant}.isdisjoint(integrators))


class SkippedPosterior(NamedTuple):
    """A skipped posterior: its name, that of its predictions or its own, the reason, whether it has predictions."""

    posterior: str
    name: str
    reason: str
    is_predicted: bool = True


def open_groups(
    run: Run,
    *,
    posteriors: Sequence[str] = (),
    integrators: Sequence[str] = (),
    layers: str | None = None,
    beside: Sequence[str] = (),
    skipped: list[SkippedPosterior] | None = None,
    leave_out: Collection[Path] = (),
) -> list[PredictionGroup]:
    """Open the run's predictions in groups; skip those of stale posteriors with a warning unless named.

    Args:
        posteriors: names of posteriors or groups; all if empty.
        integrators: names of integrators, with or without settings; all if empty.
        layers: of the posteriors, as given to the command that created them; None for any.
        beside: names of posteriors or groups to include regardless of layers.
        skipped: extended by the run's posteriors that have no predictions or stale ones.
        leave_out: files to ignore.

    Raises:
        MissingInput: there are none; names the command that creates them.
        DataError: all or a named one are stale, or a name has predictions of several posteriors.
    """
    groups = _read_groups(run, posteriors, leave_out)
    wanted = _select_requested(run, groups, posteriors, integrators)
    taken = [group for group in wanted if beside and group.is_named(beside, [])]
    there_are = {layers_of(path) for path in run.folder.posteriors()} if layers is not None else set()
    wanted = taken + select_by_layers(
        run,
        layers,
        [group for group in wanted if group not in taken],
        lambda group: group.posterior_path,
        are_named=bool(posteriors),
        what="predictions of a posterior",
        maker=run.suggest("predict", layers=layers) if layers in there_are else None,
    )
    errors = {group.name: _explain_unusable(run, group, is_named=bool(posteriors)) for group in wanted}
    kept = [group for group in wanted if errors[group.name] is None]
    if not kept:
        first = next(error for error in errors.values() if error is not None)
        raise DataError("all predictions in the run are stale", code="stale_input", hint=first.hint, path=first.path)
    if skipped is not None:
        skipped += [
            SkippedPosterior(g.posterior, g.name, one.message) for g in wanted if (one := errors[g.name]) is not None
        ]
        skipped += [] if posteriors else _list_unpredicted(run, groups, layers)
    order = {path.stem: rank for rank, path in enumerate(run.folder.posteriors())}
    return sorted(kept, key=lambda group: (order.get(group.posterior, len(order)), group.name))


def _read_groups(run: Run, posteriors: Sequence[str], leave_out: Collection[Path]) -> list[PredictionGroup]:
    """Read all predictions of the run in groups; skip unreadable files of posteriors that were not named."""
    found: dict[str, list[Header]] = {}
    for path in (one for one in run.folder.prediction_files() if one not in leave_out):
        try:
            header = read_header(path)
        except DataError as error:
            if not _is_of_another(path.parent.name, posteriors):
                raise
            run.console.warn(f"skipping {path.parent.name}: {error.message}")
            continue
        if header.kind == "predictions":
            found.setdefault(path.parent.name, []).append(header)
    return [PredictionGroup(name, headers) for name, headers in found.items()]


def _select_requested(
    run: Run, groups: list[PredictionGroup], posteriors: Sequence[str], integrators: Sequence[str]
) -> list[PredictionGroup]:
    """Return the requested groups.

    Raises:
        MissingInput: a name matches no group, or no group matches all names.
    """
    there = ", ".join(group.name for group in groups) or "none"
    for name in posteriors:
        if not any(group.is_named([name], []) for group in groups):
            raise MissingInput(
                f"no predictions of posterior {name!r} (have: {there})", hint=_maker(run, name, groups, integrators)
            )
    for name in integrators:
        if not any(group.is_named([], [name]) for group in groups):
            family = _family(name)
            hint = None if family is None else run.suggest("predict", integrator=family)
            raise MissingInput(f"no predictions by integrator {name!r} (have: {there})", hint=hint)
    if not run.folder.root.is_dir():
        raise run.no_run()
    wanted = [group for group in groups if group.is_named(posteriors, integrators)]
    if not wanted:
        what = f"no such predictions (have: {there})" if groups else "no predictions"
        raise MissingInput(f"{run.checkpoint_path} has {what}", hint=run.suggest("predict"))
    return wanted


def _list_unpredicted(run: Run, groups: list[PredictionGroup], layers: str | None) -> list[SkippedPosterior]:
    """Return the run's posteriors over `layers` without predictions."""
    predicted = {group.posterior for group in groups}
    over = [path.stem for path in run.folder.posteriors() if layers in (None, layers_of(path))]
    return [
        SkippedPosterior(name, name, "it has no predictions", is_predicted=False)
        for name in over
        if name not in predicted
    ]


def _is_of_another(group: str, posteriors: Sequence[str]) -> bool:
    """Return whether the folder name `group` belongs to none of the named posteriors."""
    return bool(posteriors) and "." in group and {group, group.partition(".")[0]}.isdisjoint(posteriors)


def _family(variant: str) -> str | None:
    """Return the integrator of a name with settings: mean-field for mean-field-order2, not mean."""
    of = [one for one in registry.names("integrators") if variant == one or variant.startswith(f"{one}-")]
    return max(of, key=len, default=None)


def _maker(run: Run, name: str, groups: Sequence[PredictionGroup], integrators: Sequence[str]) -> str:
    """Return the command that predicts with a posterior; if it does not exist, one that creates it or a similar name."""
    known = {path.stem for path in run.folder.posteriors()}
    posterior = name if name in known else name.partition(".")[0]
    if posterior in known:
        families = dict.fromkeys(found for one in integrators if (found := _family(one)) is not None)
        return run.suggest("predict", posterior=posterior, integrator=[*families])
    maker = maker_of(run, posterior)
    if maker is not None:
        return maker
    there = sorted(known.union(*({group.posterior, group.name} for group in groups)))
    return near_miss(name, there) or run.suggest("status")


def _explain_unusable(run: Run, group: PredictionGroup, *, is_named: bool) -> DataError | None:
    """Return why a group is not fresh, or None if it is; raise instead if it was named."""
    makers = {
        (PredictionGroup(group.name, [header]).posterior, PredictionGroup(group.name, [header]).variant)
        for header in group.headers
    }
    if len(makers) > 1:
        made = " and ".join(f"{posterior} ({variant})" for posterior, variant in sorted(makers))
        raise DataError(
            f"predictions {group.name!r} mix {made}; predictions with the same name must come from one posterior "
            "and one integrator",
            code="mixed_predictions",
            hint=run.suggest("predict", posterior=group.posterior, name="OTHER"),
            path=group.headers[0].path.parent,
        )
    try:
        for header in group.headers:
            run.use(header)
    except DataError as error:
        if is_named:
            raise
        run.console.warn(f"skipping {group.name}: {error.message}{error.advice}")
        return error
    return None
