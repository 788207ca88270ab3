"""What refine settles before the work: the flow's own choices for what was left open, and whether there is room for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from bnncli.artifacts.headers import Header
from bnncli.errors import UsageError
from bnncli.flows import Recipe, choose_recipe, choose_space, resolved_settings
from bnncli.flows._affine_sizes import num_elements
from bnncli.inference import memory
from bnncli.options.refine import RefineOptions
from bnncli.parameters.layouts import HeadLayout, MatrixLayout, vector_layout
from bnncli.parameters.module import ModuleLayout
from bnncli.registry import names
from bnncli.session.inputs import Split
from bnncli.session.run import Run
from bnncli.system.memory import budget, bytes_text

if TYPE_CHECKING:
    from bnncli.session.network_splits import NetworkReader

_OF_A_MATRIX = ("kron", "block")  # linear parts of affine flows, which a network's parameters together have not


@dataclass(frozen=True)
class Sizes:
    """What the work is about.

    Attributes:
        layout: of theta: of the last layer, in the row space where the base was fitted there, or of a network's parameters.
        acted: of what the layers act on: the same, or the coordinates along a subspace.
        num_examples: N.
    """

    layout: HeadLayout | ModuleLayout
    acted: MatrixLayout | ModuleLayout
    num_examples: int

    @classmethod
    def of(cls, layout: HeadLayout | ModuleLayout, num_directions: int | None, num_examples: int) -> Sizes:
        """Raises UsageError where theta has not so many directions."""
        if num_directions is None:
            return cls(layout, layout, num_examples)
        if num_directions > layout.num_params:
            raise UsageError(
                f"\0subspace\0: expected 1 to {layout.num_params} (the number of parameters); got {num_directions}"
            )
        return cls(layout, vector_layout(num_directions), num_examples)


def resolve(run: Run, options: RefineOptions, sizes: Sizes) -> RefineOptions:
    """The options with the flow's own choices in place of those that were left open.

    Raises:
        UsageError: the flow does not take what was given, or not here.
    """
    options = replace(options, flow=options.chosen_flow, elbo_draws=options.num_elbo_draws)
    options = _with_scale(run, options, sizes)
    settings = resolved_settings(options.chosen_flow, sizes.acted, **options.settings)
    recipe = _recipe(options)
    space = choose_space(options.chosen_flow, options.space)
    if options.subspace is not None and space != "whitened":
        raise UsageError(
            f"\0subspace\0 needs the base's whitened coordinates, but \0flow\0 {options.chosen_flow} acts in "
            f"{space} space here"
        )
    return replace(options, space=space, **recipe._asdict(), settings={**options.settings, **settings})


def _with_scale(run: Run, options: RefineOptions, sizes: Sizes) -> RefineOptions:
    """The options with the linear part of an affine flow where none was asked for: one that is there and fits in memory."""
    if options.chosen_flow != "affine":
        return options
    is_of_network = not options.is_last_layer and options.subspace is None
    scale = options.settings.get("scale")
    if is_of_network and scale in _OF_A_MATRIX:
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
        scale: training_bytes(options, sizes, length * num_elements(cast(MatrixLayout, sizes.acted), scale))
        for scale in ("kron", "low-rank")
    }
    there = budget(run.device_name)
    if needed["kron"] <= there or needed["low-rank"] >= needed["kron"]:
        return options
    run.console.warn(
        f"using --scale low-rank: --scale kron, the default, needs about {bytes_text(needed['kron'])} of memory, "
        f"but only {bytes_text(there)} can be used on {run.device_name}"
    )
    return replace(options, settings={**options.settings, "scale": "low-rank"})


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


def training_bytes(options: RefineOptions, sizes: Sizes, num_layer_params: int) -> int:
    """Bytes that the training takes with these options."""
    recipe = _recipe(options)
    batch_size = recipe.batch_size if recipe.batch_size < sizes.num_examples else 0
    plan = {"num_layer_params": num_layer_params, "num_draws": recipe.num_draws, "batch_size": batch_size}
    needed = memory.training_bytes(sizes.layout, **plan)
    return needed + (
        0 if options.subspace is None else memory.subspace_bytes(sizes.layout.num_params, options.subspace)
    )


def require_room(
    run: Run,
    options: RefineOptions,
    sizes: Sizes,
    base: Header,
    *,
    num_layer_params: int,
    whole: HeadLayout | None,
    base_bytes: int,
) -> None:
    """Pass when the work on a last layer has room; base_bytes: of the base's file. Raises DeviceError, naming what has, otherwise."""
    training = training_bytes(options, sizes, num_layer_params)
    known: dict[str, Any] = {"num_draws": options.num_elbo_draws, "training": training}
    structure = str(base.meta.get("structure"))
    if structure not in names("curvature"):
        known["elements"] = base_bytes // 4
    memory.require_refinement(structure, cast(HeadLayout, sizes.layout), run.device_name, whole=whole, **known)


def require_network_room(
    run: Run,
    options: RefineOptions,
    sizes: Sizes,
    reader: NetworkReader | None,
    *,
    splits: tuple[Split, Split | None],
    num_layer_params: int,
    base_bytes: int,
) -> int:
    """Bytes of memory that the work over a network's layers takes. Raises DeviceError where there is no room for it.

    Args:
        reader: of the network.
        splits: to train on, and to judge by.
        base_bytes: of the base's file; 0 for the prior.
    """
    from bnncli.inference.network_memory import NetworkDraws
    from bnncli.integrators.mc import Mc

    assert reader is not None
    train, val = splits
    held = 0 if val is None else len(val.content.features)
    with reader.recorded.visible():
        layout = reader.layout(train, options.layers)
        plan = NetworkDraws(layout, sizes.num_examples, held, base_bytes or 16 * layout.num_params)
        return plan.require_refinement(
            run.device,
            training=training_bytes(options, sizes, num_layer_params),
            num_drawn=_recipe(options).num_draws,
            num_judging=options.num_elbo_draws,
            num_predicting=Mc().default_for(layout.num_params, is_last_layer=False),
        )
