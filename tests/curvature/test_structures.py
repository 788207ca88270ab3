"""What a structure declares of itself, and that two files are all there is to a new one."""

from pathlib import Path

import numpy as np
import pytest
from copied_package import run_with_files
from new_parts import text_of
from problems.arrays import make_arrays

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.errors import UsageError


def test_the_order_of_the_structures_is_declared() -> None:
    assert registry.in_order("curvature") == ["full", "block", "kron", "diag"]
    assert registry.declaring("curvature", "is_exact") == ["full"]
    with pytest.raises(UsageError, match=r"full.py: it declares no colour: expected `colour: ClassVar"):
        registry.declared("curvature", "full", "colour")


@pytest.mark.parametrize("structure", registry.names("curvature"))
def test_a_covariance_has_eight_methods_of_theta_alone(structure: str) -> None:
    kind = registry.load_class("covariances", structure)
    methods = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    algebra = {name for name in vars(Covariance) if not name.startswith("_")} - {"structure", "num_params"}
    quick = {
        "marginal_variances",
        "widest",  # what refine in a subspace asks, of those that know it without all of Sigma
        "rotated",  # a cheaper root, where there is one
        "packed",  # the same root for many products
    }
    assert methods - quick == algebra | {"from_hessian", "from_tensors"}
    assert len(methods - quick) == 8


@pytest.mark.long
def test_two_files_make_a_structure(tmp_path: Path) -> None:
    np.savez(tmp_path / "small.npz", **make_arrays())
    run = tmp_path / "run"
    files = {f"{family}/isotropic.py": text_of(family, "isotropic") for family in ("curvature", "covariances")}
    lines = (
        ("fit-laplace", "--help"),
        ("extract-features", run, "--from-npz", tmp_path / "small.npz"),
        ("fit-laplace", run, "--structure", "isotropic", "--prior-precision", 5, "--json"),
        ("predict", run, "--posterior", "laplace", "--integrator", "logit-mc"),
        ("inspect", tmp_path / "run.bnn" / "posteriors" / "laplace.safetensors"),
    )
    done = run_with_files(files, tmp_path, lines)
    assert [one.code for one in done] == [0] * len(lines), [one.stderr for one in done]
    assert "isotropic (one variance for all)" in " ".join(done[0].stdout.replace("│", " ").split())
    assert done[2].json["metrics"]["structure"] == "isotropic"
    assert "isotropic" in done[4].stdout
