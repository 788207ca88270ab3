"""Which structure fit-laplace fits: what fits in memory and is quick, then what predicts best on val; and what others would cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.inference import memory
from bnncli.inference.memory import NUM_DRAWS, QUICK_SECONDS, SEARCH_FITS, SEARCH_MODES, fit_seconds
from bnncli.inference.prior_search import search_size
from bnncli.parameters.layouts import MatrixLayout
from bnncli.session.run import Run
from bnncli.system.devices import speed_of
from bnncli.system.memory import budget, bytes_text

if TYPE_CHECKING:
    from bnncli.inference.prior_search import PriorSearch
    from bnncli.targets.target import CurvedTarget

_DEARER = 8  # times, that a search by the structure to fit has to take longer than by a rougher one to be made around that one's result


def structure_to_fit(
    wanted: str,
    layout: MatrixLayout,
    run: Run,
    *,
    num_examples: int,
    is_search: bool,
    whole: MatrixLayout | None = None,
) -> str:
    """The structure to fit first. Raises DeviceError when it does not fit in memory, naming the largest that does.

    Args:
        wanted: as asked for.
        layout: of what is fitted; `whole` of all of theta, where that is the span of the features.
        is_search: whether the prior precision is searched for.
    """
    sizes: dict[str, Any] = {"num_draws": NUM_DRAWS, "whole": whole}
    chosen = wanted
    if wanted == "auto":
        chosen = memory.automatic_structure(layout, budget(run.device_name), device=run.device_name, **sizes)
        if chosen != memory.structures()[0]:
            text = structure_text(run, chosen, layout, num_examples=num_examples, is_search=is_search, sizes=sizes)
            run.console.warn(text)
    memory.require_fit(chosen, layout, run.device_name, **sizes)
    return chosen


def structure_to_search(run: Run, structure: str, layout: MatrixLayout) -> str:
    """The structure by which the prior precision is searched for: the one to fit, or a quicker one, which is said.

    A search makes ten Gaussians or more: where the one to fit is none that fit-laplace would take of itself for its time, the
    precision is that which val prefers for the closest that is, and the structure asked for is made once, there.
    """
    quick = memory.automatic_structures(layout, budget(run.device), device=run.device, num_draws=NUM_DRAWS)
    if structure in quick or not quick or structure not in memory.structures()[: memory.structures().index(quick[0])]:
        return structure
    run.console.info(
        f"searching for the prior precision with {quick[0]}: ten {structure} covariances of "
        f"{layout.num_params:,} parameters would take long"
    )
    return quick[0]


def rough_structure_to_search(run: Run, structure: str, layout: MatrixLayout, *, num_examples: int) -> str:
    """The structure by which the prior precision is searched for first, where val chooses the structure too: the quickest, if that pays.

    A search makes ten Gaussians or more, and those of the structure that is fitted may take many times as long as rougher ones: 30 s of two
    times 16 full covariances of 2,570 parameters, of Kronecker factors 2 s.
    """
    quick = memory.automatic_structures(layout, budget(run.device), device=run.device, num_draws=NUM_DRAWS)
    if structure not in quick:
        return structure
    speed = speed_of(run.device)
    counts = {"num_fits": SEARCH_FITS, "num_modes": SEARCH_MODES}
    seconds = {
        name: fit_seconds(name, layout, num_examples=num_examples, speed=speed, **counts)
        for name in quick[quick.index(structure) :]
        if name != "diag"  # whose draws predict so badly that it may prefer a precision of its own
    }
    rough = min(seconds, key=lambda name: seconds[name])
    is_dear = seconds[structure] > QUICK_SECONDS and seconds[structure] > _DEARER * seconds[rough]
    return rough if is_dear else structure


def structure_by_val(
    run: Run,
    target: CurvedTarget,
    found: PriorSearch,
    search_at: Callable[..., PriorSearch],
    *,
    closest: str,
    layout: MatrixLayout,
    whole: MatrixLayout | None,
) -> tuple[PriorSearch, dict[str, float] | None]:
    """The search of the structure to take, and the val NLL of each that is quick, where val chooses among several.

    The exact one is taken wherever it is quick, whatever val says; val chooses among rougher ones.

    Args:
        found: of the closest structure, or of a rougher one.
        search_at: searches for the precision of another, from structure, start and generator, and around another's where that is given.
        closest: the structure that says most of the posterior.
        layout, whole: as for structure_to_fit.
    """
    from bnncli.inference.prior_search import choose_structure

    gaussian = found.fit.gaussian
    first = gaussian.covariance.structure
    quick = memory.automatic_structures(layout, budget(run.device), device=run.device, num_draws=NUM_DRAWS, whole=whole)
    if whole is not None:  # a diagonal in the basis of the span, say, is none of theta's
        quick = [name for name in quick if registry.declared("curvature", name, "is_same_in_span")]
    others = quick[quick.index(closest) :] if closest in quick else []
    if others and closest in registry.declaring("curvature", "is_exact"):
        if first != closest:
            around, start = found.best, gaussian.mean
            generator = run.stream("fit-laplace/val")
            found = search_at(structure=closest, start=start, generator=generator, around=around)
        return found, None
    if len(others) < 2:
        return found, None
    choice = choose_structure(target.with_prior(gaussian.require_prior()), found.fit, others, judge=found.judge)
    if choice.structure != first:
        is_closer = others.index(choice.structure) < others.index(first)
        again = search_at(
            structure=choice.structure,
            start=gaussian.mean,
            generator=run.stream("fit-laplace/val"),
            around=found.best if is_closer else None,
        )
        if is_closer or dict(again.curve)[again.best] < dict(found.curve)[found.best]:
            found = again
    return found, choice.nll


def structure_text(
    run: Run, chosen: str, layout: MatrixLayout, *, num_examples: int, is_search: bool, sizes: Mapping[str, Any]
) -> str:
    """That `chosen` was taken in place of what says more of the posterior, what each would cost, and which do not fit."""
    there = budget(run.device_name)
    closer = memory.structures()[: memory.structures().index(chosen)]
    fitting = [name for name in closer if memory.fit_bytes(name, layout, **sizes) <= there]
    too_large = [name for name in closer if name not in fitting]

    searched = search_size(
        num_examples, num_params=layout.num_params, num_outputs=layout.num_outputs, device=run.device
    )

    def cost(name: str) -> str:
        needed = bytes_text(memory.fit_bytes(name, layout, **sizes))
        speed = speed_of(run.device)
        seconds = fit_seconds(name, layout, num_examples=num_examples, speed=speed)
        if is_search:
            counts = {"num_fits": SEARCH_FITS - 1, "num_modes": SEARCH_MODES - 1}
            seconds += fit_seconds(name, layout, num_examples=searched, speed=speed, **counts)
        return f"about {needed} and {seconds_text(seconds)}"

    text = f"using {chosen} for {layout.num_params:,} parameters ({cost(chosen)})"
    if fitting:
        text += "; closer to the posterior: " + ", ".join(f"--structure {name} ({cost(name)})" for name in fitting)
    if too_large:
        needed = ", ".join(f"{name} needs {bytes_text(memory.fit_bytes(name, layout, **sizes))}" for name in too_large)
        text += f"; {needed}, but only {bytes_text(there)} can be used"
    return text


def seconds_text(seconds: float) -> str:
    """A time for people, as roughly as it is known."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(1.0, seconds):.0f} s"
