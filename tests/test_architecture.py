"""The layers: imports point down, only the upper ones spell options, and help imports no heavy library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from bnncli.cli.commands import own_commands
from bnncli.cli.options import option_fields
from bnncli.options.declaration import flag_of

PACKAGE = Path(__file__).parents[1] / "bnncli"
LAYERS = (
    ("__init__", "__main__"),
    ("cli", "callbacks"),
    ("api",),
    ("papers",),  # nothing imports it but the command that runs it
    ("commands",),
    ("session",),
    ("artifacts", "console"),
    ("export", "figures"),
    ("models",),
    ("integrators",),
    ("inference",),
    ("posteriors",),
    ("flows", "latent", "structures"),
    ("data",),
    ("options",),
    ("evaluation",),
    ("targets", "training"),
    ("numerics", "parameters", "registry", "system"),
    ("likelihoods",),
    ("lazy", "names", "progress", "shapes"),
    ("errors",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
FLAGS = {flag_of(name) for command in own_commands() for name in option_fields(command)}
SPELLS_OPTIONS = (
    "__main__",
    "cli",
    "commands",
    "papers",
    "options",
)  # and options/, which has the functions that spell them


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """Return the part of bnncli that a module belongs to: `flows` of `bnncli.flows.radial`."""
    return [*module.split("."), "__init__"][1]


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(module: str, *, at_run_time: bool = False) -> set[str]:
    """Return the modules of bnncli that a module imports, inside functions as well."""
    found: set[str] = set()
    nodes: list[ast.AST] = [TREES[module]]
    for node in nodes:
        if not (at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in TREES else str(node.module) for name in inner}
    return {name for name in found if name.startswith("bnncli.")}


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in TREES
        for name in imported(module)
        if part_of(name) != part_of(module) and RANK[part_of(name)] <= RANK[part_of(module)]
        if (module, part_of(name)) != ("bnncli.commands.reproduce", "papers")
    ]
    assert not wrong


def test_no_part_has_a_circle_of_imports() -> None:
    graph = {
        module: {name for name in imported(module, at_run_time=True) if part_of(name) == part_of(module)}
        for module in TREES
    }
    assert list(TopologicalSorter(graph).static_order())


def test_below_the_commands_no_option_is_spelled() -> None:
    """Messages there name options by their fields, between NUL characters; the command line spells them."""
    for module, tree in TREES.items():
        if part_of(module) in SPELLS_OPTIONS:
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for text in texts:
            assert text in docstrings or not {*re.findall(r"--[a-z][a-z-]*", text)} & FLAGS, (module, text)
            assert {flag_of(field) for field in re.findall(r"\0(\w*)\0", text)} <= FLAGS, (module, text)


@pytest.mark.parametrize("words", [["--help"], ["refine", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_no_heavy_library(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "bnncli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "typer" in loaded
    assert not loaded & {"torch", "pyro", "sklearn", "h5py", "numpy", "scipy", "matplotlib"}
