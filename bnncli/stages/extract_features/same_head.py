"""Splits that are added to a run belong with those that it has."""

from __future__ import annotations

from typing import Any

from bnncli.artifacts.features import FeatureFile, head_digest
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import differing_names
from bnncli.errors import DataError
from bnncli.likelihoods import BINARY, MULTILABEL, recorded_name
from bnncli.session.inputs import run_classes
from bnncli.session.run import Run

_TOLD = {None: "one class per example", MULTILABEL: "several labels per example", BINARY: "two classes from one logit"}


def check_same_head(
    run: Run, content: FeatureFile, names: list[str], record: dict[str, Any] | None, shared: dict[str, Any]
) -> None:
    """Splits of a run that this command does not make have its head, classes and preprocessing, unless they are stale.

    Raises:
        DataError: they have other ones.
    """
    weights_digest = record["weights_digest"] if record else None
    for name in sorted({*run.folder.splits()} - {*names}):
        path = run.folder.features(name)
        header = read_header(path)
        if header.weights_digest == weights_digest and recorded_name(header.meta) != content.likelihood:
            there, here = (_TOLD[one] for one in (recorded_name(header.meta), content.likelihood))
            raise DataError(
                f"split {name!r} of this run has {there}, but the new one has {here}",
                code="mixed_options",
                path=path,
                hint="give --task, extract all splits in one command with --force, or use another --run-dir",
            )
        theirs = header.provenance.get("params", {})
        if header.weights_digest != weights_digest and theirs.get("state") == shared.get("state"):
            continue
        for option in differing_names(theirs, shared):
            what = "model preprocessing" if option == "transform" else f"--{option.replace('_', '-')}"
            raise DataError(
                f"split {name!r} of this run was extracted with another {what} (then {theirs.get(option)}, now "
                f"{shared[option]})",
                code="mixed_options",
                path=path,
                hint="use the same options, extract all splits in one command with --force, or use another --run-dir",
            )
        if header.meta.get("head_digest") != head_digest(content):
            raise DataError(
                f"split {name!r} of this run has another head than the new one",
                code="wrong_head",
                path=path,
                hint="extract all splits in one command with --force, or use another --run-dir",
            )
    run_classes(run.folder, content, weights_digest=weights_digest, without=names)
