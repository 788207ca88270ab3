"""Which integrator, with which settings and how many draws, predicts with each posterior; what is unfit is told early.

Integrators and their settings are known from the registry and the integrators' own declarations alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bnncli.artifacts.headers import Header
from bnncli.errors import UsageError
from bnncli.integrators import NO_LABELS, Integrator, does_classes, load_integrator, settings_of, variant
from bnncli.likelihoods import has_exclusive_classes, recorded_name
from bnncli.names import with_article
from bnncli.numerics.dirichlet import ranked_lengths
from bnncli.options.predict import PredictOptions
from bnncli.registry import has_attribute, names

ALL = "all"
ENSEMBLE = "ensemble"
OF_THETA = ("sample", "quasi_noise", "log_density")  # what integrators need that predict with draws of theta
PLUG_IN_METHODS = ("map", "temperature", "prune")


@dataclass(frozen=True)
class IntegratorChoice:
    """An integrator with its settings, for one posterior.

    Attributes:
        samples: draws; None for an integrator without draws, and for all draws of a posterior that is draws.
        top_k: rule, threshold and cap by which classes are ranked; None where they are not.
    """

    name: str
    integrator: Integrator
    samples: int | None
    top_k: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The integrator's settings by name."""
        return settings_of(self.integrator)

    @property
    def variant(self) -> str:
        """The integrator's name, with the settings that are not the default."""
        return variant(self.name, self.settings)


@dataclass(frozen=True)
class AskedIntegrators:
    """What the options ask of every posterior.

    Attributes:
        named: integrators by name; empty for the default of each posterior.
        takes_all: whether every integrator that fits was asked for.
        given: settings that were given.
        samples: draws that were asked for.
        top_k: rule, threshold and cap of the ranking that was asked for.
        keeps_samples: whether each draw's probabilities were asked for.
    """

    named: tuple[str, ...]
    takes_all: bool
    given: dict[str, Any]
    samples: int | None
    top_k: dict[str, Any] | None
    keeps_samples: bool

    @classmethod
    def of(cls, options: PredictOptions, headers: Iterable[Header]) -> AskedIntegrators:
        """What the options ask of posteriors with these headers.

        Raises:
            UsageError: a setting or --samples that no chosen integrator has, or a value that one refuses.
        """
        named = tuple(dict.fromkeys(name for name in options.integrator if name != ALL))
        takes_all, top_k = ALL in options.integrator, _top_k(options)
        asked = cls(named, takes_all, dict(options.settings), options.samples, top_k, options.keep_samples)
        chosen = {name for header in headers for name in asked._names(header)}
        asked._check(chosen)
        return asked

    def choices(self, header: Header, num_classes: int) -> tuple[list[IntegratorChoice], list[UsageError]]:
        """The integrators for one posterior, and why each of those that were asked for and do not fit does not."""
        found, refusals = [], []
        for name in self._names(header):
            integrator = self._build(name)
            why = _why_unfit(name, integrator, header, num_classes)
            if why is None:
                top_k = self.top_k if integrator.gives_dirichlet else None
                found.append(IntegratorChoice(name, integrator, self._samples(integrator, header), top_k))
            elif name in self.named or not self.takes_all:
                refusals.append(_refusal(why, header, num_classes))
        return found, refusals

    def _names(self, header: Header) -> list[str]:
        """The integrators asked for, by name; the default of the posterior where none was."""
        everything = [name for name in names("integrators") if name not in self.named] if self.takes_all else []
        is_plain = self.samples is None and not self.given and not self.keeps_samples
        default = default_integrator if is_plain else sampling_integrator
        return [*self.named, *everything] or [default(header)]

    def _build(self, name: str) -> Integrator:
        own = settings_of(load_integrator(name))
        chosen = {setting: value for setting, value in self.given.items() if setting in own}
        try:
            return load_integrator(name, **chosen)
        except ValueError as error:
            raise UsageError(f"\0integrator\0 {name}: {error}") from None

    def _samples(self, integrator: Integrator, header: Header) -> int | None:
        if not integrator.is_sampling:
            return None
        if is_of_draws(header):  # no more than there are
            return None if self.samples is None or self.samples >= (num_stored(header) or math.inf) else self.samples
        is_last_layer = header.meta.get("layers") is None
        by_default = integrator.default_for(_num_params(header), is_last_layer=is_last_layer)
        return self.samples or header.meta.get("default_samples") or by_default

    def _check(self, chosen: set[str]) -> None:
        """Raise UsageError for what none of the chosen integrators has, or one refuses."""
        built = {name: self._build(name) for name in sorted(chosen)}
        for setting in self.given:
            if not any(setting in settings_of(integrator) for integrator in built.values()):
                having = [name for name in names("integrators") if setting in settings_of(load_integrator(name))]
                raise UsageError(
                    f"\0{setting}\0: {_listed(built)} no such setting; these integrators have it: {', '.join(having)}",
                    hint=f"add \0integrator\0 {having[0]}",
                )
        if self.samples is not None and not any(integrator.is_sampling for integrator in built.values()):
            having = [name for name in names("integrators") if load_integrator(name).is_sampling]
            raise UsageError(f"\0samples\0: {_listed(built)} no draws; these integrators draw: {', '.join(having)}")
        if self.top_k is not None and not any(integrator.gives_dirichlet for integrator in built.values()):
            having = [name for name in names("integrators") if load_integrator(name).gives_dirichlet]
            message = f"\0top_k\0: {_listed(built)} no Dirichlet; these integrators have one: {', '.join(having)}"
            raise UsageError(message, hint=f"add \0integrator\0 {having[0]}")


