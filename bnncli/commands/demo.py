"""demo: run the whole pipeline on a small bundled data set and network."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import bnncli
from bnncli.artifacts.atomic import check_writable, publish_bytes
from bnncli.commands.extract_features import ExtractFeaturesOptions
from bnncli.commands.fit_laplace import FitLaplaceOptions
from bnncli.commands.fit_temperature import FitTemperatureOptions
from bnncli.commands.hmc import HmcOptions
from bnncli.commands.refine import RefineOptions
from bnncli.commands.report import ReportOptions
from bnncli.errors import MissingInput, OutputExists
from bnncli.options.command import Command, CommonOptions, ComputeOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.options.predict import PredictOptions
from bnncli.options.scoring import EvaluateOptions
from bnncli.session.run import Result, Run, run_command


@dataclass(frozen=True)
class DemoOptions(CheckedOptions):
    """Options of demo."""

    dir: str = option("bnncli-demo", "Folder for the demo.", metavar="DIR", writes=True)
    files_only: bool = option(False, "Write the checkpoint and the data, and stop.")


COMMAND = Command(
    "Run the whole pipeline on embedded data in ./bnncli-demo/.",
    "Uses a LeNet-5 and subsets of Fashion-MNIST and MNIST, all included in the package. Takes under a minute "
    "on two cores.",
    (DemoOptions, ComputeOptions, CommonOptions),
    ("bnncli demo", "bnncli demo --files-only --dir ."),
    (),
    section="Start",
    place=10,
)

CHECKPOINT = "lenet5-fmnist.pt"
DATA = ("train", "val", "test")
OUTSIDE = ("mnist",)


def execute(run: Run, options: DemoOptions) -> Result:
    """Run every step in the demo's folder. The result is evaluate's table."""
    folder = Path(options.dir)
    checkpoint = _copy_fixture(folder, may_replace=not options.files_only)
    if options.files_only:
        files = [str(checkpoint), *(str(folder / f"{split}.npz") for split in (*DATA, *OUTSIDE))]
        return Result(lines=files, extra={"files": files})
    steps = (
        ("extract-features", _build_extract_options(folder)),
        ("fit-temperature", FitTemperatureOptions()),
        ("fit-laplace", FitLaplaceOptions()),
        ("refine", RefineOptions()),
        ("hmc", HmcOptions()),
        ("predict", PredictOptions()),
        ("evaluate", EvaluateOptions()),
        ("report", ReportOptions()),
    )
    total, seconds = Result(), {}
    for command, chosen in steps:
        start = time.monotonic()
        result = run_command(run, command, checkpoint, chosen)
        seconds[command] = round(time.monotonic() - start, 2)
        total.add(result)
        if result.tables:  # what evaluate says is what the demo does
            total.tables, total.extra = result.tables, result.extra
    total.summary = []
    total.extra["step_seconds"] = seconds
    total.lines = _format_locations(folder, checkpoint, seconds)
    return total


def _copy_fixture(folder: Path, *, may_replace: bool) -> Path:
    """Copy the checkpoint and the data into a folder.

    Args:
        may_replace: True to replace files of these names that have other content, as in the demo's own folder.

    Raises:
        OutputExists: such files exist and may not be replaced.
    """
    check_writable(folder, hint="choose another place with --dir")
    names = (CHECKPOINT, *(f"{split}.npz" for split in (*DATA, *OUTSIDE)))
    for name in () if may_replace else names:
        if (folder / name).exists() and (folder / name).read_bytes() != fixture_path(name).read_bytes():
            raise OutputExists(f"{folder / name} exists and is another file", hint="choose another place with --dir")
    for name in names:
        target = folder / name
        content = fixture_path(name).read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            publish_bytes(target, content, may_replace=target.is_file())
    return folder / CHECKPOINT


def _build_extract_options(folder: Path) -> ExtractFeaturesOptions:
    """Options of extract-features."""
    data = [f"{split}=npz:{folder / f'{split}.npz'}" for split in DATA]
    outside = [f"{split}=npz:{folder / f'{split}.npz'}" for split in OUTSIDE]
    return ExtractFeaturesOptions(model="lenet5", data=data, ood=outside)


def _format_locations(folder: Path, checkpoint: Path, seconds: dict[str, float]) -> list[str]:
    run_folder = f"{checkpoint}.bnn"
    took = ", ".join(f"{command} {value:.1f}" for command, value in seconds.items())
    return [
        f"seconds: {took}",
        f"checkpoint and data: {folder}/; features, posteriors, predictions, metrics: {run_folder}/",
        f"report with figures: {run_folder}/report.html",
        f"next: bnncli status {checkpoint}; bnncli inspect {run_folder}/posteriors/laplace.safetensors; bnncli <command> --help",
    ]


_PACKAGE = Path(bnncli.__file__).resolve().parent
_FOLDERS = (_PACKAGE / "fixtures", _PACKAGE.parent / "fixtures")


def fixture_path(name: str) -> Path:
    """Return the path of the bundled file `name`, such as train.npz. Raises MissingInput where the installation lacks it."""
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise MissingInput(f"this installation lacks the fixture {name!r}", hint="reinstall bnncli from its wheel")
