"""Generate the code shipped with a file of tensors: a head in about sixty lines that only needs torch and safetensors.

It is the source of the checked steps (`steps`), without type annotations.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence

from bnncli.export import MARK
from bnncli.export import steps as steps_module
from bnncli.export.steps import Step


def source_of(steps: Sequence[Step]) -> str:
    """Return the source of a Python module that loads the head from its file of tensors."""
    wanted = [step.__name__ for step in steps]
    tree = ast.parse(inspect.getsource(steps_module))
    trees = [tree, *(ast.parse(inspect.getsource(step)) for step in steps)]
    found = {node.name: node for one in trees for node in one.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    outputs = next(
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node).startswith("OUTPUTS")
    )
    parts = [ast.unparse(_plain(found[one])) for one in ("PortableHead", *dict.fromkeys(wanted))]
    uses_math = any("math." in part for part in parts)
    return "\n".join(
        [
            f'{MARK} Outputs by name, of features (B, D): load("FILE.safetensors")(features)["probs"]."""',
            *(["import math"] if uses_math else []),
            "import torch",
            "from safetensors.torch import load_file",
            ast.unparse(outputs),
            *parts,
            f"def load(path):\n    return PortableHead(({', '.join(wanted)},), load_file(path)).eval()",
            "",
        ]
    )


def _plain(node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
    """Return the definition without type annotations and docstrings."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            inner.returns = None
            for argument in inner.args.args:
                argument.annotation = None
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:]
    return node
