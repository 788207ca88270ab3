"""Rows that two splits of a run have in common: what was tuned on must not be tested on."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import combinations

import numpy as np

from bnncli.artifacts.features import read_sample_ids
from bnncli.artifacts.files import read_header
from bnncli.artifacts.run_folder import RunFolder

FITTED_ON = {"train", "val"}


def shared_rows(folder: RunFolder, names: Collection[str] | None = None) -> list[str]:
    """A warning for every two in-distribution splits, of those named or of all, that hold the same rows of the same source.

    A rotated or corrupted copy stands beside what it is a copy of without one, unless that is for training or tuning.
    """
    sources, shifted = {}, set()
    for name in (split for split in folder.splits() if names is None or split in names):
        header = read_header(folder.features(name))
        if not header.meta.get("is_ood"):
            params = header.provenance.get("params", {})
            shifted |= {name} if {"rotate", "corrupt"} & {*params} else set()
            sources[name] = re.sub(r"@\d+$", "", str(header.provenance.get("source")))
    found = []
    for first, second in combinations(sources, 2):
        is_copy = {first, second} & shifted and not {first, second} & FITTED_ON
        if sources[first] != sources[second] or is_copy:
            continue
        ids, others = (read_sample_ids(folder.features(name)) for name in (first, second))
        count = len(np.intersect1d(ids, others))
        if count:
            found.append(
                f"splits {first!r} and {second!r} share {count} rows of {sources[first]}: scores on one depend "
                "on what was fitted or tuned on the other"
            )
    return found
