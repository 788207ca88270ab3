"""What a published experiment declares, and what it reads, compares and shows.

A work (`refinement.py`, ...) has one function for each of its tables and figures. The decorator says what to run: studies, which are
grids of commands, and an experiment, which is Python. The function then says which numbers it reads and yields cells, claims and
figures, whose formulas are texts (`numbers.py`). Works are tables, a claim or a row of numbers in a line or two, which the formatter
leaves alone. They import neither torch nor matplotlib, so listing the recipes stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import UsageError
from bnncli.evaluation.comparison import Estimate
from bnncli.options.toml import closest
from bnncli.papers import PUBLISHED, RIGHT, SCALES

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORKS = tuple(f"bnncli.papers.{name}" for name in ("beyond", "bridge", "lbbnn", "refinement"))
Settings = Mapping[str, Any]  # of an experiment, at one scale
Files = Mapping[str, Path]  # by the names that a study or an experiment has for them
Step = dict[str, Any]  # of a grid: its command, its name and its options
Grid = tuple[list[str], list[Step]]  # checkpoints, and the steps that run on each

# What recipes need, by place and file name: --data DIR, --checkpoints DIR, or the fixtures of the package. Images are NPZ files with
# x, uint8 (N, 28, 28) or (N, 32, 32, 3), and y, int64 (N,), in the order in which they were published.
FILES = {
    "fixtures/lenet5-fmnist.pt": "LeNet-5 trained on 9,000 images of Fashion-MNIST",
    "fixtures/train.npz": "the 9,000 images of Fashion-MNIST that it was trained on",
    "fixtures/val.npz": "1,000 images of Fashion-MNIST's test set",
    "fixtures/test.npz": "2,000 other images of Fashion-MNIST's test set",
    "fixtures/mnist.npz": "1,000 images of MNIST's test set",
    "data/fmnist-train.npz": "Fashion-MNIST's training set, 60,000 images",
    "data/fmnist-test.npz": "Fashion-MNIST's test set, 10,000 images",
    "data/cifar10-train.npz": "CIFAR-10's training set, 50,000 images",
    "data/cifar10-test.npz": "CIFAR-10's test set, 10,000 images",
    "data/cifar10-train10k.npz": "10,000 random images of CIFAR-10's training set",
    "data/cifar10-test-hmc.npz": "class probabilities `hmc` (10000, 10) of each row of cifar10-test.npz by full-batch HMC over a ResNet-20-FRN (Izmailov et al. 2021, arXiv 2104.14421)",
    "data/cifar100-train.npz": "CIFAR-100's training set, 50,000 images",
    "data/cifar100-test.npz": "CIFAR-100's test set, 10,000 images",
    "data/cifar100-test5k.npz": "5,000 images of CIFAR-100's test set",
    "data/mnist-train.npz": "MNIST's training set, 60,000 images",
    "data/kmnist-train.npz": "Kuzushiji-MNIST's training set, 60,000 images",
    "data/notmnist-test.npz": "notMNIST, 28 x 28 letters, 10,000 images",
    "data/mnist-test.npz": "MNIST's test set, 10,000 images",
    "data/kmnist-test.npz": "Kuzushiji-MNIST's test set, 10,000 images",
    "data/emnist-digits-test.npz": "the test set of EMNIST's digits, 40,000 images",
    "data/svhn-test.npz": "SVHN's test set of cropped digits, 26,032 images",
    "data/lsun-val.npz": "LSUN's 300 classrooms for validation, 32 x 32",
    "data/reviews-train.csv": "movie reviews, columns text and label, 0 bad and 1 good, in random order",
    "data/reviews-test.csv": "others of the same, 4,000 or more",
    "data/sim3-X.txt": "the 20 columns of the simulated logistic data with multiple modes, example 3 of github.com/aliaksah/EMJMCMC2016, 2,000 lines",
    "data/sim3-Y.txt": "the response of the same",
    "checkpoints/lenet-fmnist-1.pt": "a state dict of --model lenet5, trained on Fashion-MNIST for 100 epochs by Adam, 1e-3, weight decay 5e-4",
    "checkpoints/lenet-fmnist-2.pt": "the same of another seed",
    "checkpoints/lenet-fmnist-3.pt": "the same of a third seed",
    "checkpoints/mlp10-fmnist.safetensors": "an MLP 784-10-10 trained on the first 1,000 of the 9,000 images: bnncli train mlp10-fmnist.safetensors --model mlp --model-arg inputs=784 --model-arg hidden=10 --weight-decay 0.03 --data train=npz:fixtures/train.npz@1000",
    "checkpoints/mlp-fmnist.safetensors": "an MLP 784-50-10 trained on Fashion-MNIST: bnncli train mlp-fmnist.safetensors --recipe mlp-fmnist --data train=npz:fmnist-train.npz",
    "checkpoints/minilm-reviews": "a folder of save_pretrained: all-MiniLM-L6-v2 with a classifier of two classes that was trained on reviews-train.csv; needs bnncli[hf]",
    "checkpoints/wrn16-4-cifar10.pt": "a WideResNet-16-4 trained on CIFAR-10, a state dict of --model wide-resnet",
    "checkpoints/wrn16-4-cifar100.pt": "a WideResNet-16-4 trained on CIFAR-100, a state dict of --model wide-resnet",
    "checkpoints/resnet20-12fca82f.th": "a public ResNet-20 trained on CIFAR-10 (github.com/akamaster/pytorch_resnet_cifar10), of inputs normalised by 0.485,0.456,0.406 and 0.229,0.224,0.225",
}


@dataclass(frozen=True)
class Needs:
    """Files by the names that a study or an experiment has for them, each a key of FILES; what refers to a missing optional one is left out."""

    required: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)


def needs(*required: Mapping[str, str], optional: Mapping[str, str] | None = None, **more: str) -> Needs:
    """Name the files that one scale needs."""
    return Needs({name: file for part in (*required, more) for name, file in part.items()}, optional or {})


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """What runs once, also if several recipes read it.

    Args:
        declared: the function that declares it.
        seconds: by scale, about, on two cores; only of scales that were timed.
        needs: by scale.
        reads: files of studies that it reads, by its names for them: study/file.
    """

    name: str
    title: str
    declared: Callable[..., Any]
    seconds: Mapping[str, float]
    needs: Mapping[str, Needs]
    reads: Mapping[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., Part], tuple[str, str]]:
        return _import_part, (self.declared.__module__, self.name)

    @property
    def after(self) -> set[str]:
        """Names of the studies whose files it reads."""
        return {file.partition("/")[0] for file in self.reads.values()}


def _import_part(module: str, name: str) -> Part:
    """Return a study or recipe of a module by its name. Pickles hold the name, as decorated functions cannot be pickled."""
    return next(one for one in vars(import_module(module)).values() if isinstance(one, Part) and one.name == name)


@dataclass(frozen=True, eq=False, kw_only=True)
class Study(Part):
    """Commands on checkpoints, whose results several recipes read.

    Args:
        declared: from the scale and the files, among them the study's `folder` and its prepared `arrays`, to a grid.
        prepare: from the scale and the files to arrays of an NPZ file that the steps read.
    """

    declared: Callable[[str, Files], Grid]
    prepare: Callable[[str, Files], Mapping[str, NDArray[Any]]] | None = None


def study(
    name: str, title: str, *, quick: Needs, paper: Needs, seconds: float | None = None, **more: Any
) -> Callable[[Callable[[str, Files], Grid]], Study]:
    """Make a study of a function from the scale and the files to a grid; seconds are those at quick."""
    times = {} if seconds is None else {"quick": seconds}
    by_scale = {"quick": quick, "paper": paper}
    return lambda steps: Study(name=name, title=title, declared=steps, seconds=times, needs=by_scale, **more)


def step(command: str, name: str | None = None, **options: Any) -> Step:
    """Return one step of a grid. Options are written with underscores; None leaves an option at its default."""
    found = {"name": name, "command": command, **options}
    return {key.replace("_", "-"): value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Measurements:
    """What an experiment measures: values by name, and arrays that are drawn, by name."""

    values: Mapping[str, Estimate]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """What no command can express: a module beside this one, with measure_NAME and, if it has figures, draw_NAME.

    `measure_NAME(settings, files, generator=, progress=)` returns Measurements from these alone, on the CPU;
    `draw_NAME(measured, settings)` returns figures by the names of their files.
    """

    module: str
    name: str

    def find(self, verb: str) -> Any:
        """Return the function `measure_NAME` or `draw_NAME`; None if the module has none."""
        return getattr(import_module(f"bnncli.papers.{self.module}"), f"{verb}_{self.name.replace('-', '_')}", None)


@dataclass(frozen=True)
class Cell:
    """One published number.

    Args:
        tolerance: how far ours may be off for known reasons (`because`), in the number's unit.
        formulas: ours, by definition (published, right, or empty if there is one); empty, with the reason, if it is `unavailable`.
        needs: optional files that it takes.
        not_at: scales at which ours is of something else and is shown without a verdict, each with the reason.
    """

    row: str
    column: str
    published: Estimate
    tolerance: float
    because: str
    formulas: Mapping[str, str]
    unavailable: str | None = None
    needs: tuple[str, ...] = ()
    not_at: Mapping[str, str] = field(default_factory=dict)


Published = float | tuple[float, float]  # a number, or one with its standard error
Ours = str | tuple[str, str] | None  # a formula, those by the published and by the right definition, or none


def column(
    name: str,
    cells: Iterable[tuple[str, Published, Ours]],
    *,
    tolerance: float,
    because: str,
    count: int = 0,
    why: str = "",
    needs: tuple[str, ...] = (),
    not_at: Mapping[str, str] | None = None,
) -> Iterator[Cell]:
    """Yield the cells of a column, each given by its row, the published number, and ours.

    Args:
        count: seeds behind each published standard error.
        why: there is no formula for some cells.
    """
    for row, published, ours in cells:
        value, error = published if isinstance(published, tuple) else (published, None)
        estimate = Estimate(float(value), None if error is None else float(error), count if error else 0)
        definitions = ("",) if isinstance(ours, str) else (PUBLISHED, RIGHT)
        formulas = dict(zip(definitions, (ours,) if isinstance(ours, str) else ours or (), strict=False))
        unavailable = why if ours is None else None
        yield Cell(row, name, estimate, float(tolerance), because, formulas, unavailable, needs, not_at or {})


@dataclass(frozen=True)
class Claim:
    """One statement of the text, in our words, which holds if the rule does; `where` is "ours" if the text does not say so.

    `not_at` and `needs` are those of Cell.
    """

    name: str
    text: str
    rule: str
    where: str = "ours"
    not_at: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LineFigure:
    """Measured numbers against x, a line of formulas for each name. log: axes that are logarithmic: x, y or xy."""

    name: str
    title: str
    x: Sequence[float]
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[str]]
    log: str = ""


@dataclass(frozen=True)
class MarginalFigure:
    """Densities of single weights by posteriors of the study's first checkpoint, by what they are called; the first is the reference."""

    name: str
    study: Study
    posteriors: Mapping[str, str]


