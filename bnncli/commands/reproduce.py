"""reproduce: run published experiments and compare their numbers with ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import check_writable
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import CheckFailed, Interrupted, UsageError
from bnncli.names import count_noun
from bnncli.options.command import Argument, Command, CommandLine, CommonOptions, ComputeOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.papers import BOTH, PUBLISHED, RIGHT, SCALES
from bnncli.session.run import Result, Run, Table
from bnncli.system import workers as team
from bnncli.system.devices import count_cores, share_threads

if TYPE_CHECKING:
    from bnncli.papers.recipe import PaperRecipe, Part
    from bnncli.papers.results import Outcome
    from bnncli.papers.runner import Places, Workshop


@dataclass(frozen=True)
class ReproduceOptions(CheckedOptions):
    """Options of reproduce."""

    all: bool = option(False, "Run every recipe.")
    data: str | None = option(None, "Folder with the data sets, named as in the list.", metavar="DIR")
    checkpoints: str | None = option(None, "Folder with the checkpoints.", metavar="DIR")
    scale: str = option(
        "quick",
        "Scale to run at: quick is the smallest case that shows the effect, at most two minutes on two cores; "
        "paper is the published setting.",
        choices=SCALES,
    )
    definitions: str = option(
        BOTH,
        "What to do if published code and text differ: follow the published definition, follow the right one, "
        "or report both.",
        choices=(PUBLISHED, RIGHT, BOTH),
        is_rare=True,
    )
    jobs: int | None = option(
        None,
        "Number of experiments to run in parallel. Default: one per core, at most four; one on a GPU.",
        minimum=1,
        maximum=1024,
    )
    out: str = option(
        "bnncli-reproduce", "Folder for runs, results and figures.", short="-o", metavar="DIR", writes=True
    )
    force: bool = option(
        False,
        "Repeat finished work. Otherwise unchanged results are reused.",
        short="-f",
    )
    strict: bool = option(False, "Exit 3 if a number differs from the published one, or a claim fails.")


COMMAND = Command(
    "Run published experiments and compare their numbers with ours.",
    "RECIPE is a name, a paper (refinement) or a pattern ('refinement/table-*'); without it, lists the recipes. "
    "Runs each recipe in --out and reports whether its numbers match the published ones. If interrupted, run it "
    "again to resume. Writes results.json, results.md and figures.",
    (ReproduceOptions, ComputeOptions, CommonOptions),
    (
        "bnncli reproduce",
        "bnncli reproduce refinement/figure-2",
        "bnncli reproduce refinement/table-3 --data DIR --checkpoints DIR --scale paper",
        "bnncli reproduce --all",
        "bnncli reproduce --all --jobs 2",
    ),
    (Argument("recipe", "A recipe, a paper or a pattern. Default: list the recipes.", is_optional=True),),
    section="Research",
    place=10,
)


_WAIT = 1.0  # seconds: a step that was just killed may hold the lock a moment longer
_HELD = ("another bnncli reproduce is writing to this folder", "wait for it to end, or choose another --out")


def execute(run: Run, options: ReproduceOptions) -> Result:
    """List the recipes, or run the named ones."""
    from bnncli.papers.recipe import recipe_names
    from bnncli.papers.runner import Places

    asked = run.arguments["recipe"]
    places = Places.of(options)
    if asked is None and not options.all:
        if said := [f"--{name}" for name in ("strict", "force") if getattr(options, name)]:
            raise UsageError(f"{' and '.join(said)}: expected a recipe to run; got none", hint="bnncli reproduce --all")
        return _list(places, options.scale)
    if asked is not None and options.all:
        raise UsageError(f"--all runs every recipe, but {asked!r} names only some: give one of the two")
    workers = team.rank_and_size()
    if workers is not None and workers[1] > 1:
        raise UsageError(
            f"reproduce does not run under torchrun, which started {workers[1]} copies of it: start it without "
            "torchrun",
            hint="to use several devices, run bnncli grid on a study's grid.toml in --out",
        )
    names = recipe_names() if asked is None else _select_recipes(asked)
    folder = Path(options.out)
    for place in (folder, folder / options.scale, *(folder / options.scale / name for name in ("studies", *names))):
        check_writable(place, hint="choose another place with --out")
    run.require_device()
    with artifact_lock(folder / ".lock", wait=_WAIT, poll=run.console.poll, held=_HELD):
        try:
            return _reproduce(run, options, places, names)
        except Interrupted as error:
            error.hint = f"continue with: {run.line.having('force', False).pasted()}"
            raise


def _list(places: Places, scale: str) -> Result:
    """List each recipe, how long it takes, and whether it can run; each missing file stands below, once."""
    from bnncli.papers.recipe import find_recipe, recipe_names

    entries = [_entry(find_recipe(name), places, scale) for name in recipe_names()]
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
    table = Table(["recipe", "what", "seconds", "can run"], rows, notes=notes)
    return Result(extra={"scale": scale, "recipes": entries}, tables=[table])


def _entry(recipe: PaperRecipe, places: Places, scale: str) -> dict[str, Any]:
    sources: list[Part] = [*([recipe] if recipe.experiment else []), *recipe.studies]
    missing = [places.missing_each(one.needs[scale].required.values()) for one in sources]
    times = [one.seconds.get(scale) for one, lacks in zip(sources, missing, strict=True) if not lacks]
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "source": {"work": recipe.work, "where": recipe.where},
        "studies": [study.name for study in recipe.studies],
        "needs": list(dict.fromkeys(file for one in sources for file in one.needs[scale].required.values())),
        "optional": list(dict.fromkeys(file for one in sources for file in one.needs[scale].optional.values())),
        "seconds": None if None in times or not times else sum(one for one in times if one is not None),
        "can_run": not all(missing),
        "missing": list(dict.fromkeys(one for part in missing for one in part)),
    }


def _select_recipes(asked: str) -> list[str]:
    """Return the recipes that a name, a work or a pattern means. Raises UsageError if it means none."""
    from bnncli.papers.recipe import find_recipe, recipe_names

    names = recipe_names()
    found = [name for name in names if asked in (name, name.partition("/")[0]) or fnmatchcase(name, asked)]
    if found or not any(mark in asked for mark in "*?["):
        return found or [find_recipe(asked).name]
    near = get_close_matches(asked, names, n=3, cutoff=0.4)
    said = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise UsageError(f"no recipe matches {asked!r}{said}", hint="bnncli reproduce")


def _reproduce(run: Run, options: ReproduceOptions, places: Places, names: list[str]) -> Result:
    """Run the recipes. Each is written as soon as its parts are complete."""
    from bnncli.papers.recipe import find_recipe
    from bnncli.papers.runner import Workshop

    workshop = Workshop(run, options, places, Path(options.out) / options.scale)
    recipes = {name: find_recipe(name).parts for name in names}
    parts = dict.fromkeys(part for own in recipes.values() for part in own)
    ready = [part for part in parts if not workshop.missing(part)]
    jobs = min(_jobs(run, options), len(ready))
    if jobs < 2:
        return _write(run, options, workshop, names, finished=_make_in_turn(workshop, recipes))
    from bnncli.papers.jobs import open_job_pool
    from bnncli.system.devices import configure_torch, keep_settings

    given = run.compute.threads
    threads = share_threads(jobs) if given is None else {}
    for part in parts:
        if part not in ready:
            workshop.make(part)  # which says at once what is missing
    with keep_settings(), open_job_pool(workshop, ready, jobs=jobs, environment=threads) as workers:
        configure_torch(threads=next(map(int, threads.values()), given), deterministic=run.compute.deterministic)
        return _write(run, options, workshop, names, finished=workers.finished(recipes))


_MOST_JOBS = 4  # by default: the longest part takes a fifth of all, and each process has a PyTorch of its own


def _jobs(run: Run, options: ReproduceOptions) -> int:
    """Return how many parts are made in parallel, at most."""
    if options.jobs is not None:
        return options.jobs
    return min(_MOST_JOBS, max(1, count_cores() // (run.compute.threads or 1))) if run.device_name == "cpu" else 1


def _write(
    run: Run, options: ReproduceOptions, workshop: Workshop, names: list[str], *, finished: Iterator[str]
) -> Result:
    """Judge and write each recipe as it finishes; the result has them in their own order."""
    from bnncli.papers.recipe import find_recipe
    from bnncli.papers.results import judge_recipe, write_index, write_outcome

    folder = workshop.folder
    plain = run.line.having("force", False).having("jobs", None)  # without what changes no result
    found: dict[str, tuple[Outcome, dict[str, Any], list[Path]]] = {}
    for name in finished:
        outcome = judge_recipe(workshop, find_recipe(name))
        line = _build_line(plain, name)
        found[name] = outcome, *write_outcome(run, outcome, folder / name, scale=options.scale, line=line)
    outcomes, documents, files = (list(part) for part in zip(*(found[name] for name in names), strict=True))
    paths = [path for own in files for path in own]
    if len(names) > 1:
        commands = [one["command"] for one in documents]
        write_index(outcomes, commands, folder / "results.md", scale=options.scale, line=plain.pasted())
        paths.insert(0, folder / "results.md")
    return _result(options, outcomes, documents, paths)


def _build_line(plain: CommandLine, name: str) -> str:
    """Return the command that makes one recipe, with the other options as they were given."""
    line = plain.having("all", False)
    parts = tuple(part for part in line.parts if part[0] is not None)
    return replace(line, parts=((None, name), *parts)).pasted()


def _result(
    options: ReproduceOptions, outcomes: list[Outcome], documents: list[dict[str, Any]], paths: list[Path]
) -> Result:
    from bnncli.papers.results import build_tables

    tables = build_tables(outcomes)
    tables[-1] = replace(tables[-1], notes=[*tables[-1].notes, f"written: {paths[0]}"])
    differ = [f"{one.recipe.name}: {name}" for one in outcomes for name in one.differs]
    failed = [text for one in outcomes for text in one.failed]
    lacking = [
        f"{one.recipe.name}: cannot run here: {one.lacking}" for one in outcomes if not one.did_run and one.lacking
    ]
    result = Result(
        action="computed",
        outputs=[{"role": "reproduce.results", "path": str(path)} for path in paths],
        extra={"scale": options.scale, "recipes": documents},
        tables=tables,
        summary=[*lacking, *([f"{count_noun(len(failed), 'line')} failed; see the results"] if failed else [])],
    )
    if options.strict and differ:
        said = f"{count_noun(len(differ), 'number or claim') if len(differ) == 1 else f'{len(differ)} numbers and claims'} differ from what was published"
        result.failure = CheckFailed(
            f"--strict: {said}: {', '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}", code="differs"
        )
    return result


def _make_in_turn(workshop: Workshop, recipes: Mapping[str, list[Part]]) -> Iterator[str]:
    """Make the parts one after the other; yield each recipe when its parts are made."""
    task = workshop.run.console.task("reproduce", len(recipes))
    for name, parts in recipes.items():
        for part in parts:
            if part not in workshop.made:
                workshop.make(part)
        yield name
        task.advance(note=name)
