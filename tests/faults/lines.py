"""How the campaign runs each command: what must be there before, the words, and what they write."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from bnncli.cli.commands import own_commands
from bnncli.cli.execute import run_command_line

DEAD_PID = 2**22 + 7  # above the kernel's largest pid
NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
"""
GRID = """
checkpoints = "small"
[[step]]
command = "fit-laplace"
name = "kron"
structure = "kron"
prior-precision = 3
"""
_CARD = ("--model-card", "card.md") if find_spec("yaml") else ()
ONE_AND_TWO = (("1", "one"), ("2", "two"))


@dataclass(frozen=True)
class Line:
    """One way to run a command, in the folder of a finished run.

    Attributes:
        command: its name; after a slash, which way of running it.
        words: after the command.
        earlier: the same with other options: what the trials find there and replace; None where there is nothing to replace.
        outputs: what it writes, relative to the folder (patterns).
        inputs: files that it reads, for mutations.
        force: what is added where there is something to replace.
        is_read_only: whether it must write nothing.
    """

    command: str
    words: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    earlier: tuple[str, ...] | None = None
    inputs: tuple[str, ...] = ()
    force: tuple[str, ...] = ("--force",)
    is_read_only: bool = False

    def argv(self, words: tuple[str, ...], *more: str) -> list[str]:
        """The command line."""
        name = self.command.split("/")[0]
        return [*name.split(" "), *words, *more, *(["--threads", "1"] if name in _COMPUTING else [])]


def _computing() -> set[str]:
    from bnncli.options.command import ComputeOptions

    return {command.name for command in own_commands() if ComputeOptions in command.groups}


_COMPUTING = _computing()
_FIT = ("--epochs", "1", "--save-every", "0")
_TWO = ("--model", "net.py:make", "--data", "train=npz:train.npz", "--data", "test=npz:test.npz")
_HMC = ("--chains", "8", "--warmup", "8", "--save-every", "0")
_MLP = ("--model", "mlp", "--model-arg", "inputs=5", "--model-arg", "hidden=4", "--model-arg", "classes=3")
_TRAINED = (*_MLP, "--data", "train=npz:train.npz", "--batch-size", "64", "--save-every", "0")
_TRAIN, _VAL, _TEST = (f"small.bnn/features/{split}.h5" for split in ("train", "val", "test"))
_LAPLACE, _LBBNN = (f"small.bnn/posteriors/{name}.safetensors" for name in ("laplace", "lbbnn"))
_MC = "small.bnn/predictions/laplace.mc/test.h5"
_CALIBRATED = ("--posterior", "laplace", "--integrator", "mc", "--split", "test", "--sets", "lac")
_WATCHED = (*_CALIBRATED[:6], "--name", "new")
_ALL = ("whole.pt", "--layers", "all", "--trust-code")  # of a network by code, whose inputs are read again
_WHOLE = ("whole.pt", "net.py", "train.npz", "whole.pt.bnn/features/train.h5")
_NEW = ("--posterior", "map", "--trust-code")  # of inputs that are no split of the run
_KEPT = ("--data", "new=npz:train.npz", "--keep-features")  # and are one
_LAPLACE_ALL = "whole.pt.bnn/posteriors/laplace-all.safetensors"

