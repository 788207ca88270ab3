"""A recipe and its study on a small head of random features: every kind of cell, claim and figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bnncli.papers.numbers import require_all
from bnncli.papers.recipe import (
    Claim,
    Files,
    Grid,
    LineFigure,
    PaperRecipe,
    Published,
    PublishedWork,
    Results,
    Row,
    Step,
    Study,
    column,
    needs,
    step,
    study,
)

Recipes = Callable[..., None]  # the fixture `recipes`
FILES = {
    "data/features.npz": "features of a small head",
    "data/other.npz": "other features",
    "data/more.npz": "more features",
}
TABLE = "test/table-1"
WORK = PublishedWork("test", "A test")


def steps_of(
    files: Files, *, precision: float = 3, posteriors: tuple[str, ...] = ("map", "{g}"), more: tuple[Step, ...] = ()
) -> list[Step]:
    return [
        step("extract-features", from_npz=str(files["arrays"]), ood=["far"]),
        step("fit-laplace", "g", structure="kron", prior_precision=precision),
        *more,
        step("predict", posterior=list(posteriors), split="test"),
        step("evaluate", bootstrap=50),
    ]


def small_study(name: str = "small", *, required: Mapping[str, str] | None = None, **changed: Any) -> Study:
    """The study; changed are arguments of steps_of."""

    @study(
        name,
        "a small head",
        seconds=1,
        quick=needs({"arrays": "data/features.npz"}, required or {}, optional={"more": "data/more.npz"}),
        paper=needs(arrays="data/other.npz"),
    )
    def made(scale: str, files: Files) -> Grid:
        return ["one", "two"] if scale == "quick" else ["one"], steps_of(files, **changed)

    return made


def small_recipe(
    name: str = "table-1",
    *,
    title: str = "a table",
    study: Study | None = None,
    published: Published = (100.0, 0.1),
    more: tuple[Row, ...] = (),
    **claimed: Any,
) -> PaperRecipe:
    """The recipe. published: number of its first cell; more: rows; claimed: fields of its second claim."""
    small = SMALL if study is None else study

    @WORK.recipe(name, title=title, where="table 1", studies=(small,))
    def made(results: Results) -> Iterator[Row]:
        nll = results.evaluate("nll", small, {"name": "nll"}, {"map": "map.plug-in", "g": "g.mc"})
        shared: dict[str, Any] = {"tolerance": 0.1, "because": "other data"}
        zero = f"{nll['g']} - {nll['g']}"
        yield from column("NLL", [("network", published, nll["map"])], **shared, count=5)
        yield from column(
            "NLL", [("both", 0.0, (zero, nll["g"])), ("elsewhere", 1.0, None)], **shared, why="it takes a telescope"
        )
        yield from column("NLL", [("more", 1.0, nll["g"])], **shared, needs=("more",))
        yield from column("NLL", [("not at quick", 1.0, nll["g"])], **shared, not_at={"quick": "other units"})
        yield Claim("positive", "NLL is positive.", require_all("nll_{} > 0", "map", "g"), "section 1")
        yield Claim("negative", "NLL is below minus one.", "nll_map < -1", "section 1", **claimed)
        yield LineFigure("lines", "NLL", (0, 1), "number", "NLL", {"both": [nll["map"], nll["g"]]})
        yield from more

    return made


SMALL, OTHER = small_study(), small_study("other", precision=5)
FIRST, SECOND = small_recipe(), small_recipe("table-2", title="another table", study=OTHER)
