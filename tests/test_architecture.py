"""The layers: imports point down, terminals are known to the command line alone, help needs no heavy library."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from bnncli.cli.commands import own_commands
from bnncli.cli.options import option_fields
from bnncli.options.declaration import flag_of

PACKAGE = Path(__file__).parents[1] / "bnncli"
LAYERS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("__init__",),  # what Python sees; what only asks for the version or for errors asks for nothing of it
    ("opened",),
    ("run",),
    ("console", "storage"),
    ("pages",),
    ("exported",),
    ("models",),
    ("experiments",),
    ("checkpoints", "extraction", "figures", "integrators", "networks"),
    ("inference",),
    ("posteriors",),
    ("logits",),
    ("covariances", "curvature", "flows", "latent", "network_curvature"),
    ("data",),
    ("options",),
    ("decisions",),
    ("acquisition", "evaluation"),
    ("targets", "training"),
    ("machine", "numerics", "registry", "theta"),
    ("likelihoods",),
    ("lazy", "names", "progress", "shapes"),
    ("errors",),
    ("",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """On one worker; a million nodes that stay are not for the garbage collector, and go when the tests are done."""
    gc.disable()
    for path in MODULES:
        nodes_of(path)
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


def imported(path: Path) -> set[str]:
    """First part below bnncli of everything a module imports, inside functions as well."""
    found = set()
    for node in nodes_of(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "bnncli":
                names = [f"bnncli.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] if "." in name else "" for name in names if name.split(".")[0] == "bnncli"}
    return found - {"__version__"}


def own_part(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def external(path: Path) -> set[str]:
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


def test_imports_point_down() -> None:
    for path in MODULES:
        own = own_part(path)
        assert own in RANK, f"{own} has no place in the layers"
        assert not {name for name in imported(path) - {own} if RANK[name] <= RANK[own]}, path


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in MODULES}


def modules_imported(path: Path) -> set[str]:
    """Our modules that a module imports when it is used, inside functions as well; not what is for type checkers alone."""
    blocks = [node for node in nodes_of(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    found: set[str] = set()
    for node in nodes_of(path):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else str(node.module) for name in inner}
    return found & NAMES.keys()


@pytest.mark.parametrize("room", sorted({own_part(path) for path in MODULES if path.parent != PACKAGE}))
def test_no_room_has_a_circle_of_imports(room: str) -> None:
    within = {name for name, path in NAMES.items() if own_part(path) == room}
    assert list(TopologicalSorter({name: modules_imported(NAMES[name]) & within for name in within}).static_order())


def test_imports_inside_functions_are_seen() -> None:
    late = "bnncli.artifacts.hdf5"
    assert late in modules_imported(PACKAGE / "storage/artifacts.py")
    tree = ast.parse((PACKAGE / "storage/artifacts.py").read_text())
    assert all(node.module != late for node in tree.body if isinstance(node, ast.ImportFrom))


def texts(path: Path) -> list[str]:
    """Every string of a module but its docstrings."""
    homes = [node for node in nodes_of(path) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    firsts = [node.body[0] for node in homes if node.body]
    skipped = {id(first.value) for first in firsts if isinstance(first, ast.Expr)}
    found = [node for node in nodes_of(path) if isinstance(node, ast.Constant) and id(node) not in skipped]
    return [node.value for node in found if isinstance(node.value, str)]


FLAGS = {flag_of(name) for command in own_commands() for name in option_fields(command)}
SILENT = [path for path in MODULES if own_part(path) not in ("__main__", "cli", "commands")]
SPELLING = {
    "declaration.py": ["--"],
    "command_line.py": ["--"] * 4,
}  # in options/: that of an option, and those of a command line


def test_below_the_stages_options_are_meant_by_their_fields() -> None:
    for path in SILENT:
        said = texts(path)
        assert not {flag for text in said for flag in re.findall(r"--[a-z][a-z-]*", text)} & FLAGS, path
        own = SPELLING.get(path.name, []) if own_part(path) == "options" else []
        assert own_part(path) == "figures" or [text for text in said if text.endswith("--")] == own, path
        fields = {field for text in said for field in re.findall(r"\0(\w*)\0", text)}
        assert {flag_of(field) for field in fields} <= FLAGS, path
        assert not [text for text in said if "‹" in text], path


def test_below_the_stages_no_text_is_a_command_line() -> None:
    """Commands to be pasted are rendered from options (options/command_line.py); a text may name one without any."""
    for path in SILENT:
        assert not [text for text in texts(path) if re.search(r"\bbnncli [a-z-]+( [^ ]+)* -", text)], path


def test_what_lies_loose_is_what_everything_stands_on() -> None:
    loose = {path.stem for path in PACKAGE.glob("*.py")}
    assert loose == {"__init__", "__main__", "console", "errors", "lazy", "names", "progress", "registry", "shapes"}


def test_stages_has_one_entry_a_command() -> None:
    entries = {path.stem for path in (PACKAGE / "commands").iterdir() if not path.name.startswith("_")}
    assert entries == {command.stage for command in own_commands()}


def test_only_the_command_line_knows_a_terminal() -> None:
    for path in MODULES:
        if own_part(path) not in ("cli", "console"):
            assert not external(path) & {"typer", "rich", "click"}, path


def test_modules_stay_small_and_say_what_they_are() -> None:
    for path in MODULES:
        text = path.read_text()
        assert len(text.splitlines()) <= 900, path
        assert not text.strip() or ast.get_docstring(tree_of(path)), path


def test_nothing_asks_which_layout_it_has() -> None:
    for path in MODULES:
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        asked = [node for node in calls if ast.unparse(node.func) in ("isinstance", "issubclass", "type")]
        places = [ast.unparse(argument).split(".")[-1] for node in asked for argument in node.args]
        assert not [place for place in places if place == "layout" or "Layout" in place], path
        probed = [node for node in calls if ast.unparse(node.func) in ("hasattr", "getattr")]
        named = [node for node in probed if isinstance(node.args[1], ast.Constant)]
        assert not [node for node in named if ast.unparse(node.args[0]).endswith("layout")], path


# Where a shape or a size is looked at as such, and nothing is made of logits.
LOOKS_AT_SIZES = {
    "data/_labels.py": "labels in a column",
    "extraction/features.py": "a network that returns its one output without an axis",
    "stages/evaluate/thinned.py": "inputs can be told apart in networks of one output alone",
    "theta/head.py": "the plural of output",
}
_OUTPUTS = r"(\w+\.)*(num_)?outputs|len\([\w.]*(weight|logits|mean)\)"
_SIZE = re.compile(
    rf"{_OUTPUTS}|sizes\[-?1\]|(\w+\.)*(logits?|labels|mean|center|prob\w*|weight|variance|scaled)\.shape\[.*\]"
)


def decides_by_size(path: Path) -> list[str]:
    """Comparisons of a number of outputs, or of an axis, with one or two; and the larger of one and two."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Lt):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("max", "min"):
            sides = node.args
        else:
            continue
        has_number = any(isinstance(side, ast.Constant) and side.value in (1, 2) for side in sides)
        if has_number and any(_SIZE.fullmatch(ast.unparse(side)) for side in sides):
            found.append(ast.unparse(node))
    return found


