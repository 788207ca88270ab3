"""The lines of a grid: what they say, what they are called, which wait for which."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from problems.grids import jobs_of, lines_of

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