def default_integrator(header: Header) -> str:
    """The integrator of a posterior when none is named: the one that predicted val best when it was fitted, or its method's own."""
    preferred = header.meta.get("metrics", {}).get("recommended_integrator") if follows_val(type_of(header)) else None
    return preferred or sampling_integrator(header)


def follows_val(posterior_type: str) -> bool:
    """Whether the default integrator is the one that val prefers: not of a sampler's draws, which others are compared with."""
    return posterior_type != "samples"


def sampling_integrator(header: Header) -> str:
    """The integrator of a posterior's method, whatever val says: by draws, where it is no point."""
    return default_integrator_of(str(header.meta.get("method")), is_last_layer=header.meta.get("layers") is None)


def default_integrator_of(method: str, *, is_last_layer: bool = True) -> str:
    """The integrator of what a method (laplace, map, ...) gives, when none is named.

    A Gaussian of other layers than the last is that of the network linearised at its mean (Immer et al. 2021,
    arXiv:2008.08400): draws of its weights, put into the network itself, leave the region where the Gaussian is good.
    """
    if method in PLUG_IN_METHODS:
        return "plug-in"
    return "logit-mc" if method == "laplace" and not is_last_layer else "mc"


def type_of(header: Header) -> str:
    """The posterior's type: gaussian, samples, ..."""
    return "samples" if header.kind == "samples" else str(header.meta.get("type"))


def is_of_draws(header: Header) -> bool:
    """Whether a posterior is draws, or networks, that predictions use as they are."""
    return type_of(header) in ("samples", ENSEMBLE)


def num_stored(header: Header) -> int:
    """How many draws a posterior that is draws has; 0 where its header does not say."""
    metrics = header.meta.get("metrics", {})
    if type_of(header) == ENSEMBLE:
        return int(metrics.get("num_members", 0))
    return int(metrics.get("chains", 0) * metrics.get("draws", 0))


def _num_params(header: Header) -> int:
    """P of a posterior."""
    return sum(math.prod(part["shape"]) for part in header.meta.get("param_layout", []))


def _top_k(options: PredictOptions) -> dict[str, Any] | None:
    """The ranking asked for, with what was not said filled in."""
    if options.top_k is None:
        return None
    given = {"rule": options.top_k, "threshold": options.top_k_threshold, "cap": options.top_k_cap}
    return {
        **(ranked_lengths.__kwdefaults__ or {}),
        **{name: value for name, value in given.items() if value is not None},
    }


def _why_unfit(name: str, integrator: Integrator, header: Header, num_classes: int) -> str | None:
    """Why the integrator cannot predict with this posterior; None where it can."""
    posterior_type = type_of(header)
    if not has_attribute("posteriors", posterior_type, integrator.needs):
        return f"\0integrator\0 {variant(name, settings_of(integrator))} does not work for {with_article(posterior_type)} posterior ({header.path.stem})"
    if posterior_type == "samples" and integrator.needs == "center" and header.meta.get("layers") is not None:
        why = "draws over other layers may come from several modes, and their mean is not a useful network"
        return f"\0integrator\0 {name} does not work for {header.path.stem}: {why}"
    is_exclusive = has_exclusive_classes(recorded_name(header.meta))
    if not does_classes(integrator, num_classes, is_exclusive=is_exclusive):
        if not is_exclusive:
            return f"\0integrator\0 {name} {NO_LABELS}"
        return f"\0integrator\0 {name} supports at most {integrator.max_classes} classes; got {num_classes}"
    return None


def _refusal(why: str, header: Header, num_classes: int) -> UsageError:
    every = {name: load_integrator(name) for name in names("integrators")}
    fitting = [name for name, one in every.items() if _why_unfit(name, one, header, num_classes) is None]
    return UsageError(
        why,
        hint=f"integrators for {with_article(type_of(header))} posterior: {', '.join(fitting)}",
        code="unsupported_integrator",
    )


def _listed(chosen: Iterable[str]) -> str:
    """mc has; mc and probit have."""
    found = list(chosen)
    return f"{' and '.join(found)} {'has' if len(found) == 1 else 'have'}"
