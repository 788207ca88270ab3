"""Saved classifiers of scikit-learn as the arrays that they are made of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.checkpoints.pickles import list_globals, needs_trust
from bnncli.checkpoints.sniff import sniff
from bnncli.errors import DataError, Untrusted
from bnncli.models._sklearn_arrays import Estimator, arrays_of, read_skops
from bnncli.names import quoted
from bnncli.options.command_line import pasted
from bnncli.system.input_files import open_regular


def convert_classifier(path: Path, target: Path, *, trust_pickle: bool) -> dict[str, np.ndarray]:
    """The arrays of a classifier in a skops file, or, with trust_pickle, in a pickle or joblib file, whose code is then run.

    Args:
        target: where they are to go, for what is said.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged, or no classifier whose probabilities are a softmax or a sigmoid of linear scores.
        Untrusted: it is a pickle, or names types of other libraries.
    """
    with open_regular(path) as stream:
        is_pickle = sniff(stream) == "pickle"
        names = list_globals(stream, "pickle") if is_pickle and not trust_pickle else []
    try:
        if is_pickle and not trust_pickle:
            hint = f"if you trust this file, run: {pasted('convert', str(path), str(target), trust_pickle=True)}"
            raise Untrusted(needs_trust(names).message, code="needs_code", hint=hint)
        found = arrays_of(_unpickled(path) if is_pickle else read_skops(path))
    except (DataError, Untrusted) as error:
        shown = quoted(path, limit=300)
        message = error.message if error.message.startswith(shown) else f"{shown}: {error.message}"
        raise type(error)(message, hint=error.hint, code=error.code, path=path) from error
    return {name: array.astype(str) if array.dtype.kind == "O" else array for name, array in found.items()}


def _unpickled(path: Path) -> Estimator:
    """The estimator in a pickle, which is run; joblib reads plain pickles too."""
    import joblib  # which scikit-learn needs itself

    if (folder := str(Path.cwd())) not in sys.path:  # where the user's own classes most likely are
        sys.path.insert(0, folder)
    try:
        model: Any = joblib.load(path)
    except Exception as error:  # whatever the code in it raises
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        raise DataError(
            f"cannot load the pickle: {why}", code="unpicklable",
            hint="the modules that define its classes must be importable; use the scikit-learn version that wrote "
                "the file",
        ) from error  # fmt: skip
    if not hasattr(model, "__dict__"):
        raise DataError(f"expected a scikit-learn classifier, got {type(model).__name__}", code="not_the_head")
    return Estimator.of(model)
