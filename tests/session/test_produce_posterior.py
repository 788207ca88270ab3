"""One way from a fit to a posterior file: the fit here is none of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bnncli.artifacts.posteriors import read_posterior
from bnncli.console import Console
from bnncli.errors import CheckFailed, UsageError
from bnncli.options.command import CommandLine, CommonOptions, ComputeOptions, NameOptions, RunOptions, WriteOptions
from bnncli.posteriors.point import Point
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import load_split
from bnncli.session.run import Result, Run


class Halving:
    """Half the network's weights, as a posterior."""

    def __init__(self, run: Path, name: str | None = None, *, divisor: float = 2) -> None:
        self.happened: list[str] = []
        self.divisor = divisor
        self.run = Run(
            command="halve",
            line=CommandLine.of("halve", str(run), NameOptions(name=name)),
            arguments={"ckpt": run},
            console=Console("halve", CommonOptions(quiet=True)),
            run_options=RunOptions(),
            write=WriteOptions(),
            compute=ComputeOptions(device="cpu"),
            naming=NameOptions(name=name),
        )

    def produce(self) -> Result:
        split = load_split(self.run, "train")
        sizes: Any = {"algo_rev": 1, "checkpoint": split.checkpoint, "estimated_bytes": lambda: 100}
        params = {"divisor": self.divisor}
        request = posterior_request(self.run, "half", params=params, sources=[split.source], **sizes)

        @contextmanager
        def publishing() -> Iterator[None]:
            assert not request.target.exists()
            yield
            self.happened.append("published" if request.target.exists() else "not written")

        def fit() -> FitOutput:
            self.happened.append("fitted")
            head = split.head()
            assert head is not None
            tensors, meta = Point(head / self.divisor, split.layout).to_tensors()
            meta |= {"method": "halve", "param_layout": split.layout.to_json()}
            told = {"seconds": 1.5}
            return FitOutput(tensors, meta, {"divisor": self.divisor}, split, told=told, publishing=publishing)

        return produce_posterior(self.run, request, fit, self.report)

    def report(self, meta: Mapping[str, Any]) -> Report:
        self.happened.append(f"reported {meta['method']}")
        return Report(dict(meta["metrics"]), [f"of {len(meta['classes'])} classes"], CheckFailed("always"))


def test_a_fit_is_published_and_reported_and_then_up_to_date(small_run: Path) -> None:
    halving = Halving(small_run)
    first, again = halving.produce(), halving.produce()
    assert halving.happened == ["fitted", "reported halve", "published", "reported halve"]
    assert (first.action, again.action) == ("computed", "up_to_date")
    assert first.metrics == {"divisor": 2, "seconds": 1.5}
    assert again.metrics == {"divisor": 2}
    assert first.summary == again.summary == ["of 3 classes"]
    assert first.failure is not None
    assert again.failure is not None
    path = small_run.with_name("small.bnn") / "posteriors/half.safetensors"
    assert first.outputs == [{"role": "half", "path": str(path), "content_digest": again.outputs[0]["content_digest"]}]
    tensors, header = read_posterior(path)
    assert header.meta["num_examples"] == 240
    assert header.meta["metrics"] == {"divisor": 2}
    torch.testing.assert_close(2 * tensors["mean"][:15], tensors["head.weight"].double().flatten())


def test_a_fit_has_the_name_that_was_given_if_it_is_free(small_run: Path) -> None:
    assert Path(Halving(small_run, "other").produce().outputs[0]["path"]).name == "other.safetensors"
    with pytest.raises(UsageError, match="reserved for the trained network"):
        Halving(small_run, "map").produce()
