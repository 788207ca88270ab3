"""The documentation is true: its commands parse, blocks marked `<!-- run -->` run, pages and links exist, words are few."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from problems.documented import DOCS, ROOT, Block, blocks_of, run_block, shortened

from bnncli.cli.build import parser
from bnncli.cli.commands import all_commands, own_commands
from bnncli.cli.options import option_fields
from bnncli.options.declaration import flag_of

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GENERATED = ("commands-", "common", "parts", "scores", "configuration", "exit-codes", "python")


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each bnncli command in a block of a shell."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            ends = [index for index, word in enumerate(words) if word in ("&&", "|", ";", ">")]
            command, words = (words[: ends[0]], words[ends[0] + 1 :]) if ends else (words, [])
            if command[:1] == ["bnncli"]:
                yield command[1:]
            elif "bnncli" in command[:6] and command[0] == "torchrun":
                yield command[command.index("bnncli") + 1 :]


def is_generated(page: Path) -> bool:
    return page.parent.name == "reference" and page.name.startswith(GENERATED)


LINES = [
    pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words)[:60]}")
    for page in PAGES
    if not is_generated(page)
    for block in blocks_of(page)
    if block.language == "sh"
    for words in commands_of(block)
    if "tempered" not in words  # a part that the page itself adds: tests/test_one_file_a_part.py
]


@pytest.mark.parametrize("words", LINES)
def test_a_command_of_the_pages_parses(words: list[str]) -> None:
    parser()(words, standalone_mode=False)


def test_inline_commands_and_options_exist() -> None:
    """What stands between backquotes in running text: `bnncli X`, and every --option of any command."""
    flags = {flag_of(name) for command in all_commands() for name in option_fields(command)}
    flags |= {"--help", "--help-all", "--version", "--install-completion", "--show-completion"}
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"`([^`\n]+)`", text):
            if not code.startswith(("bnncli", "--", *(command.name for command in own_commands()))):
                continue
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code):
                assert flag in flags, f"{page.name}: {code}"
            if found := re.match(r"bnncli ([a-z][a-z-]*)", code):
                known = {command.parent or command.name for command in own_commands()}
                assert found[1] in known, f"{page.name}: {code}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of README and the pages, with those that come from the code."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "README.md", folder)
    words = [sys.executable, DOCS / "generate.py", folder / "docs/reference"]
    subprocess.run(words, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


def test_links_lead_to_pages_and_files_that_exist(site: Path) -> None:
    for page in [site / "README.md", *sorted((site / "docs").rglob("*.md"))]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            place = target.partition("#")[0]
            if place and not place.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / place).exists(), f"{page.relative_to(site)}: {target}"


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page(site: Path) -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = site / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def test_every_extra_is_in_the_table() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = [line for line in (DOCS / "how-to/install.md").read_text().splitlines() if line.startswith("| `bnncli[")]
    assert sorted(name for row in rows for name in re.findall(r"bnncli\[(\w+)\]", row)) == sorted(extras)


def test_readme_is_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


LIBRARIES = (
    "text-classifier.md",
    "training.md",
)  # run beside the libraries: tests/models/test_hf_tutorial.py, tests/callbacks
RUNNABLE = [page for page in PAGES if any(one.runs for one in blocks_of(page)) and page.name not in LIBRARIES]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the embedded case under the names that the pages use, and files for pages on predictions and new data."""
    tmp_path = tmp_path_factory.mktemp("docs")
    for name in ("train", "val", "test", "mnist"):
        shutil.copy(ROOT / "fixtures" / f"{name}.npz", tmp_path)
    for name in ("ckpt.pt", "lenet5-fmnist.pt"):
        shutil.copy(ROOT / "fixtures" / "lenet5-fmnist.pt", tmp_path / name)
    with np.load(ROOT / "fixtures" / "test.npz") as file:
        images, labels = file["x"], file["y"]
    (tmp_path / "incoming").mkdir()
    for index, image in enumerate(images[:3]):
        Image.fromarray(image.squeeze()).save(tmp_path / "incoming" / f"{index}.png")
    draw = np.random.default_rng(0)
    logits = 3 * np.eye(3)[labels[:300] % 3] + draw.standard_normal((300, 3))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.savez(tmp_path / "predictions.npz", probs=probs, label=labels[:300] % 3)
    sites = np.array(["north", "south"])[np.arange(300) % 2]
    rows = [
        ",".join([*map(str, row), str(label), site])
        for row, label, site in zip(probs, labels[:300] % 3, sites, strict=True)
    ]
    (tmp_path / "predictions.csv").write_text("\n".join(["p_0,p_1,p_2,label,site", *rows]) + "\n")
    return tmp_path


@pytest.fixture(scope="module")
def fitted(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a run of ckpt.pt: features, a Gaussian and its predictions."""
    folder = tmp_path_factory.mktemp("fitted") / "data"
    shutil.copytree(embedded, folder)
    run_block(
        "bnncli extract-features ckpt.pt --model lenet5 --data train=npz:train.npz --data val=npz:val.npz"
        " --data test=npz:test.npz --ood mnist=npz:mnist.npz\n"
        "bnncli fit-laplace ckpt.pt --structure kron\nbnncli predict ckpt.pt\nbnncli evaluate ckpt.pt --split test",
        folder,
    )
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_one_after_another(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Pages that extract features start from the embedded files, others from a run of theirs."""
    folder, blocks = tmp_path / "data", [block for block in blocks_of(page) if block.runs]
    is_from_scratch = any("--data train=" in block.text for block in blocks)
    shutil.copytree(request.getfixturevalue("embedded" if is_from_scratch else "fitted"), folder)
    for block in blocks:
        run_block(shortened(block.text), folder, language=block.language)