LINES = {
    line.command: line
    for line in (
        Line(
            "extract-features",
            ("small", "--from-npz", "features.npz", "--ood", "far"),
            ("small.bnn/features/*.h5", "small.bnn/posteriors/map.safetensors"),
            ("small", "--from-npz", "other.npz", "--ood", "far"),
            ("features.npz",),
        ),
        Line(
            "extract-features/network",
            ("net.pt", *_TWO, "--mean", "0.5", "--save-every", "0"),
            ("net.pt.bnn/features/*.h5", "net.pt.bnn/posteriors/map.safetensors"),
            ("net.pt", *_TWO),
            ("net.pt", "train.npz"),
        ),
        Line(
            "fit-laplace",
            ("small", "--name", "new", "--prior-precision", "val", "--plot", "prior.png"),
            ("small.bnn/posteriors/new.safetensors", "prior.png"),
            ("small", "--name", "new", "--prior-precision", "3"),
            (_TRAIN, _VAL),
        ),
        Line(
            "fit-laplace/layers",
            (*_ALL, "--name", "new", "--structure", "diag", "--prior-precision", "2"),
            ("whole.pt.bnn/posteriors/new.safetensors",),
            (*_ALL, "--name", "new", "--structure", "diag", "--prior-precision", "3"),
            _WHOLE,
        ),
        Line(
            "refine/layers",
            (*_ALL, "--name", "new", "--flow", "planar", "--length", "2", "--elbo-draws", "16", *_FIT),
            ("whole.pt.bnn/posteriors/new.safetensors",),
            (*_ALL, "--name", "new", "--flow", "planar", "--length", "1", "--elbo-draws", "16", *_FIT),
            (*_WHOLE, _LAPLACE_ALL),
        ),
        Line(
            "hmc/layers",
            (*_ALL, "--name", "new", "--draws", "6", "--chains", "2", "--warmup", "4", "--save-every", "0"),
            ("whole.pt.bnn/posteriors/new.nc",),
            (*_ALL, "--name", "new", "--draws", "4", "--chains", "2", "--warmup", "4", "--save-every", "0"),
            (*_WHOLE, _LAPLACE_ALL),
        ),
        Line(
            "predict/layers",
            (*_ALL, "--name", "new", "--posterior", "laplace-all"),
            ("whole.pt.bnn/predictions/new/*.h5",),
            (*_ALL, "--name", "new", "--posterior", "laplace-all", "--seed", "1"),
            ("whole.pt", "net.py", "test.npz", "whole.pt.bnn/features/test.h5", _LAPLACE_ALL),
        ),
        Line(
            "train",
            ("new.safetensors", *_TRAINED, "--epochs", "2"),
            ("new.safetensors",),
            ("new.safetensors", *_TRAINED, "--epochs", "1"),
            ("train.npz",),
        ),
        Line(
            "train/seeds",
            ("many.safetensors", *_TRAINED, "--epochs", "2", "--seeds", "2"),
            ("many-0.safetensors", "many-1.safetensors"),
            ("many.safetensors", *_TRAINED, "--epochs", "1", "--seeds", "2"),
            ("train.npz",),
        ),
        Line(
            "fit-ensemble",
            ("whole.pt", "other.pt", "--name", "new", "--trust-code"),
            ("whole.pt.bnn/posteriors/new.safetensors",),
            ("whole.pt", "other.pt", "third.pt", "--name", "new", "--trust-code"),
            (*_WHOLE, "other.pt"),
        ),
        Line(
            "fit-temperature",
            ("small", "--name", "new"),
            ("small.bnn/posteriors/new.safetensors",),
            ("small", "--name", "new", "--base", "laplace"),
            (_VAL,),
        ),
        Line(
            "fit-calibration",
            ("small", "--name", "new"),
            ("small.bnn/posteriors/new.safetensors",),
            ("small", "--name", "new", "--base", "laplace"),
            (_VAL,),
        ),
        Line("stack", ("small", "--name", "new"), ("small.bnn/posteriors/new.safetensors",), ("small", "--name", "new", "--seed", "1"), (_TRAIN, _VAL)),
        Line(
            "refine",
            ("small", "--name", "new", "--length", "2", *_FIT),
            ("small.bnn/posteriors/new.safetensors",),
            ("small", "--name", "new", "--length", "1", *_FIT),
            (_TRAIN, _LAPLACE),
        ),
        Line(
            "hmc",
            ("small", "--name", "new", "--draws", "6", *_HMC),
            ("small.bnn/posteriors/new.nc",),
            ("small", "--name", "new", "--draws", "4", *_HMC),
            (_TRAIN, _LAPLACE),
        ),
        Line(
            "merge",
            ("small", "--name", "new", "--posterior", "one", "--posterior", "two"),
            ("small.bnn/posteriors/new.nc",),
            ("small", "--name", "new", "--posterior", "two", "--posterior", "one"),
            ("small.bnn/posteriors/one.nc", _TRAIN),
        ),
        Line("grid", ("grid.toml", "--makefile"), is_read_only=True),
        Line(
            "reproduce",
            ("refinement/figure-2", "--out", "made"),
            ("made/quick/refinement/figure-2/*.json", "made/quick/refinement/figure-2/*.md", "made/quick/refinement/figure-2/*.png"),
            force=(),
        ),
        Line(
            "fit-sghmc",
            ("small", "--name", "new", "--chains", "2", "--epochs", "20", "--save-every", "0"),
            ("small.bnn/posteriors/new.nc",),
            ("small", "--name", "new", "--chains", "2", "--epochs", "40", "--save-every", "0"),
            (_TRAIN, _LAPLACE),
        ),
        Line(
            "fit-sghmc/layers",
            (*_ALL, "--name", "new", "--chains", "2", "--epochs", "20", "--save-every", "0"),
            ("whole.pt.bnn/posteriors/new.nc",),
            (*_ALL, "--name", "new", "--chains", "2", "--epochs", "40", "--save-every", "0"),
            (*_WHOLE, _LAPLACE_ALL),
        ),
        Line(
            "fit-swag",
            ("small", "--name", "new", "--warmup", "1", "--epochs", "4", "--rank", "3", "--save-every", "0"),
            ("small.bnn/posteriors/new.safetensors",),
            ("small", "--name", "new", "--warmup", "1", "--epochs", "4", "--rank", "2", "--save-every", "0"),
            (_TRAIN, _LAPLACE),
        ),
        Line(
            "fit-vi",
            ("small", "--name", "new", "--elbo-draws", "8", *_FIT),
            ("small.bnn/posteriors/new.safetensors",),
            ("small", "--name", "new", "--elbo-draws", "8", "--seed", "1", *_FIT),
            (_TRAIN, _LAPLACE),
        ),
        Line(
            "fit-vi/layers",
            (*_ALL, "--name", "new", "--elbo-draws", "8", *_FIT),
            ("whole.pt.bnn/posteriors/new.safetensors",),
            (*_ALL, "--name", "new", "--elbo-draws", "8", "--seed", "1", *_FIT),
            (*_WHOLE, _LAPLACE_ALL),
        ),
        Line(
            "fit-lbbnn",
            ("small", "--name", "new", *_FIT),
            ("small.bnn/posteriors/new.safetensors",),
            ("small", "--name", "new", "--seed", "1", *_FIT),
            (_TRAIN,),
        ),
        Line(
            "prune",
            ("small", "--name", "new", "--dense", "dense.safetensors"),
            ("small.bnn/posteriors/new.safetensors", "dense.safetensors"),
            ("small", "--name", "new", "--rule", "density", "--density", "0.3"),
            (_TEST, _LBBNN),
        ),
        Line(
            "predict",
            ("small", "--posterior", "laplace", "--name", "new", "--table", "table.npz"),
            ("small.bnn/predictions/new/*.h5", "table.npz"),
            ("small", "--posterior", "laplace", "--name", "new", "--seed", "1"),
            (_TEST, _VAL, _LAPLACE),
        ),
        Line(
            "predict/new",
            ("whole.pt", *_NEW, "--data", "new=npz:test.npz", "--table", "new.csv"),
            ("new.csv",),
            ("whole.pt", *_NEW, "--data", "new=npz:train.npz", "--table", "new.csv"),
            ("whole.pt", "net.py", "test.npz", "whole.pt.bnn/posteriors/map.safetensors"),
            force=(),
        ),
        Line(
            "predict/kept",
            ("whole.pt", *_NEW, *_KEPT, "--table", "new.csv"),
            ("new.csv", "whole.pt.bnn/features/new.h5"),
            ("whole.pt", *_NEW, *_KEPT, "--table", "new.csv", "--probabilities"),
            ("whole.pt", "net.py", "train.npz", "whole.pt.bnn/posteriors/map.safetensors"),
        ),
        Line(
            "predict/out",
            ("small", "--posterior", "laplace", "--integrator", "mc", "--split", "test", "--out", "else/p.h5"),
            ("else/p.h5",),
            None,
            (_TEST,),
        ),
        Line(
            "calibrate",
            ("small", *_CALIBRATED, "--name", "new"),
            ("small.bnn/decisions/laplace.mc/new.safetensors",),
            ("small", *_CALIBRATED, "--name", "new", "--coverage", "0.8"),
            (_MC,),
        ),
        Line(
            "monitor",
            ("small", *_WATCHED, "--table", "night.csv"),
            ("small.bnn/monitor/new.safetensors",),
            ("small", *_WATCHED, "--reset"),
            (_MC, "night.csv"),
            force=(),
        ),
        Line(
            "export",
            ("small", "--posterior", "laplace", "--name", "new", "--head-only", "--format", "pt2", "--draws", "9"),
            ("small.bnn/exports/new.pt2",),
            ("small", "--posterior", "laplace", "--name", "new", "--head-only", "--format", "pt2", "--draws", "5"),
            (_VAL, _LAPLACE),
        ),
        Line(
            "export/tensors",
            ("small", "--posterior", "laplace", "--name", "new", "--head-only", "--format", "torch", "--draws", "9"),
            ("small.bnn/exports/new.safetensors", "small.bnn/exports/new.py"),
            ("small", "--posterior", "laplace", "--name", "new", "--head-only", "--format", "torch", "--draws", "5"),
            (_VAL, _LAPLACE),
        ),
        Line(
            "evaluate",
            ("small", "--posterior", "laplace", "--bootstrap", "0", "--split", "test", "--plot", "figures"),
            ("small.bnn/metrics/laplace.mc.json", "figures/*.png"),
            ("small", "--posterior", "laplace", "--bootstrap", "0", "--bins", "10"),
            (_MC, "small.bnn/posteriors/hmc.nc"),
        ),
        Line(
            "compare",
            ("small", "--bootstrap", "100", "--metric", "nll", "--plot", "figures"),
            ("figures/*.png",),
            None,
            (_MC,),
        ),
        Line(
            "score",
            ("predictions.npz", "--labels", "labels.csv", "--ood", "far.npy", "--bootstrap", "0"),
            inputs=("predictions.npz", "labels.csv", "far.npy"),
            is_read_only=True,
        ),
        Line(
            "score/map",
            ("predictions.npz", "--labels", "labels.csv", "--bootstrap", "0", "--fit-calibration", "platt", "--out", "map.safetensors"),
            ("map.safetensors",),
            None,
            ("predictions.npz",),
        ),
        Line(
            "report",
            ("small", "--posterior", "laplace", "--out", "report.html", "--figures", "figures", *_CARD),
            ("report.html", "figures/*.png", *_CARD[1:]),
            None,
            (_TRAIN, _LAPLACE),  # of other damage the page says that it is there
        ),
        Line("integrals", ("--plot", "map.png", "--grid-size", "3", "--integrator", "probit"), ("map.png",)),
        Line("auto", ("small",), ("small.bnn/recommended.json",), None, (_VAL, _LAPLACE)),
        Line(
            "sbc",
            ("small", "--simulations", "20", "--draws", "9", "--plot", "ranks.png"),
            ("ranks.png",),
            None,
            (_TRAIN, _LAPLACE),
        ),
        Line("convert", ("net.pt", "plain.safetensors"), ("plain.safetensors",), ("other.pt", "plain.safetensors"), ("net.pt",)),
        Line("clean", ("small",), force=()),
        Line("clean/stale", ("small", "--stale"), force=()),
        Line("rm", ("small", "hmc", "laplace.mc"), force=()),
        Line("demo", ("--dir", "demo"), ("demo/*.npz", "demo/*.pt"), force=()),
        Line(
            "acquire",
            ("small", "--pool", "test", "--batch", "3", "--table", "next.csv"),
            ("next.csv",),
            ("small", "--pool", "test", "--batch", "2", "--table", "next.csv"),
            (_TEST, _LAPLACE),
            force=(),
        ),
        Line("diagnose", ("small", "--posterior", "laplace"), inputs=(_TRAIN, _LAPLACE), is_read_only=True),
        Line("status", ("small",), is_read_only=True),
        Line("inspect", (_LAPLACE,), is_read_only=True),
        Line("verify", ("small.bnn",), inputs=(_TRAIN, _LAPLACE, _MC), is_read_only=True),
        Line("config show", ("refine",), is_read_only=True),
        Line("help", ("specs",), is_read_only=True),
    )
}  # fmt: skip
# Options that name a file or folder which is written, and those that name one which is read.
WRITTEN = {
    "--plot",
    "--figures",
    "--table",
    "--dense",
    "--out",
    "--dir",
    "--log-file",
    "--run-dir",
    "--model-card",
    "--alarm-file",
}
READ = {
    "--follow",
    "--exclude",
    "--config",
    "--from-npz",
    "--base-model",
    "--data",
    "--checkpoints",
    "--classes",
    "--calibration",
    "--costs",
}


