"""Parts of every family, one small file each, in a copy of the package and in an installed distribution."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from copied_package import PACKAGE, run_with_files
from new_parts import OURS, THEIRS, text_of
from problems.command_line import Invocation
from torch import nn

from bnncli import registry
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import UsageError

pytestmark = pytest.mark.long  # copies the package and runs it; in `.ci/run`

SPLITS = {"train": "data", "test": "data", "far": "ood"}
HELPS = (
    "--help",
    "fit-laplace --help",
    "refine --help-all",
    "predict --help-all",
    "extract-features --help",
    "evaluate --help",
    "greet --help",
    "salute --help",
)
TABLES = {"scores": ("SCORES", "SCORE"), "detectors": ("DETECTORS", "DETECTOR")}  # whose parts are entries, not files
FOLDERS = {
    "data": "data/kinds",
    "models": "models/kinds",
    "networks": "models/architectures",
}  # of the others: the family
NEVER = "SETTINGS = {}\nraise RuntimeError('it was imported')\n"


def lines_of(run: str, part: dict[str, str]) -> dict[str, str]:
    """Command lines that use a part of each family, by what they are for; FOLDER is where the files are."""
    net = f"FOLDER/{run}.pt"
    data = " ".join(f"--{way} {split}={part['data']}:FOLDER/{split}.txt" for split, way in SPLITS.items())
    saved = f"extract-features FOLDER/{run}-saved --model {part['models']}:FOLDER/weights.txt {data}"
    return {
        "extract saved": f"{saved} --json",
        "extract saved again": f"{saved} --json --feature-node x --run-dir FOLDER/{run}-again",
        "extract": f"extract-features {net} --model {part['networks']} {data}",
        "fit": f"fit-laplace {net} --structure {part['structures']} --prior-precision 1",
        "whole": f"fit-laplace {net} --layers all --trust-code --structure {part['structures']} --prior-precision 1",
        "refine": f"refine {net} --flow {part['flows']} --{part['flows']}-push 0.5 --epochs 1 --elbo-draws 16",
        "predict": f"predict {net} --integrator mc --integrator probit --integrator {part['integrators']} --blend 0.5 --samples 40",
        "evaluate": f"evaluate {net} --score {part['detectors']} --bootstrap 0 --json",
        "inspect": f"inspect {net}.bnn/posteriors/refine.safetensors --json",
        "base": f"inspect {net}.bnn/posteriors/laplace.safetensors --json",
        "verify": f"verify {net}.bnn",
        "command": f"{part['commands']} {net} --times 3",
    }


LINES = {"ours": lines_of("ours", OURS), "theirs": lines_of("theirs", THEIRS)}
PARTS = {"ours": OURS, "theirs": THEIRS}


def install(folder: Path, parts: dict[str, str], *, name: str = "theirs") -> Path:
    """A distribution in a folder of the search path, with one module for each part."""
    package, metadata = folder / name, folder / f"{name}-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").touch()
    metadata.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = []
    for family, part in parts.items():
        (package / f"{family}_part.py").write_text(text_of(family, part))
        group = "commands" if family == "commands" else family
        groups.append(f"[bnncli.{group}]\n{part} = {name}.{family}_part\n")
    metadata.joinpath("entry_points.txt").write_text("\n".join(groups))
    return folder


@cache
def readme_part() -> tuple[str, str, tuple[str, str]]:
    """Code and entry points of the part that the documentation shows, its command line on a run of this file, and one to compare it with."""
    section = (PACKAGE.parent / "docs/development/parts.md").read_text()
    code, table, line = re.findall(r"```(?:python|toml|sh)\n(.*?)```", section, re.DOTALL)
    groups = tomllib.loads(table)["project"]["entry-points"]
    entries = [f"[{group}]\n{name} = {place}" for group, of in groups.items() for name, place in of.items()]
    command, words = "predict FOLDER/ours.pt --split test --json", line.split()
    assert words[:3] == ["bnncli", "predict", "ckpt.pt"]
    plain = f"{command} --posterior laplace --integrator plug-in"
    return code, "\n".join(entries), (f"{command} {' '.join(words[3:])}", plain)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Invocation]:
    """What every line did, with our parts in a copy of the package and theirs in a distribution."""
    folder = tmp_path_factory.mktemp("parts")
    files = {
        f"{FOLDERS.get(family, family)}/{name}.py": text_of(family, name)
        for family, name in OURS.items()
        if family not in TABLES
    }
    appended = {
        f"evaluation/{family}.py": f'{text_of(family, OURS[family])}\n{table}["{OURS[family]}"] = {constant}\n'
        for family, (table, constant) in TABLES.items()
    }
    install(folder, THEIRS)
    install(folder, {"flows": "idle"}, name="idlers").joinpath("idlers/flows_part.py").write_text(NEVER)
    code, entries, compared = readme_part()
    install(folder, {}, name="readme")
    (folder / "bnncli_tempered.py").write_text(code)
    (folder / "readme-1.0.dist-info/entry_points.txt").write_text(entries)
    write_inputs(folder)
    lines = [*HELPS, *(line for of in LINES.values() for line in of.values()), *compared]
    words = [line.replace("FOLDER", str(folder)).split() for line in lines]
    return dict(
        zip(lines, run_with_files({**files, "flows/never.py": NEVER}, folder, words, appended=appended), strict=True)
    )


def write_inputs(folder: Path) -> None:
    """The weights of a network of two layers, and examples that it labels."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    inputs = torch.randn(60, 4)
    rows = torch.cat([inputs, net(inputs).argmax(dim=1, keepdim=True)], dim=1).detach().numpy()
    np.savetxt(folder / "weights.txt", torch.cat([one.detach().flatten() for one in net.parameters()]))
    for name in PARTS:
        torch.save(net.state_dict(), folder / f"{name}.pt")
    np.savetxt(folder / "train.txt", rows[:40])
    np.savetxt(folder / "test.txt", rows[40:])
    np.savetxt(folder / "far.txt", rows[40:] + 4)