def test_only_likelihoods_decide_what_a_single_logit_means() -> None:
    found = {str(path.relative_to(PACKAGE)): decides_by_size(path) for path in MODULES}
    found = {name: cases for name, cases in found.items() if cases and not name.startswith("likelihoods/")}
    assert found.keys() == LOOKS_AT_SIZES.keys(), found
    assert decides_by_size(PACKAGE / "likelihoods/__init__.py")


def test_only_likelihoods_write_the_log_probability_of_labels() -> None:
    for path in MODULES:
        if own_part(path) != "likelihoods":
            names = {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)}
            names |= {alias.name for node in nodes_of(path) if isinstance(node, ast.ImportFrom) for alias in node.names}
            assert not {name for name in names if "cross_entropy" in name or name == "nll_loss"}, path


def test_nothing_imports_click() -> None:
    assert all("click" not in external(path) for path in MODULES)


def test_no_module_imports_what_is_slow_to_import() -> None:
    """scipy.stats and sklearn take more than a second: a function may import them, and bnncli.lazy has scipy.special."""
    for path in MODULES:
        found = set()
        for node in tree_of(path).body:
            if isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
        assert not found & {"scipy", "sklearn", "pandas", "arviz_stats", "matplotlib", "pyro"}, path


@pytest.mark.parametrize("words", [["--help"], ["refine", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_no_heavy_library(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "bnncli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "typer" in loaded
    assert not loaded & {"torch", "pyro", "sklearn", "h5py", "numpy", "scipy", "matplotlib"}
