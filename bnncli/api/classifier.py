"""A scikit-learn classifier: a linear classifier with a posterior over its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

import bnncli
from bnncli.api.commands import METHODS
from bnncli.errors import UsageError
from bnncli.lazy import no_grad, torch

_METHODS = {name: METHODS[name] for name in ("laplace", "refine", "hmc")}


class BayesianClassifier(ClassifierMixin, BaseEstimator):
    """Fit a linear classifier of scikit-learn and a posterior over its weights, and average predictions over it.

    Args:
        base: a linear classifier such as LogisticRegression, the default, or a pipeline that ends in one.
        method: laplace, refine or hmc.
        prior_precision: as in `fit-laplace`: a number, or marglik for the highest marginal likelihood.
        integrator: as in `predict`; None for the method's default.
        random_state: seed; None for 0.
        device: as for `bnncli.open`.

    Attributes:
        base_: the fitted base.
        classes_: classes in the order of the columns of predict_proba.
        module_: torch module from features (N, D) to a dict of `probs` and uncertainties.
    """

    def __init__(
        self,
        base: Any = None,
        *,
        method: str = "laplace",
        prior_precision: float | str = "marglik",
        integrator: str | None = None,
        random_state: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.base = base
        self.method = method
        self.prior_precision = prior_precision
        self.integrator = integrator
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> BayesianClassifier:
        """Fit the base to X (N, D) and y (N,), then the posterior.

        Raises:
            ValueError: scikit-learn does not accept the data.
            bnncli.errors.BnnError: the posterior cannot be fitted.
        """
        if self.method not in _METHODS:
            raise UsageError(f"method: expected one of {', '.join(_METHODS)}; got {self.method!r}")
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, encoded = np.unique(y, return_inverse=True)
        self.base_ = (LogisticRegression(max_iter=1000) if self.base is None else clone(self.base)).fit(X, encoded)
        head = self.base_[-1] if hasattr(self.base_, "steps") else self.base_
        seed = 0 if self.random_state is None else self.random_state
        run = bnncli.from_features((self._features(X), encoded), head=head, seed=seed, device=self.device)
        run.fit_laplace(prior_precision=self.prior_precision)
        for command in METHODS[self.method][1:]:
            getattr(run, command)()
        self.module_ = run.module(self.method, self.integrator)
        return self

    @no_grad
    def predict_proba(self, X: Any) -> np.ndarray:
        """Return class probabilities (N, C) of X (N, D), averaged over the posterior."""
        check_is_fitted(self)
        features = self._features(validate_data(self, X, reset=False))
        probs = self.module_(torch.as_tensor(features, dtype=torch.float32))["probs"].double().numpy()
        return np.asarray(probs / probs.sum(axis=1, keepdims=True))

    def decision_function(self, X: Any) -> np.ndarray:
        """Return log probabilities (N, C), or the log odds (N,) of the second of two classes."""
        logs = np.log(self.predict_proba(X).clip(1e-300))
        return logs[:, 1] - logs[:, 0] if logs.shape[1] == 2 else logs

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class (N,)."""
        places = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[places])

    def _features(self, X: np.ndarray) -> np.ndarray:
        """Return what the linear classifier takes."""
        return np.asarray(self.base_[:-1].transform(X) if hasattr(self.base_, "steps") else X, np.float32)
