"""Plans of grids, and what is wrong with their files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from problems.command_line import Cli
from problems.grids import jobs_of, lines_of, write_grid

from bnncli.commands.grid import plan
from bnncli.commands.grid.plan import Job
from bnncli.errors import ConfigError
from bnncli.options.command import CommandLine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


LAPLACE = """
[[step]]
command = "fit-laplace"
structure = ["full", "kron"]
"""
HMC = """
[[step]]
command = "hmc"
base = "{laplace}"
chains = 4
seed = [1, 2]
"""
MERGE = """
[[step]]
command = "merge"
name = "joined"
posterior = ["{hmc*}"]
"""
LAST = """
[[step]]
command = "predict"
posterior = "{joined}"
[[step]]
command = "evaluate"
posterior = "{joined}"
[[step]]
command = "diagnose"
"""


def test_each_value_of_each_list_is_a_line_and_results_are_named_after_them(folder: Path) -> None:
    text = '[[step]]\ncommand = "fit-laplace"\nstructure = ["full", "kron"]\nprior-precision = [3, 0.1, 1e-5, "val"]\nseed = 7\n'
    assert lines_of(folder, text) == [
        f"fit-laplace small --structure {structure} --prior-precision {number} --seed 7 --name laplace-{structure}-{word}"
        for structure in ("full", "kron")
        for number, word in [
            ("3", "prior-precision3"),
            ("0.1", "prior-precision0p1"),
            ("1e-05", "prior-precision1e-05"),
            ("val", "val"),
        ]
    ]


def test_what_has_one_value_and_nobody_refers_to_keeps_its_own_name(folder: Path) -> None:
    assert lines_of(folder, '[[step]]\ncommand = "fit-laplace"\nplot = "s.png"\n') == ["fit-laplace small --plot s.png"]
    named = '[[step]]\ncommand = "fit-laplace"\nname = "first"\n'
    assert lines_of(folder, named) == ["fit-laplace small --name first"]


def test_a_reference_is_each_posterior_of_its_step_and_a_star_all_of_its_own_lists(folder: Path) -> None:
    found = lines_of(folder, LAPLACE + HMC + MERGE + LAST)
    assert found[2:6] == [
        f"hmc small --base laplace-{structure} --chains 4 --seed {seed} --name hmc-{structure}-seed{seed} --resume"
        for seed in (1, 2)
        for structure in ("full", "kron")
    ]
    assert found[6:] == [
        "merge small --posterior hmc-full-seed1 --posterior hmc-full-seed2 --name joined-full",
        "merge small --posterior hmc-kron-seed1 --posterior hmc-kron-seed2 --name joined-kron",
        "predict small --posterior joined-full",
        "predict small --posterior joined-kron",
        "evaluate small --posterior joined-full",
        "evaluate small --posterior joined-kron",
        "diagnose small",
    ]


def waits(jobs: list[Job]) -> dict[str, set[str]]:
    """What each line waits for, by names of lines."""
    assert all(number < job.number for job in jobs for number in job.after)
    assert [job.number for job in jobs] == list(range(len(jobs)))
    return {job.name: {jobs[number].name for number in job.after} for job in jobs}


def test_lines_wait_for_what_they_refer_to_and_the_last_ones_for_all_of_their_values(folder: Path) -> None:
    found = waits(jobs_of(folder, LAPLACE + HMC + MERGE + LAST))
    of_full = {"laplace-full", "hmc-full-seed1", "hmc-full-seed2", "joined-full", "predict-full"}
    assert found["laplace-full"] == set()
    assert found["hmc-full-seed1"] == {"laplace-full"}
    assert found["joined-full"] == {"hmc-full-seed1", "hmc-full-seed2"}
    assert found["predict-full"] == {"joined-full"}
    assert found["evaluate-full"] == of_full
    assert found["diagnose"] == set(found) - {"diagnose"}


def test_after_says_what_a_line_waits_for_beside_what_it_refers_to(folder: Path) -> None:
    text = LAPLACE + HMC + '[[step]]\ncommand = "diagnose"\nafter = "laplace"\n'
    text += '[[step]]\ncommand = "status"\nafter = []\n'
    text += '[[step]]\ncommand = "evaluate"\nposterior = "{laplace}"\nafter = ["hmc"]\n'
    found = waits(jobs_of(folder, text))
    assert found["diagnose"] == {"laplace-full", "laplace-kron"}
    assert found["status"] == set()
    assert found["evaluate-full"] == {"laplace-full", "hmc-full-seed1", "hmc-full-seed2"}


def test_of_a_list_of_references_each_value_goes_with_its_own_step_alone(folder: Path) -> None:
    text = LAPLACE + '[[step]]\ncommand = "refine"\nbase = "{laplace}"\nepochs = [1, 2]\n'
    text += '[[step]]\ncommand = "predict"\nposterior = [["{laplace}"], ["{refine}"], ["{laplace}", "map"]]\n'
    jobs = [job for job in jobs_of(folder, text) if job.step.command == "predict"]
    assert [shlex.split(job.line.pasted())[3:] for job in jobs] == [
        ["--posterior", "laplace-full"],
        ["--posterior", "laplace-kron"],
        *(["--posterior", f"refine-{structure}-epochs{epochs}"] for epochs in (1, 2) for structure in ("full", "kron")),
        ["--posterior", "laplace-full", "--posterior", "map"],
        ["--posterior", "laplace-kron", "--posterior", "map"],
    ]
    assert [len(job.after) for job in jobs] == [1] * 8


def test_two_references_in_a_line_are_of_one_value_of_what_both_were_made_from(folder: Path) -> None:
    text = LAPLACE + '[[step]]\ncommand = "refine"\nbase = "{laplace}"\n'
    text += '[[step]]\ncommand = "sbc"\nposterior = "{refine}"\ntruth = "{laplace}"\n'
    assert lines_of(folder, text)[4:] == [
        f"sbc small --posterior refine-{structure} --truth laplace-{structure}" for structure in ("full", "kron")
    ]


def test_every_line_is_one_that_the_command_line_reads(folder: Path) -> None:
    for job in jobs_of(folder, LAPLACE + HMC + MERGE + LAST):
        again = CommandLine.parse(job.line.command, shlex.split(job.line.pasted())[2:], job.line.groups)
        assert again.values() == job.line.values()


def test_lines_that_can_go_on_after_a_kill_have_resume_and_others_have_not(folder: Path) -> None:
    text = '[[step]]\ncommand = "extract-features"\nfrom-npz = "{checkpoint}.npz"\n' + LAPLACE + HMC + MERGE + LAST
    found = lines_of(folder, text)
    assert {line.split()[0] for line in found if line.endswith(" --resume")} == {"extract-features", "hmc"}
    assert found[0] == "extract-features small --from-npz small.npz --resume"
    nuts = '[[step]]\ncommand = "hmc"\nsampler = ["hmc", "nuts"]\n'  # which refuses --resume
    assert [line.endswith(" --resume") for line in lines_of(folder, nuts)] == [True, False]


def test_switches_and_odd_texts_come_to_the_line_as_they_are(folder: Path) -> None:
    text = """[[step]]
    command = "extract-features"
    data = [["train=webdataset:shards-{000..009}.tar"], ["train=csv:it's \\"here\\".csv", "test=csv:-x"]]
    model = "mlp"
    run-dir = ["a {job}", "b {job}"]
    """
    jobs = jobs_of(folder, text)
    words = [job.line.words() for job in jobs]
    assert words[0][3:5] == ["--data", "train=webdataset:shards-{000..009}.tar"]
    assert words[2][3:7] == ["--data", 'train=csv:it\'s "here".csv', "--data", "test=csv:-x"]
    assert len({job.given["run_dir"] for job in jobs}) == len({job.name for job in jobs}) == 4
    quick = lines_of(folder, '[[step]]\ncommand = "predict"\nname = "p"\nposterior = "map"\nqmc = [true, false]\n')
    assert quick == [
        "predict small --posterior map --qmc --name p-qmc",
        "predict small --posterior map --name p-no-qmc",
    ]


def test_checkpoints_are_each_taken_once_and_told_apart_in_names(folder: Path) -> None:
    for path in ("a/net.pt", "b/net.pt", "it's one.pt", "b/x.pt.bnn/y"):
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).touch()
    text = 'checkpoints = ["it\'s one.pt", "*/*", "./a/net.pt"]\n[[step]]\ncommand = "fit-laplace"\nplot = "{checkpoint}.png"\n'
    assert lines_of(folder, text) == [
        """fit-laplace 'it'"'"'s one.pt' --plot 'it'"'"'s one.png'""",
        "fit-laplace a/net.pt --plot a-net.pt.png",
        "fit-laplace b/net.pt --plot b-net.pt.png",
    ]
    jobs = jobs_of(folder, text)
    assert len({job.stem for job in jobs}) == 3
    assert jobs[0].stem.startswith("it-s-one.laplace.")


def test_a_name_that_no_result_has_is_shortened_and_one_that_it_has_may_not_be_too_long(folder: Path) -> None:
    data = ", ".join(f'["train=csv:{letter * 120}"]' for letter in "ab")
    text = f'[[step]]\ncommand = "extract-features"\nmodel = "mlp"\ndata = [{data}]\n'
    names = [job.name for job in jobs_of(folder, text)]
    assert [len(name) for name in names] == [100, 100]
    assert names[0] != names[1]
    flow = "[[step]]\ncommand = 'fit-laplace'\nname = '" + "n" * 80 + "'\nprior-precision = [12345678901, 2]\n"
    with pytest.raises(
        ConfigError, match=r"step 1 \(fit-laplace\): its values make a name of 107 characters \(at most 100\)"
    ):
        jobs_of(folder, flow)


def test_there_are_only_so_many_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_JOBS", 4)
    text = '[[step]]\ncommand = "fit-laplace"\nprior-precision = [{}]\n'
    assert len(jobs_of(folder, text.format("1, 2, 3, 4"))) == 4
    with pytest.raises(ConfigError, match=r"grid.toml: expected at most 4 lines; this grid has more"):
        jobs_of(folder, text.format("1, 2, 3, 4, 5"))


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
    "a line break": (FIT + 'plot = "a\\nb.png"\n', r":2: step 1 \(fit-laplace\): expected values without line breaks"),
    "one result": (FIT + "name = 'a-b'\nstructure = ['kron', 'diag']\n" + FIT + "name = 'a'\nprior-precision = [1, 2]\n[[step]]\ncommand = 'hmc'\nname = 'a-b-kron'\n", r"step 3 \(hmc\): step a-b also creates 'a-b-kron': rename one of them"),
    "one name of two values": (FIT + "trust-code = true\nlayers = ['a.b*', 'a/b*']\n", r"step 1 \(fit-laplace\): two of its lines create 'laplace-layersa-b'"),
    "refused before others": (PREDICT + "layers = ['last', '+']\nsamples = 3\n", r":5: step 1 \(predict\) layers: expected last, all or patterns"),
    "one line": ("[[step]]\ncommand = 'status'\n" + PREDICT + "[[step]]\ncommand = 'status'\nname = 's'\n", r":7: step 3 \(status\): step status has the same line: bnncli status small"),
    "predictions of one posterior": (PREDICT + "samples = [10, 20]\n", r"step 1 \(predict\): lines with different values of samples would write the same files: give the step a name"),
    "metrics of one posterior": ("[[step]]\ncommand = 'evaluate'\nbins = [5, 9]\nseed = [1, 2]\n", r"lines with different values of seed would write the same files"),
    "one trained checkpoint": ("[[step]]\ncommand = 'train'\nmodel = 'mlp'\ndata = 'train=npz:a'\nepochs = [1, 2]\n", r"different values of epochs would write the same files \(the checkpoint itself"),
}  # fmt: skip


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
    cli("grid", write_grid(folder, f"# first\ncheckpoints = {given}\n{FIT}")).expect(
        78, "grid.toml:2: checkpoints: expected checkpoint paths or patterns"
    )


def test_two_checkpoints_in_one_run_folder_are_told(cli: Cli, folder: Path) -> None:
    for name in ("a.pt", "b.pt"):
        (folder / name).touch()
    text = 'checkpoints = ["a.pt", "b.pt"]\n' + FIT + "run-dir = '{}'\n"
    cli("grid", write_grid(folder, text.replace("{}", "runs")), "-n").expect(
        78, "grid.toml:4: step 1 (fit-laplace) run-dir: a.pt and b.pt would share the run folder"
    )
    cli("grid", write_grid(folder, text.replace("{}", "runs/{checkpoint}")), "-n").expect(0)


def test_what_is_not_there_is_66_and_named(cli: Cli, folder: Path) -> None:
    cli("grid", "none.toml").expect(66, "the grid 'none.toml' does not exist")
    cli("grid", folder).expect(66)
    cli("grid", write_grid(folder, f"checkpoints = ['small', 'gone']\n{FIT}")).expect(
        66, "grid.toml:1: checkpoints: gone does not exist"
    )
    cli("grid", write_grid(folder, f"checkpoints = 'gone*'\n{FIT}")).expect(
        66, "grid.toml:1: checkpoints: no file matches 'gone*'"
    )
    made = "checkpoints = 'gone'\n[[step]]\ncommand = 'extract-features'\nfrom-npz = 'x.npz'\n"
    cli("grid", write_grid(folder, made), "-n").expect(0)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--jobs", 2, "--devices", "cpu"], "--jobs and --devices are mutually exclusive"),
        (["--devices", "0,x"], "--devices: expected GPU numbers and cpu, such as 0,1,2,3; got '0,x'"),
        (["--devices", "1,1"], "--devices: 1 is given twice"),
        (["--makefile", "-n"], "--dry-run, --makefile and --snakefile print different things: give one of them"),
        (["--jobs", 2], r"grid.toml:4: step 1 (fit-laplace) device: --jobs sets where lines run"),
    ],
)
def test_wrong_options_of_grid_itself_are_2(cli: Cli, folder: Path, words: list[object], why: str) -> None:
    cli("grid", write_grid(folder, FIT + "device = 'cuda:1'\n").name, *words).expect(2, why)
