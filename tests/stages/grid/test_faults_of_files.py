"""What is wrong in a grid's file is told before anything runs: exit 78, the file, the line, the step, the key, what was meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from problems.command_line import Cli
from problems.grids import write_grid

FIT = '[[step]]\ncommand = "fit-laplace"\n'
REFINE = '[[step]]\ncommand = "refine"\n'
PREDICT = '[[step]]\ncommand = "predict"\nposterior = "map"\n'
# What stands below the line of the checkpoints, and what is said of it.
WRONG = {
    "no toml": ("[[step]\n", r"grid.toml is not valid TOML: .*line 2"),
    "no step": ("", r"grid.toml: expected steps, each as \[\[step\]\] with a command; got none"),
    "one table": ('[step]\ncommand = "hmc"\n', r"expected steps, each as \[\[step\]\] with a command; got {'command'"),
    "unknown key": (FIT + "[steps]\n", r"grid.toml:4: unknown key 'steps'; did you mean 'step'\?"),
    "no command": ('[[step]]\nstructure = "kron"\n' + FIT, r"grid.toml:2: step 1 command: expected the command of the step; got none"),
    "unknown command": (FIT + '[[step]]\ncommand = "refin"\n', r":5: step 2 command: no command called 'refin' in grids; did you mean 'refine'"),
    "another's command": ('[[step]]\ncommand = "clean"\n', r":3: .*no command called 'clean' in grids; expected one of acquire, auto, calibrate, compare"),
    "command of no checkpoint": ('[[step]]\ncommand = "grid"\n', r"no command called 'grid' in grids"),
    "unknown option": (REFINE + "epochs = 2\nepoch = 3\n", r":5: step 1 \(refine\) epoch: refine has no such option; did you mean 'epochs'"),
    "option of a later step": (REFINE + "seed = 'x'\n" + REFINE + "seed = 1\n", r":4: step 1 \(refine\) seed: expected a whole number; got 'x'"),
    "grid's own option": (FIT + "json = true\n", r":4: step 1 \(fit-laplace\) json: not an option of a step"),
    "force": (FIT + "force = true\n", r"force: not an option of a step: .*remove the artifacts that should be created again"),
    "out of bounds": (REFINE + "epochs = [1, 0]\n", r":4: step 1 \(refine\) epochs: expected a number of at least 1; got 0"),
    "no choice": (REFINE + "flow = ['planar', 'spiral']\n", r"flow: expected one of affine, .*; got 'spiral'"),
    "refused by its check": (FIT + "prior-precision = 'x'\n", r":4: step 1 \(fit-laplace\) prior-precision: expected auto, val"),
    "empty list": (REFINE + "epochs = []\n", r"epochs: expected values; got an empty list"),
    "twice": (REFINE + "epochs = [1, 2, 1]\n", r"epochs: 1 is given twice"),
    "refused together": (FIT + "precision-per = 'layer'\n", r":2: step 1 \(fit-laplace\): --precision-per layer is for .*; in: bnncli fit-laplace small"),
    "no name": (FIT + "name = 'a b'\n", r"name: expected a letter, then letters, digits, - or _, .*; got 'a b'"),
    "name of ours": (FIT + "name = 'job'\n", r"and not checkpoint or job; got 'job'"),
    "name is no text": (FIT + "name = 3\n", r":4: step 1 \(fit-laplace\) name: expected text; got 3"),
    "name of another": (FIT + FIT, r":4: step 2 \(fit-laplace\) name: an earlier step is also called 'laplace'"),
    "unknown step": (FIT + REFINE + "base = '{laplac}'\n", r":6: step 2 \(refine\) base: no earlier step is called 'laplac'; did you mean 'laplace'"),
    "later step": (REFINE + "base = '{laplace}'\n" + FIT, r":4: step 1 \(refine\) base: no earlier step is called 'laplace'; this is the first"),
    "star for one": (FIT + REFINE + "base = '{laplace*}'\n", r"base: it takes one value, but {laplace\*} stands for several"),
    "star of a word": (PREDICT + "split = '{checkpoint*}'\n", r":5: .*{checkpoint} and {job} stand for one word each"),
    "two stars": (FIT + REFINE + PREDICT + "split = '{laplace*}{refine*}'\n", r"expected at most one {STEP\*} in a text"),
    "step without a name": (PREDICT + "[[step]]\ncommand = 'evaluate'\nposterior = '{predict}'\n", r":5: step 2 \(evaluate\): {predict} does not stand for a name: predict creates no named posterior"),
    "step with a file": (FIT + "out = 'x.safetensors'\n" + REFINE + "base = '{laplace}'\n", r"{laplace} does not stand for a name: it sets out \(step laplace\)"),
    "after nothing": (FIT + "after = 'hmc'\n", r":4: step 1 \(fit-laplace\) after: no earlier step is called 'hmc'"),
    "after a number": (FIT + "after = 3\n", r"after: expected names of steps; got 3"),
    "one plot": (FIT + "structure = ['full', 'kron']\nplot = 'a/s.png'\n", r":5: .* plot: several lines would write a/s.png: put {job} into the name, such as a/s-{job}.png"),
    "one file by two names": (FIT + "plot = 'x.png'\n" + "[[step]]\ncommand = 'sbc'\nplot = './y/../x.png'\n", r"plot: several lines would write y/../x.png"),
    "one result": (FIT + "name = 'a-b'\nstructure = ['kron', 'diag']\n" + FIT + "name = 'a'\nprior-precision = [1, 2]\n[[step]]\ncommand = 'hmc'\nname = 'a-b-kron'\n", r"step 3 \(hmc\): step a-b also creates 'a-b-kron': rename one of them"),
    "one name of two values": (FIT + "trust-code = true\nlayers = ['a.b*', 'a/b*']\n", r"step 1 \(fit-laplace\): two of its lines create 'laplace-layersa-b'"),
    "refused before others": (PREDICT + "layers = ['last', '+']\nsamples = 3\n", r":5: step 1 \(predict\) layers: expected last, all or patterns"),
    "one line": ("[[step]]\ncommand = 'status'\n" + PREDICT + "[[step]]\ncommand = 'status'\nname = 's'\n", r":7: step 3 \(status\): step status has the same line: bnncli status small"),
    "predictions of one posterior": (PREDICT + "samples = [10, 20]\n", r"step 1 \(predict\): lines with different values of samples would write the same files: give the step a name"),
    "metrics of one posterior": ("[[step]]\ncommand = 'evaluate'\nbins = [5, 9]\nseed = [1, 2]\n", r"lines with different values of seed would write the same files"),
    "one trained checkpoint": ("[[step]]\ncommand = 'train'\nmodel = 'mlp'\ndata = 'train=npz:a'\nepochs = [1, 2]\n", r"different values of epochs would write the same files \(the checkpoint itself"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_place(cli: Cli, folder: Path, name: str) -> None:
    text, why = WRONG[name]
    done = cli("grid", write_grid(folder, text).name, "--json", "-q")
    assert (done.code, done.json["error"]["code"]) == (78, "config"), done.stderr
    assert done.json["error"]["path"] == "grid.toml"
    assert done.stderr.startswith("error: grid.toml")
    assert re.search(why, done.json["error"]["message"]), done.json["error"]["message"]
    assert not Path("grid.toml.grid").exists()


@pytest.mark.parametrize("given", ["3", "[]", "['']", "[1]"])
def test_checkpoints_are_paths(cli: Cli, folder: Path, given: str) -> None:
    done = cli("grid", write_grid(folder, f"# first\ncheckpoints = {given}\n{FIT}"))
    assert (done.code, "grid.toml:2: checkpoints: expected checkpoint paths or patterns" in done.stderr) == (78, True)


def test_two_checkpoints_in_one_run_folder_are_told(cli: Cli, folder: Path) -> None:
    for name in ("a.pt", "b.pt"):
        (folder / name).touch()
    text = 'checkpoints = ["a.pt", "b.pt"]\n' + FIT + "run-dir = '{}'\n"
    done = cli("grid", write_grid(folder, text.replace("{}", "runs")), "-n")
    assert done.code == 78
    assert "grid.toml:4: step 1 (fit-laplace) run-dir: a.pt and b.pt would share the run folder" in done.stderr
    assert cli("grid", write_grid(folder, text.replace("{}", "runs/{checkpoint}")), "-n").code == 0


def test_what_is_not_there_is_66_and_named(cli: Cli, folder: Path) -> None:
    done = cli("grid", "none.toml")
    assert (done.code, "the grid 'none.toml' does not exist" in done.stderr) == (66, True)
    assert cli("grid", folder).code == 66
    done = cli("grid", write_grid(folder, f"checkpoints = ['small', 'gone']\n{FIT}"))
    assert (done.code, "grid.toml:1: checkpoints: gone does not exist" in done.stderr) == (66, True)
    done = cli("grid", write_grid(folder, f"checkpoints = 'gone*'\n{FIT}"))
    assert (done.code, "grid.toml:1: checkpoints: no file matches 'gone*'" in done.stderr) == (66, True)
    made = "checkpoints = 'gone'\n[[step]]\ncommand = 'extract-features'\nfrom-npz = 'x.npz'\n"
    assert cli("grid", write_grid(folder, made), "-n").code == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--jobs", 2, "--devices", "cpu"], "--jobs and --devices are mutually exclusive"),
        (["--devices", "0,x"], "--devices: expected GPU numbers and cpu, such as 0,1,2,3; got '0,x'"),
        (["--devices", "1,1"], "--devices: 1 is given twice"),
        (["--slurm", "--jobs", 2], "--slurm only prints a job script"),
        (["--jobs", 2], r"grid.toml:4: step 1 (fit-laplace) device: --jobs sets where lines run"),
    ],
)
def test_wrong_options_of_grid_itself_are_2(cli: Cli, folder: Path, words: list[object], why: str) -> None:
    done = cli("grid", write_grid(folder, FIT + "device = 'cuda:1'\n").name, *words)
    assert (done.code, why in done.stderr) == (2, True), done.stderr