def test_help_lists_parts_and_their_options_without_importing_them(done: dict[str, Invocation]) -> None:
    for parts in PARTS.values():
        assert f"  {parts['commands']} " in done["--help"].stdout
        assert parts["flows"] in done["refine --help-all"].stdout
        assert f"--{parts['flows']}-push" in done["refine --help-all"].stdout
        assert parts["integrators"] in done["predict --help-all"].stdout
        assert parts["networks"] in done["extract-features --help"].stdout
        assert f"{parts['models']}:FILE" in done["extract-features --help"].stdout
        assert f"{parts['data']}:FILE" in done["extract-features --help"].stdout
        assert parts["scores"] in done["evaluate --help"].stdout
        assert parts["detectors"] in done["evaluate --help"].stdout
        assert f"{parts['structures']} (one variance for all)" in " ".join(done["fit-laplace --help"].stdout.split())
        assert "--times" in done[f"{parts['commands']} --help"].stdout
    assert "(halfway, middle)" in " ".join(done["predict --help-all"].stdout.split())
    assert "idle" in done["refine --help-all"].stdout
    assert "never" in done["refine --help-all"].stdout


@pytest.mark.parametrize("run", PARTS)
def test_every_part_runs_and_what_it_made_is_read_back(run: str, done: dict[str, Invocation]) -> None:
    did = {what: done[line] for what, line in LINES[run].items()}
    failed = {what: one for what, one in did.items() if one.code}
    assert not failed, failed
    params = json.loads(did["inspect"].stdout)["provenance"]["params"]
    flow = PARTS[run]["flows"]
    assert (params["flow"], params[f"{flow}_push"], params["scale"]) == (flow, 0.5, None)
    rows = json.loads(did["evaluate"].stdout)["rows"]
    made = {(row["posterior"], row["integrator"]) for row in rows}
    assert {("laplace", PARTS[run]["integrators"]), ("laplace", "probit"), ("refine", "mc")} <= made
    assert all(PARTS[run]["scores"] in {metric["name"] for metric in row["metrics"]} for row in rows)
    told = [metric for row in rows for metric in row["metrics"] if metric["name"] == "auroc"]
    assert PARTS[run]["detectors"] in {metric["score"] for metric in told}
    own, again = (json.loads(did[line].stdout)["outputs"][0] for line in ("extract saved", "extract saved again"))
    assert own["content_digest"] == again["content_digest"]
    structure = PARTS[run]["structures"]
    assert json.loads(did["base"].stdout)["meta"]["structure"] == structure
    assert did["command"].stdout.split("\n")[:3] == [f"{PARTS[run]['commands']} {run}.pt"] * 3


