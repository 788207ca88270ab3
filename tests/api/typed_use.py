"""What a user's code looks like to a type checker: `.ci/run` has mypy look at it, with --strict."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

import bnncli
from bnncli.api.commands import CommandResult
from bnncli.api.predictions import ClassProbabilities, OpenedPosterior
from bnncli.api.run import OpenedRun

run = bnncli.open("ckpt.pt", seed=1)
assert_type(run, OpenedRun)
answer = run.predict(np.zeros((2, 3)), posterior="laplace", integrator="mc", samples=3, qmc=True, order=None)
assert_type(answer, ClassProbabilities)
assert_type(answer.probs, npt.NDArray[np.float32])
assert_type(answer.interval, npt.NDArray[np.float32] | None)
assert_type(answer.classes, tuple[str, ...])
posterior = run.posterior("laplace")
assert_type(posterior, OpenedPosterior)
assert_type(posterior.sample(3, seed=2), torch.Tensor)
assert_type(posterior.mean, torch.Tensor)
assert_type(posterior.layout.num_params, int)
assert_type(run.splits, tuple[str, ...])
made = bnncli.from_torch(torch.nn.Linear(3, 2), (np.zeros((2, 3)), [0, 1]), ood={"far": torch.zeros(2, 3)})
assert_type(made, OpenedRun)
assert_type(
    bnncli.from_features((np.zeros((2, 3)), [0, 1]), head=torch.nn.Linear(3, 2), hold_out="val=train:1"), OpenedRun
)
assert_type(bnncli.from_predictions(np.zeros((2, 3)), [0, 1]).evaluate(), CommandResult)
assert_type(run.module("laplace", "probit"), torch.nn.Module)
assert_type(bnncli.BayesianClassifier(method="hmc").fit([[1.0], [2.0]], [0, 1]), bnncli.BayesianClassifier)
fitted = run.fit_laplace(structure="kron", prior_precision=10, progress=True)
assert_type(fitted, CommandResult)
assert_type(run.auto(budget="5m").to_dict(), dict[str, Any])
assert_type(run.evaluate(split=["test"]).lines, tuple[str, ...])
run.predict(torch.zeros(2, 3))
run.predict([[1.0, 2.0]])
try:
    run.metrics(posterior="laplace")[0]["name"]
except bnncli.errors.DataError as error:
    assert_type(error.message, str)
