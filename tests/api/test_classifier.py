"""BayesianClassifier, as a user of scikit-learn has it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from problems.arrays import make_arrays
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import bnncli
from bnncli import BayesianClassifier
from bnncli.errors import UsageError


def test_it_predicts_as_the_run_of_its_features() -> None:
    arrays = make_arrays()
    x, y, test = arrays["features_train"], arrays["labels_train"], arrays["features_test"]
    names = np.array(["b", "a", "c"])[y]
    base = make_pipeline(StandardScaler(), LogisticRegression(C=3.0))
    model = BayesianClassifier(base, prior_precision=2, integrator="probit").fit(x, names)
    assert model.classes_.tolist() == ["a", "b", "c"]
    scaler = StandardScaler().fit(x)
    encoded = np.searchsorted(model.classes_, names)
    head = LogisticRegression(C=3.0).fit(scaler.transform(x), encoded)
    run = bnncli.from_features((scaler.transform(x).astype(np.float32), encoded), head=head)
    run.fit_laplace(prior_precision=2)
    expected = run.predict(scaler.transform(test).astype(np.float32), posterior="laplace", integrator="probit")
    found = model.predict_proba(test)
    assert np.allclose(found, expected.probs, atol=1e-6)
    assert np.array_equal(model.predict(test), model.classes_[expected.probs.argmax(1)])
    assert np.allclose(np.exp(model.decision_function(test)), found)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict_proba(test), found)
    doubtful = base.fit(x, names).predict_proba(100 * test).max(1).mean(), model.predict_proba(100 * test).max(1).mean()
    assert doubtful[1] < doubtful[0]  # what averaging over weights is for
    with pytest.raises(UsageError, match="method: expected one of laplace, refine, hmc; got 'map'"):
        BayesianClassifier(method="map").fit(x, y)


def test_two_classes_have_log_odds() -> None:
    arrays = make_arrays(num_classes=2)
    model = BayesianClassifier(prior_precision=1).fit(arrays["features_train"], arrays["labels_train"])
    odds, probs = model.decision_function(arrays["features_test"]), model.predict_proba(arrays["features_test"])
    assert np.allclose(1 / (1 + np.exp(-odds)), probs[:, 1])
    assert np.array_equal(odds > 0, model.predict(arrays["features_test"]) == 1)


@pytest.mark.long
def test_it_is_an_estimator_of_scikit_learn() -> None:
    found = check_estimator(BayesianClassifier(prior_precision=1), on_fail=None)
    assert {one["check_name"] for one in found if one["status"] == "failed"} == set()
    assert len(found) > 40
    arrays = make_arrays()
    scores = cross_val_score(
        BayesianClassifier(method="hmc"), arrays["features_test"], arrays["labels_test"], cv=2, n_jobs=2
    )
    assert scores.min() > 0.6
