"""Sample files: draws and sampler statistics as HDF5 in the layout of netCDF-4, which ArviZ opens.

One HDF5 group per ArviZ group. Every dimension has a coordinate and a dimension scale, without which readers lose its
name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bnncli import __version__
from bnncli.artifacts.hdf5 import Array, check_digest, header_of, open_hdf5, read_contents, write_hdf5
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError
from bnncli.names import printable

BOOLEAN_STATS = ("diverging",)


@dataclass(frozen=True)
class SampleFile:
    """Draws of a sampler, of a last layer or of other parameters of a network, whose layout is in the header.

    Attributes:
        head_weight: (C, T, K, D) float32.
        head_bias: (C, T, K) float32 or None.
        stats: name to (C, T): lp, energy, acceptance_rate, diverging, step_size, n_steps.
        constants: name to array, such as prior_precision and prior_mean.
        theta: (C, T, P) float32, instead of a head's weight and bias.
    """

    head_weight: Array | None
    head_bias: Array | None
    stats: dict[str, Array]
    constants: dict[str, Array]
    header: Header | None = None
    theta: Array | None = None

    @property
    def draws(self) -> dict[str, Array]:
        """The drawn variables, each (C, T, ...), by their names in the file."""
        named = {"head_weight": self.head_weight, "head_bias": self.head_bias, "theta": self.theta}
        return {name: values for name, values in named.items() if values is not None}


def write_samples(
    target: Path,
    samples: SampleFile,
    *,
    outputs: list[str],
    created_at: str,
    name: str,
    sampler_library: tuple[str, str],
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a sample file and return its content digest.

    Args:
        outputs: names of the K outputs, the coordinate `class`.
        sampler_library: name and version of the sampler.
    """
    arrays: dict[str, Array] = {f"posterior/{name}": values for name, values in samples.draws.items()}
    sizes: dict[str, int] = {}
    for variable, values in samples.draws.items():
        sizes |= zip(_AXES[variable], values.shape, strict=True)
    for group, axes in (("posterior", sizes.keys() - {"class"}), ("sample_stats", {"chain", "draw"})):
        arrays |= {f"{group}/{axis}": np.arange(sizes[axis], dtype=np.int64) for axis in sorted(axes)}
    for key, values in samples.stats.items():
        arrays[f"sample_stats/{key}"] = values.astype(np.int8) if key in BOOLEAN_STATS else values
    for key, values in samples.constants.items():
        arrays[f"constant_data/{key}"] = values
        for axis, size in enumerate(values.shape):
            arrays[f"constant_data/{key}_dim_{axis}"] = np.arange(size, dtype=np.int64)

    def decorate(file: h5py.File) -> None:
        file.attrs.update({"Conventions": "ArviZ", "name": printable(name)})
        for group in ("posterior", "sample_stats"):
            _attach_scales(file[group])
            file[group].attrs.update(
                {
                    "created_at": created_at,
                    "creation_library": "bnncli",
                    "creation_library_version": __version__,
                    "inference_library": sampler_library[0],
                    "inference_library_version": sampler_library[1],
                }
            )
            file[group].attrs["sample_dims"] = ["chain", "draw"]
        for key, values in samples.constants.items():
            for axis in range(values.ndim):
                name_of_axis = f"{key}_dim_{axis}"
                file["constant_data"][name_of_axis].make_scale(name_of_axis)
                file["constant_data"][key].dims[axis].attach_scale(file["constant_data"][name_of_axis])
        for key in BOOLEAN_STATS:
            if key in file["sample_stats"]:
                file["sample_stats"][key].attrs["dtype"] = "bool"

    texts: dict[str, str | list[str]] = {"posterior/class": outputs} if "class" in sizes else {}
    return write_hdf5(
        target,
        arrays,
        texts,
        kind="samples",
        meta=meta,
        provenance=provenance,
        may_replace=may_replace,
        decorate=decorate,
    )


def read_constant(path: Path, name: str) -> Array:
    """Read one array of a sample file's constants, but no draws. Raises DataError if it is missing."""
    with open_hdf5(path) as file:
        if f"constant_data/{name}" not in file:
            raise DataError(f"{path} is damaged: it has no constant_data/{name}", code="damaged", path=path)
        return file[f"constant_data/{name}"][()]


_AXES = {
    "head_weight": ("chain", "draw", "class", "feature"),
    "head_bias": ("chain", "draw", "class"),
    "theta": ("chain", "draw", "param"),
}
_COORDINATES = {axis for axes in _AXES.values() for axis in axes}


def _attach_scales(group: h5py.Group) -> None:
    """Name every axis of every variable of a group."""
    coordinates = _COORDINATES & set(group)
    for axis in sorted(coordinates):
        group[axis].make_scale(axis)
    for name in sorted(set(group) - coordinates):
        axes = _AXES.get(name, ("chain", "draw"))
        for position, axis in enumerate(axes):
            group[name].dims[position].attach_scale(group[axis])


def read_samples(path: Path) -> SampleFile:
    """Read draws and statistics of a sample file, after a full check.

    Raises:
        MissingInput: there is no such file.
        DataError: the file is truncated, has a wrong digest, or its draws are not finite.
    """
    with open_hdf5(path) as file:
        header = header_of(path, file)
        if header.kind != "samples":
            raise DataError(f"{path}: expected samples, got {header.kind}", code="wrong_kind", path=path)
        arrays, texts = read_contents(path, file, mapped=("posterior/head_weight", "posterior/theta"))
    check_digest(path, header, arrays, texts)
    weight, bias, theta = (arrays.get(f"posterior/{name}") for name in _AXES)
    main = "head_weight" if theta is None else "theta"
    if arrays.get(f"posterior/{main}", np.empty(0)).ndim != len(_AXES[main]):
        axes = ", ".join(_AXES[main])
        raise DataError(f"{path}: no draws posterior/{main} ({axes})", code="damaged", path=path)
    for values in (weight, bias, theta):
        if values is not None and not np.isfinite(values).all():
            raise DataError(f"{path}: some draws are not finite", code="not_finite", path=path)
    stats = {
        name.removeprefix("sample_stats/"): values
        for name, values in arrays.items()
        if name.startswith("sample_stats/") and name.removeprefix("sample_stats/") not in _COORDINATES
    }
    constants = {
        name.removeprefix("constant_data/"): values
        for name, values in arrays.items()
        if name.startswith("constant_data/") and not re.search(r"_dim_\d+$", name)
    }
    return SampleFile(weight, bias, stats, constants, header, theta)