def test_a_structures_short_way_to_the_logits_says_what_pulling_back_says(done: dict[str, Invocation]) -> None:
    found = []
    for lines in LINES.values():
        rows = json.loads(done[lines["evaluate"]].stdout)["rows"]
        row = next(row for row in rows if (row["posterior"], row["integrator"]) == ("laplace", "probit"))
        found.append({metric["name"]: metric["value"] for metric in row["metrics"]})
    assert found[0]["nll"] == pytest.approx(found[1]["nll"], rel=1e-5)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Puts distributions on the search path of this process; what is known of them is forgotten behind the test."""
    caches = [one for one in vars(registry).values() if hasattr(one, "cache_clear")]

    def put(parts: dict[str, str], *, name: str = "theirs") -> Path:
        folder = install(tmp_path / name, parts, name=name)
        monkeypatch.syspath_prepend(str(folder))
        for one in caches:
            one.cache_clear()
        return folder / name

    yield put
    monkeypatch.undo()
    for module in [module for module in sys.modules if module.split(".")[0] in ("theirs", "others")]:
        del sys.modules[module]
    for one in caches:
        one.cache_clear()


def test_a_name_that_is_ours_already_is_refused_and_says_whose_it_is(installed: Callable[..., Path]) -> None:
    installed({"flows": "radial"})
    with pytest.raises(UsageError, match=r"'radial' of bnncli.flows from the package 'theirs' .* with this name"):
        registry.names("flows")
    assert registry.load_class("flows", "radial").__module__ == "bnncli.flows.radial"


def test_a_name_that_two_distributions_have_is_refused(installed: Callable[..., Path]) -> None:
    for name in ("theirs", "others"):
        installed({"flows": "eddy"}, name=name)
    with pytest.raises(UsageError, match=r"the package '(theirs|others)' also has a part with this name"):
        registry.names("flows")


def test_a_part_that_fails_to_import_is_told_in_one_line(installed: Callable[..., Path]) -> None:
    (installed({"integrators": "halfway"}) / "integrators_part.py").write_text("import no_such_module\n")
    assert "halfway" in registry.names("integrators")
    with pytest.raises(
        UsageError, match="'theirs' cannot be used: importing it failed with ModuleNotFoundError"
    ) as told:
        registry.load_class("integrators", "halfway")
    assert "\n" not in told.value.message
    assert told.value.hint == "pip uninstall theirs, or install another release of it"


def test_a_part_without_what_its_family_needs_is_told(installed: Callable[..., Path]) -> None:
    installed({"flows": "eddy"}).joinpath("flows_part.py").write_text("class Eddy:\n    recipe = None\n")
    with pytest.raises(UsageError, match="its class Eddy has no settings"):
        registry.load_module("flows", "eddy")


def test_the_part_of_ones_own_that_the_readme_shows_runs(done: dict[str, Invocation]) -> None:
    *_, (tempered, plain) = readme_part()
    assert done[tempered].code == 0, done[tempered].stderr
    found, own = (read_predictions(Path(done[line].json["outputs"][0]["path"])).probs for line in (tempered, plain))
    cool = own ** (1 / 3)
    assert np.allclose(found, cool / cool.sum(axis=1, keepdims=True), atol=1e-6)
