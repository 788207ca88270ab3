"""The typed records of metrics list what fits write."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.session.fits import Method
from bnncli.session.metrics import RECORDS

WORDS = {
    "laplace": ("fit-laplace", "--prior-precision", 3),
    "refine": ("refine", "--epochs", 2, "--elbo-draws", 16, "--subspace", 2),
    "hmc": ("hmc", "--chains", 2, "--warmup", 5, "--draws", 8),
    "sghmc": ("fit-sghmc", "--chains", 2, "--epochs", 8),
    "swag": ("fit-swag", "--warmup", 2, "--epochs", 4, "--rank", 3),
    "vi": ("fit-vi", "--epochs", 2, "--elbo-draws", 16),
}


@pytest.mark.parametrize("method", WORDS)
def test_a_record_lists_every_metric_that_a_fit_writes(cli: Cli, small_run: Path, method: str) -> None:
    command, *words = WORDS[method]
    done = cli(command, small_run, *words, "--name", "new", "--json").json
    stored = read_header(Path(done["outputs"][0]["path"])).meta
    assert stored["method"] == method
    assert not set(stored["metrics"]) - set(get_type_hints(RECORDS[method]))


def test_every_method_has_a_record() -> None:
    def kinds(kind: type) -> set[type]:
        return {kind}.union(*map(kinds, kind.__subclasses__()))

    import bnncli.commands.fit_laplace.last_layer
    import bnncli.commands.fit_sghmc
    import bnncli.commands.fit_swag
    import bnncli.commands.fit_vi
    import bnncli.commands.hmc
    import bnncli.commands.refine  # noqa: F401

    names = {kind.name for kind in kinds(Method) if hasattr(kind, "name")}
    assert names == set(RECORDS) == set(WORDS)
