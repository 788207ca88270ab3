"""The list of recipes: what each is, what it needs, how long it takes, and whether it can run with what was given."""

from __future__ import annotations

from typing import Any

from bnncli.session.run import Table
from bnncli.stages.reproduce.places import Places
from bnncli.stages.reproduce.reader import read_recipe, read_study, recipe_names
from bnncli.stages.reproduce.recipe import PaperRecipe


def listed(places: Places, scale: str) -> list[dict[str, Any]]:
    """An entry for each recipe, in the order of their names."""
    return [_entry(read_recipe(name), places, scale) for name in recipe_names()]


def _entry(recipe: PaperRecipe, places: Places, scale: str) -> dict[str, Any]:
    studies = [read_study(name) for name in recipe.studies]
    parts = [
        *([(recipe.needs[scale], recipe.seconds)] if recipe.experiment else []),
        *((one.needs[scale], one.seconds) for one in studies),
    ]
    files = dict.fromkeys(file for needs, _ in parts for file in needs.required.values())
    optional = dict.fromkeys(file for needs, _ in parts for file in needs.optional.values())
    missing = [places.missing_each(needs.required.values()) for needs, _ in parts]
    times = [seconds.get(scale) for (_, seconds), lacks in zip(parts, missing, strict=True) if not lacks]
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "source": {"work": recipe.work, "where": recipe.where},
        "studies": list(recipe.studies),
        "needs": list(files),
        "optional": list(optional),
        "seconds": None if None in times or not times else sum(one for one in times if one is not None),
        "can_run": not all(missing),
        "missing": list(dict.fromkeys(one for part in missing for one in part)),
    }


def table_of(entries: list[dict[str, Any]], scale: str) -> Table:
    """The list for people; files that are missing stand below it, each once."""
    rows = []
    for one in entries:
        can = "yes" if one["can_run"] and not one["missing"] else "in part" if one["can_run"] else "no"
        seconds = "" if not one["can_run"] else "not timed" if one["seconds"] is None else f"{one['seconds']:g}"
        rows.append([one["recipe"], one["title"], seconds, can])
    notes = [f"scale {scale}; seconds on two cores; a study that several recipes share runs once"]
    if missing := dict.fromkeys(file for one in entries for file in one["missing"]):
        notes += [
            "missing files (recipes that need them cannot run, or run in part):",
            *(f"  {file}" for file in missing),
        ]
    notes.append(
        "next: bnncli reproduce RECIPE (or a paper, such as refinement), or --all; add --data DIR and "
        "--checkpoints DIR for files they need"
    )
    return Table(["recipe", "what", "seconds", "can run"], rows, notes=notes)
