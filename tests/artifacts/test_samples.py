"""Sample files: ArviZ opens them with the right names, dimensions and types, and computes what we compute."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bnncli.artifacts.provenance import build_provenance
from bnncli.artifacts.samples import SampleFile, read_samples, write_samples
from bnncli.errors import DataError

pytestmark = pytest.mark.core

C, T, K, D = 3, 30, 3, 3  # equal sizes: only the dimension scales tell which axis is which


def make(path: Path, *, has_bias: bool = True, name: str = "net", is_of_network: bool = False) -> SampleFile:
    generator = np.random.default_rng(0)
    weight, bias, theta = (generator.normal(size=(C, T, *shape)).astype(np.float32) for shape in ((K, D), (K,), (K,)))
    content = SampleFile(
        head_weight=None if is_of_network else weight,
        head_bias=bias if has_bias and not is_of_network else None,
        theta=theta if is_of_network else None,
        stats={"lp": generator.normal(size=(C, T)), "diverging": generator.random((C, T)) < 0.2},
        constants={"prior_precision": np.array([5.0])},
    )
    provenance = build_provenance(
        path, command=[], params={}, algo_rev=1, inputs=[], checkpoint=None, environment={}, seconds=0.0, warnings=[]
    )
    write_samples(
        path, content, outputs=["cat", "dog", "ör"], created_at="2026-01-01T00:00:00Z", name=name,
        sampler_library=("bnncli", "0"), meta={"type": "samples"}, provenance=provenance, may_replace=False,
    )  # fmt: skip
    return content


def open_with_arviz(path: Path) -> Any:
    with warnings.catch_warnings():
        # ArviZ 0.x announces its own successor when it is imported.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        arviz = pytest.importorskip("arviz")
        pytest.importorskip("h5netcdf")
        return arviz.from_netcdf(str(path), engine="h5netcdf")


def test_arviz_finds_names_dimensions_and_coordinates(tmp_path: Path) -> None:
    content = make(tmp_path / "hmc.nc")
    data = open_with_arviz(tmp_path / "hmc.nc")
    assert data.posterior["head_weight"].dims == ("chain", "draw", "class", "feature")
    assert data.posterior["head_bias"].dims == ("chain", "draw", "class")
    assert data.posterior["class"].values.tolist() == ["cat", "dog", "ör"]
    assert data.posterior["draw"].values.tolist() == list(range(T))
    assert np.array_equal(data.posterior["head_weight"].values, content.head_weight)
    assert set(data.posterior.data_vars) == {"head_weight", "head_bias"}
    assert list(data.posterior.attrs["sample_dims"]) == ["chain", "draw"]
    assert data.constant_data["prior_precision"].dims == ("prior_precision_dim_0",)


def test_arviz_finds_the_draws_of_a_network(tmp_path: Path) -> None:
    content = make(tmp_path / "hmc.nc", is_of_network=True)
    again = read_samples(tmp_path / "hmc.nc")
    posterior = open_with_arviz(tmp_path / "hmc.nc").posterior
    assert posterior["theta"].dims == ("chain", "draw", "param")
    assert set(posterior.data_vars) == {"theta"}
    assert posterior["param"].values.tolist() == list(range(K))
    assert again.head_weight is None
    for values in (posterior["theta"].values, again.theta):
        assert np.array_equal(values, content.theta)


def test_every_axis_carries_its_dimension_scale(tmp_path: Path) -> None:
    make(tmp_path / "hmc.nc")
    with h5py.File(tmp_path / "hmc.nc", "r", locking=False) as file:
        for name, axes in (("posterior/head_weight", "chain draw class feature"), ("sample_stats/lp", "chain draw")):
            scales = [[scale.name.rsplit("/", 1)[1] for scale in axis.values()] for axis in file[name].dims]
            assert scales == [[axis] for axis in axes.split()]


def test_arviz_sees_divergences_as_booleans(tmp_path: Path) -> None:
    content = make(tmp_path / "hmc.nc")
    diverging = open_with_arviz(tmp_path / "hmc.nc").sample_stats["diverging"]
    assert diverging.dtype == bool
    assert diverging.dims == ("chain", "draw")
    assert np.array_equal(diverging.values, content.stats["diverging"])


def test_arviz_summarises_the_draws(tmp_path: Path) -> None:
    content = make(tmp_path / "hmc.nc")
    data = open_with_arviz(tmp_path / "hmc.nc")
    import arviz

    summary = arviz.summary(data, kind="stats", round_to="none")
    assert summary["mean"]["head_weight[dog, 1]"] == pytest.approx(content.head_weight[:, :, 1, 1].mean(), abs=1e-6)


def test_our_reader_gives_back_what_was_written(tmp_path: Path) -> None:
    content = make(tmp_path / "hmc.nc")
    again = read_samples(tmp_path / "hmc.nc")
    assert np.array_equal(again.head_weight, content.head_weight)
    assert again.head_bias is not None
    assert set(again.stats) == {"lp", "diverging"}
    assert np.array_equal(again.stats["diverging"].astype(bool), content.stats["diverging"])
    assert again.constants["prior_precision"].tolist() == [5.0]


def test_a_head_without_bias_has_no_bias_draws(tmp_path: Path) -> None:
    make(tmp_path / "hmc.nc", has_bias=False)
    assert read_samples(tmp_path / "hmc.nc").head_bias is None
    assert "head_bias" not in open_with_arviz(tmp_path / "hmc.nc").posterior


def test_a_run_with_a_name_that_is_not_utf8_can_be_written(tmp_path: Path) -> None:
    make(tmp_path / "hmc.nc", name="net\udcff")
    assert "net" in open_with_arviz(tmp_path / "hmc.nc").attrs["name"]


def test_another_kind_is_refused(small_run: Path) -> None:
    with pytest.raises(DataError, match="expected samples, got features"):
        read_samples(small_run.with_name("small.bnn") / "features" / "test.h5")
