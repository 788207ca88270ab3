"""What a structure declares of itself, and that two files are all there is to a new one."""

from pathlib import Path

import numpy as np
import pytest
from conftest import make_arrays
from copied_package import run_with_files

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.errors import UsageError

CURVATURE = '''
"""A multiple of the identity with the Hessian's trace."""

from bnncli.curvature import Operations
from bnncli.curvature.diag import Diag


class Isotropic:
    order: "ClassVar[int]" = 35
    about: "ClassVar[str]" = "one variance for all"
    is_exact: "ClassVar[bool]" = False
    is_same_in_span: "ClassVar[bool]" = False
    is_fitted_in_span: "ClassVar[bool]" = False
    fixed: "ClassVar[tuple[str, ...]]" = ()

    @staticmethod
    def hessian(target, theta):
        diagonal = Diag.hessian(target, theta)["hessian.diag"]
        return {"hessian.isotropic": diagonal.mean().reshape(1)}

    @staticmethod
    def num_elements(layout):
        return 1

    @staticmethod
    def operations(layout, num_examples):
        return Operations(elementwise=2 * num_examples * layout.num_params)

    @staticmethod
    def most_elements(layout, *, in_span):
        return 0  # never unasked
'''

COVARIANCE = '''
"""One variance for all parameters."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Isotropic:
    structure: ClassVar[str] = "isotropic"
    variance: Tensor
    num_params: int

    @classmethod
    def from_hessian(cls, hessian, prior, layout):
        return cls(1 / (hessian["hessian.isotropic"].double() + prior.weight_precision), layout.num_params)

    def unwhiten(self, z):
        return z.to(self.variance) * self.variance.sqrt()

    def whiten(self, x):
        return x.to(self.variance) / self.variance.sqrt()

    def pull_back(self, gradient):
        return self.unwhiten(gradient)

    def log_det_scale(self):
        return 0.5 * self.num_params * math.log(float(self.variance))

    def to_tensors(self):
        return {"cov.isotropic": self.variance.double().cpu().contiguous()}

    @classmethod
    def from_tensors(cls, tensors, layout):
        return cls(tensors["cov.isotropic"], layout.num_params)

    def to(self, *, device=None, dtype=None):
        return replace(self, variance=self.variance.to(device=device, dtype=dtype))
'''


def test_the_order_of_the_structures_is_declared() -> None:
    assert registry.in_order("curvature") == ["full", "block", "kron", "diag"]
    assert registry.declaring("curvature", "is_exact") == ["full"]
    with pytest.raises(UsageError, match=r"full.py: it declares no colour: expected `colour: ClassVar"):
        registry.declared("curvature", "full", "colour")


@pytest.mark.parametrize("structure", registry.names("covariances"))
def test_a_covariance_has_eight_methods_of_theta_alone(structure: str) -> None:
    kind = registry.load_class("covariances", structure)
    methods = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    algebra = {name for name in vars(Covariance) if not name.startswith("_")} - {"structure", "num_params"}
    assert methods == algebra | {"from_hessian", "from_tensors"}
    assert len(methods) == 8


def test_two_files_make_a_structure(tmp_path: Path) -> None:
    np.savez(tmp_path / "small.npz", **make_arrays())
    run = tmp_path / "run"
    files = {"curvature/isotropic.py": CURVATURE, "covariances/isotropic.py": COVARIANCE}
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