def prepare(folder: Path) -> None:
    """What the lines need beside a finished run: a posterior of fit-lbbnn, networks, data, leftovers."""
    torch.manual_seed(0)
    (folder / "net.py").write_text(NETWORK)
    for name in ("net.pt", "other.pt", "third.pt"):
        shapes = {"1.weight": (4, 5), "1.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
        torch.save({key: torch.randn(shape) for key, shape in shapes.items()}, folder / name)
    with np.load(folder / "features.npz") as file:
        arrays = dict(file)
    np.savez(folder / "other.npz", **{**arrays, "features_test": -arrays["features_test"]})
    for split in ("train", "test"):
        np.savez(folder / f"{split}.npz", x=arrays[f"features_{split}"], y=arrays[f"labels_{split}"])
    probs = np.random.default_rng(0).dirichlet(np.ones(3), size=60)
    np.savez(folder / "predictions.npz", probs=probs[:40])
    (folder / "labels.csv").write_text("\n".join(["label", *map(str, probs[:40].argmax(axis=1))]) + "\n")
    np.save(folder / "far.npy", probs[40:])
    shutil.copy(folder / "net.pt", folder / "whole.pt")
    (folder / "grid.toml").write_text(GRID)
    for line in (
        *(["hmc", "small", "--name", name, "--seed", seed, "--draws", "6", *_HMC] for seed, name in ONE_AND_TWO),
        ["fit-lbbnn", "small", "--epochs", "1"],
        ["extract-features", "whole.pt", *_TWO],
        ["fit-laplace", *_ALL, "--structure", "diag", "--prior-precision", "3"],
        ["predict", "small", *_CALIBRATED[:6], "--table", "night.csv"],
    ):
        assert run_command_line([*line, "-q"], io.StringIO()) == 0
    table = folder / "night.csv"
    table.write_text(table.read_text().replace(",test,", ",new,"))


def leave_leftovers(folder: Path) -> list[Path]:
    """Files of a dead process in the run folder, as clean finds them."""
    posteriors = folder / "small.bnn" / "posteriors"
    left = [posteriors / f".x.nc.{DEAD_PID}.0123abcd.tmp", posteriors / ".x.resume.safetensors"]
    for path in left:
        path.write_bytes(b"half")
    return left


def leave_stale(folder: Path) -> None:
    """Take away a posterior, so that what was made from it is stale."""
    (folder / "small.bnn" / "posteriors" / "laplace.safetensors").unlink()


def copy_tree(source: Path, target: Path) -> Path:
    """A fresh copy of a folder."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