Row = Cell | Claim | LineFigure | MarginalFigure
Place = tuple[str | Mapping[str, str], ...]  # in a document: keys, and conditions that one entry of a list meets


@dataclass(frozen=True)
class Reading:
    """Where the document of a step has a number.

    Args:
        entry: the object that has it. value, error, count: keys in it, of the number, its standard error, and how many values are
            behind that; None if the document has none.
        called: its name in the `correlations` of other scores of the same examples; empty if there are none.
        trials: step and place of the number of trials, if this is a share with a binomial standard error.
    """

    study: Study
    step: str
    entry: Place
    value: str = "value"
    error: str | None = "standard_error"
    count: str | None = None
    called: str = ""
    trials: tuple[str, Place] | None = None


class Results:
    """The numbers of studies that a recipe's function reads, by name."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}

    def read(self, name: str, study: Study, step: str, entry: Place, **keys: Any) -> str:
        """Read one number of a study, and return its name. keys: of Reading."""
        self.readings[name] = Reading(study, step, entry, **keys)
        return name

    def compare(
        self, name: str, study: Study, score: str, rows: Mapping[str, str], *, step: str = "compare"
    ) -> dict[str, str]:
        """Read a score of several predictions with its correlations, as NAME_KEY for each key of `rows`."""
        places = {row: ("rows", {"name": row}, "scores", {"form": score}) for row in rows.values()}
        return {key: self.read(f"{name}_{key}", study, step, places[row], called=row) for key, row in rows.items()}

    def evaluate(
        self, name: str, study: Study, metric: Mapping[str, str] | str, rows: Mapping[str, str], *, split: str = "test",
        **keys: Any,
    ) -> dict[str, str]:  # fmt: skip
        """Read a metric, given by its name or by that and its choices, as NAME_KEY for each key of `rows`. keys: of Reading."""
        chosen = {"name": metric} if isinstance(metric, str) else metric
        places = {key: ("rows", {"name": row, "split": split}, "metrics", chosen) for key, row in rows.items()}
        return {key: self.read(f"{name}_{key}", study, "evaluate", place, **keys) for key, place in places.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class PaperRecipe(Part):
    """One table or figure.

    Args:
        name: work/name. work: as it is cited. where: in it.
        declared: reads results and yields what is judged and shown.
        note: what a reader of the results must know.
        settings, needs, seconds: of the experiment, by scale.
    """

    work: str
    where: str
    declared: Callable[[Results], Iterator[Row]]
    note: str = ""
    studies: tuple[Study, ...] = ()
    experiment: Experiment | None = None
    settings: Mapping[str, Settings] = field(default_factory=dict)
    needs: Mapping[str, Needs] = field(default_factory=lambda: dict.fromkeys(SCALES, Needs()))
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> list[Part]:
        """Its studies and, if it has an experiment, itself: none reads what a later one writes."""
        return [*self.studies, *([self] if self.experiment else [])]


@dataclass(frozen=True)
class PublishedWork:
    """A published work: the name of its recipes before the slash, and how results cite it."""

    name: str
    cited: str

    def recipe(
        self, name: str, *, settings: Settings | None = None, quick: Settings | None = None, paper: Settings | None = None,
        seconds: tuple[float, ...] = (), **declared: Any,
    ) -> Callable[[Callable[[Results], Iterator[Row]]], PaperRecipe]:  # fmt: skip
        """Make the recipe of a table or figure of a function that reads results and yields rows.

        Args:
            settings: of the experiment, at both scales; quick, paper: more of them, at one.
            seconds: of the experiment, at quick and paper.
            declared: fields of PaperRecipe.
        """
        by_scale = {
            scale: {**(settings or {}), **(own or {})} for scale, own in zip(SCALES, (quick, paper), strict=True)
        }
        declared |= {"name": f"{self.name}/{name}", "work": self.cited, "settings": by_scale}
        return lambda rows: PaperRecipe(declared=rows, seconds=dict(zip(SCALES, seconds, strict=False)), **declared)


def recipe_names() -> list[str]:
    """Return all recipes as work/name, sorted by work and number."""
    return sorted(_recipes(), key=_by_number)


def find_recipe(name: str) -> PaperRecipe:
    """Return a recipe by work/name. Raises UsageError if there is none."""
    found = _recipes()
    if name not in found:
        raise UsageError(f"no recipe is called {name!r}{closest(name, list(found))}", hint="bnncli reproduce")
    return found[name]


def _recipes() -> dict[str, PaperRecipe]:
    modules = map(import_module, WORKS)
    return {one.name: one for module in modules for one in vars(module).values() if isinstance(one, PaperRecipe)}


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort table-2 before table-10."""
    return [(int(one) if one.isdecimal() else -1, one) for one in name.replace("/", "-").replace(".", "-").split("-")]
