"""What a published experiment declares, and what it reads, compares and shows.

A work (`refinement.py`, ...) has one function for each of its tables and figures. The decorator says what to run: studies, which are
grids of commands, and an experiment, which is Python. When these have run, the function reads their numbers and yields
cells, claims and figures. Works import neither torch nor matplotlib, so listing the recipes stays fast.
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
from bnncli.papers.numbers import Formula, Replicates, Rule, Unmeasured
from bnncli.progress import Progress

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

WORKS = tuple(f"bnncli.papers.{name}" for name in ("beyond", "bridge", "lbbnn", "refinement", "refinement_figures"))
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
    """Files by the names that a study or an experiment has for them, each a key of FILES.

    Args:
        required: nothing runs without them.
        optional: what refers to a missing one is left out.
    """

    required: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)


def needs(*required: Mapping[str, str], optional: Mapping[str, str] | None = None, **more: str) -> Needs:
    """Name the files that one scale needs."""
    return Needs({name: file for part in (*required, more) for name, file in part.items()}, optional or {})


@dataclass(frozen=True, eq=False)
class Study:
    """Commands on checkpoints, whose results several recipes read.

    Args:
        steps: from the scale and the files to the checkpoints and the steps of a grid. The files include `folder`, the study's own,
            and `arrays`, if it prepares any.
        seconds: by scale, about, on two cores; only of scales that were timed.
        needs: by scale.
        prepare: from the scale and the files to arrays of an NPZ file that the steps read.
    """

    name: str
    title: str
    steps: Callable[[str, Files], Grid]
    seconds: Mapping[str, float]
    needs: Mapping[str, Needs]
    prepare: Callable[[str, Files], Mapping[str, NDArray[Any]]] | None = None

    def __reduce__(self) -> tuple[Callable[..., Study | PaperRecipe], tuple[str, str]]:
        return _import_part, (self.steps.__module__, self.name)


def study(
    name: str,
    title: str,
    *,
    quick: Needs,
    paper: Needs,
    seconds: Mapping[str, float] | None = None,
    prepare: Callable[[str, Files], Mapping[str, NDArray[Any]]] | None = None,
) -> Callable[[Callable[[str, Files], Grid]], Study]:
    """Make a study of a function from the scale and the files to a grid."""

    def make(steps: Callable[[str, Files], Grid]) -> Study:
        return Study(name, title, steps, seconds or {}, {"quick": quick, "paper": paper}, prepare)

    return make


def step(command: str, name: str | None = None, **options: Any) -> Step:
    """Return one step of a grid. Options are written with underscores; None leaves an option at its default."""
    found = {"name": name, "command": command, **options}
    return {key.replace("_", "-"): value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Measurements:
    """What an experiment measures.

    Args:
        values: by name.
        arrays: what is drawn, by name.
    """

    values: Mapping[str, Estimate]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """What no command can express: a module beside this one, with `measure_NAME` and, if it has figures, `draw_NAME`."""

    module: str
    name: str

    def measure(
        self, settings: Settings, files: Files, *, generator: torch.Generator, progress: Progress
    ) -> Measurements:
        """Measure from these settings and files alone, with randomness from the generator, on the CPU."""
        found: Measurements = self.find("measure")(settings, files, generator=generator, progress=progress)
        return found

    def draw(self, measured: Measurements, settings: Settings) -> dict[str, Figure]:
        """Draw the figures, by the names of their files."""
        draw = self.find("draw")
        return {} if draw is None else dict(draw(measured, settings))

    def find(self, verb: str) -> Any:
        """Return the function `measure_NAME` or `draw_NAME`; None if the module has none."""
        module = import_module(f"bnncli.papers.{self.module}")
        return getattr(module, f"{verb}_{self.name.replace('-', '_')}", None)


@dataclass(frozen=True)
class Cell:
    """One published number.

    Args:
        tolerance: how far ours may be off for known reasons, in the number's unit. because: these reasons.
        formulas: ours, by definition (published, right, or empty if there is one); empty if it cannot be measured.
        unavailable: why not.
        needs: optional files that it takes.
        not_at: scales at which ours is of something else and is shown without a verdict, each with the reason.
    """

    row: str
    column: str
    published: Estimate
    tolerance: float
    because: str
    formulas: Mapping[str, Formula]
    unavailable: str | None = None
    needs: tuple[str, ...] = ()
    not_at: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_coarse(self) -> bool:
        """Whether the tolerance is as large as the number: what is near nothing would match."""
        return 0 < abs(self.published.value) <= self.tolerance


Published = float | tuple[float, float]  # a number, or one with its standard error
Ours = Formula | dict[str, Formula] | str  # a formula, one for each definition, or why there is none


def both(published: Formula, right: Formula) -> dict[str, Formula]:
    """Measure by the published and by the right definition."""
    return {PUBLISHED: published, RIGHT: right}


def column(
    name: str,
    cells: Iterable[tuple[str, Published, Ours]],
    *,
    tolerance: float,
    because: str,
    count: int = 0,
    needs: tuple[str, ...] = (),
    not_at: Mapping[str, str] | None = None,
) -> Iterator[Cell]:
    """Yield the cells of a column.

    Args:
        cells: row, published number, and ours.
        count: seeds behind each published standard error.
    """
    for row, published, ours in cells:
        value, error = published if isinstance(published, tuple) else (published, None)
        yield Cell(
            row,
            name,
            Estimate(float(value), None if error is None else float(error), count if error else 0),
            float(tolerance),
            because,
            {} if isinstance(ours, str) else {"": ours} if isinstance(ours, Formula) else ours,
            ours if isinstance(ours, str) else None,
            needs,
            not_at or {},
        )


@dataclass(frozen=True)
class Claim:
    """One statement of the text, in our words.

    Args:
        where: the text says so; "ours" if it does not.
        not_at: scales at which the numbers cannot tell, so that they are shown without a verdict, each with the reason.
        needs: optional files that it takes.
    """

    name: str
    text: str
    rule: Rule
    where: str = "ours"
    not_at: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class LineFigure:
    """Measured numbers against x, a line for each name.

    Args:
        lines: formulas at the places x.
        log: axes that are logarithmic: x, y or xy.
    """

    name: str
    title: str
    x: Sequence[float]
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[Formula]]
    log: str = ""


@dataclass(frozen=True)
class MarginalFigure:
    """Densities of single weights.

    Args:
        posteriors: names of posteriors of the study's first checkpoint, by what they are called; the first is the reference.
    """

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
        called: the name by which other scores of the same examples have their correlation with it in `correlations`; empty if
            the document has no correlations.
        trials: the step and the place of the number of trials of which this is a share; the standard error then is that of a share.
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
    """Numbers that a recipe's function reads, by name: formulas whose values are found or are missing for a reason.

    Args:
        read: the number of each checkpoint. Raises Unmeasured.
    """

    def __init__(self, read: Callable[[Reading], Replicates]) -> None:
        self._read = read
        self.found: dict[str, Replicates] = {}
        self.why: dict[str, str] = {}
        self.readings: dict[str, Reading] = {}

    def read(self, name: str, reading: Reading) -> Formula:
        """Read one number of a study."""
        self.readings[name] = reading
        try:
            self.found[name] = self._read(reading)
        except Unmeasured as error:
            self.why[name] = error.message
        return Formula(name)

    def compare(
        self, name: str, study: Study, score: str, rows: Mapping[str, str], *, step: str = "compare"
    ) -> dict[str, Formula]:
        """Read a score of several predictions with its correlations, as NAME_KEY for each key of `rows`."""
        return {
            key: self.read(
                f"{name}_{key}", Reading(study, step, ("rows", {"name": row}, "scores", {"form": score}), called=row)
            )
            for key, row in rows.items()
        }

    def evaluate(
        self,
        name: str,
        study: Study,
        metric: Mapping[str, str],
        rows: Mapping[str, str],
        *,
        split: str = "test",
        **keys: Any,
    ) -> dict[str, Formula]:
        """Read a metric of several predictions, as NAME_KEY for each key of `rows`.

        Args:
            metric: its name and the choices that tell it apart.
            keys: of Reading.
        """
        return {
            key: self.read(
                f"{name}_{key}",
                Reading(study, "evaluate", ("rows", {"name": row, "split": split}, "metrics", metric), **keys),
            )
            for key, row in rows.items()
        }

    def __getitem__(self, name: str) -> Formula:
        """Return a number of the experiment."""
        return Formula(name)


@dataclass(frozen=True, eq=False)
class PaperRecipe:
    """One table or figure.

    Args:
        name: work/name. work: as it is cited. where: in it.
        note: what a reader of the results must know.
        rows: reads the results and yields what is judged and shown.
        settings, needs, seconds: of the experiment, by scale.
        reads: files of studies that the experiment reads, by its names for them: study/file.
    """

    name: str
    title: str
    work: str
    where: str
    rows: Callable[[Results], Iterator[Row]]
    note: str = ""
    studies: tuple[Study, ...] = ()
    experiment: Experiment | None = None
    settings: Mapping[str, Settings] = field(default_factory=dict)
    needs: Mapping[str, Needs] = field(default_factory=lambda: dict.fromkeys(SCALES, Needs()))
    seconds: Mapping[str, float] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., Study | PaperRecipe], tuple[str, str]]:
        return _import_part, (self.rows.__module__, self.name)


@dataclass(frozen=True)
class PublishedWork:
    """A published work.

    Args:
        name: of its recipes, before the slash.
        cited: as results cite it.
    """

    name: str
    cited: str

    def recipe(
        self,
        name: str,
        *,
        settings: Settings | None = None,
        quick: Settings | None = None,
        paper: Settings | None = None,
        **declared: Any,
    ) -> Callable[[Callable[[Results], Iterator[Row]]], PaperRecipe]:
        """Make the recipe of a table or figure of a function that reads results and yields rows.

        Args:
            settings: of the experiment, at both scales; quick, paper: more of them, at one.
            declared: fields of PaperRecipe.
        """
        by_scale = {scale: {**(settings or {}), **(own or {})} for scale, own in (("quick", quick), ("paper", paper))}

        def make(rows: Callable[[Results], Iterator[Row]]) -> PaperRecipe:
            return PaperRecipe(f"{self.name}/{name}", work=self.cited, rows=rows, settings=by_scale, **declared)

        return make


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


def _import_part(module: str, name: str) -> Study | PaperRecipe:
    """Return a study or recipe of a module by its name. Pickles hold the name, as decorated functions cannot be pickled."""
    parts = vars(import_module(module)).values()
    return next(one for one in parts if isinstance(one, Study | PaperRecipe) and one.name == name)
