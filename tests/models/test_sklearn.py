"""scikit-learn's linear classifiers: their own predict_log_proba, from arrays and from skops files."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from problems.command_line import Cli
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LinearRegression, LogisticRegression, SGDClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, PolynomialFeatures, RobustScaler, StandardScaler
from sklearn.svm import LinearSVC

from bnncli.errors import BnnError, DataError, Untrusted
from bnncli.models import ModelRequest
from bnncli.models.kinds.sklearn import open_model
from bnncli.models.sklearn_arrays import Estimator, arrays_of

pytestmark = pytest.mark.libraries

RNG = np.random.default_rng(0)
X = RNG.normal(3, 2, size=(90, 4))
THREE = np.array(["cat", "dog", "eel"])[np.argmax((X - 3) @ RNG.normal(size=(4, 3)) + RNG.normal(size=(90, 3)), axis=1)]
assert len({*THREE}) == 3
TWO = np.where(THREE == "cat", 7, 4)
FITTED: dict[str, Callable[[], Any]] = {
    "three classes": lambda: LogisticRegression().fit(X, THREE),
    "names in an object array": lambda: LogisticRegression().fit(X, THREE.astype(object)),
    "two classes": lambda: LogisticRegression().fit(X, TWO),
    "liblinear": lambda: LogisticRegression(solver="liblinear").fit(X, TWO),
    "no intercept": lambda: LogisticRegression(fit_intercept=False).fit(X, THREE),
    "SGD": lambda: SGDClassifier(loss="log_loss", alpha=1.0, random_state=0).fit(X, TWO),
    "scaled": lambda: make_pipeline(StandardScaler(), LogisticRegression()).fit(X, THREE),
    "not centred": lambda: make_pipeline(StandardScaler(with_mean=False), LogisticRegression()).fit(X, THREE),
    "scaled three times": lambda: make_pipeline(
        MinMaxScaler(), RobustScaler(), "passthrough", MaxAbsScaler(), LogisticRegression()
    ).fit(X, THREE),
}  # fmt: skip


def check(model: Any, path: Path) -> None:
    """The network's log probabilities are the model's own, and its classes theirs."""
    saved = open_model(str(path), ModelRequest())
    network = saved.build(None)
    with torch.inference_mode():
        logits = network(torch.from_numpy(X.astype(np.float32))).double()
    pair = torch.cat([torch.zeros_like(logits), logits], dim=1) if logits.shape[1] == 1 else logits
    expected = model.predict_log_proba(X.astype(np.float32).astype(np.float64))
    np.testing.assert_allclose(pair.log_softmax(1).numpy(), expected, atol=1e-5, rtol=1e-6)
    assert saved.classes == tuple(str(one) for one in model.classes_)


@pytest.mark.parametrize("name", FITTED)
def test_arrays_give_what_scikit_learn_gives(name: str, tmp_path: Path) -> None:
    model = FITTED[name]()
    arrays = arrays_of(Estimator.of(model))
    np.savez(tmp_path / "model.npz", **{**arrays, "classes_": arrays["classes_"].astype(str)})  # type: ignore[arg-type]
    check(model, tmp_path / "model.npz")


@pytest.mark.parametrize("name", FITTED)
def test_a_skops_file_gives_what_scikit_learn_gives(name: str, tmp_path: Path) -> None:
    skops = pytest.importorskip("skops.io")
    model = FITTED[name]()
    skops.dump(model, tmp_path / "model.skops")
    check(model, tmp_path / "model.skops")


def test_a_model_of_before_that_doubles_two_classes_gives_a_softmax_of_both_scores() -> None:
    """LogisticRegression(multi_class="multinomial") until scikit-learn 1.7: a softmax of -score and score."""
    attributes = {
        "multi_class": "multinomial", "classes_": np.array([0, 1]), "coef_": np.ones((1, 3)), "intercept_": np.ones(1),
    }  # fmt: skip
    found = arrays_of(Estimator("LogisticRegression", attributes))
    assert found["coef_"].tolist() == [[2, 2, 2]]
    assert found["intercept_"].tolist() == [2]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "LinearSVC": (lambda: LinearSVC().fit(X, THREE), "a LinearSVC has no likelihood: its scores are margins"),
    "hinge": (lambda: SGDClassifier().fit(X, TWO), "SGDClassifier with loss 'hinge' has no likelihood"),
    "calibrated": (lambda: CalibratedClassifierCV(LinearSVC()).fit(X, TWO), "the probabilities of several calibrated models"),
    "one against the rest": (lambda: SGDClassifier(loss="log_loss").fit(X, THREE), r"not a softmax of its scores; fit a LogisticRegression"),
    "regression": (lambda: LinearRegression().fit(X, X[:, 0]), "expected a LogisticRegression .* got LinearRegression"),
    "not fitted": (LogisticRegression, "is not fitted"),
    "not linear": (
        lambda: make_pipeline(PolynomialFeatures(), LogisticRegression(C=0.01)).fit(X, TWO), "PolynomialFeatures before the classifier"
    ),
    "clipped": (lambda: make_pipeline(MinMaxScaler(clip=True), LogisticRegression()).fit(X, TWO), "MinMaxScaler that clips"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_likelihood_is_refused_and_says_why(name: str) -> None:
    make, told = REFUSED[name]
    with pytest.raises(DataError, match=told):
        arrays_of(Estimator.of(make()))


class Doubled(StandardScaler):
    """A step of the user's own."""


def test_types_of_others_in_a_skops_file_are_named_and_not_loaded(tmp_path: Path) -> None:
    skops = pytest.importorskip("skops.io")
    skops.dump(make_pipeline(Doubled(), LogisticRegression()).fit(X, TWO), tmp_path / "model.skops")
    with pytest.raises(Untrusted, match=r"types from outside scikit-learn: '.*test_sklearn.Doubled'"):
        open_model(str(tmp_path / "model.skops"), ModelRequest())


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.pkl").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(Untrusted, match="is a pickle") as told:
        open_model(str(tmp_path / "model.pkl"), ModelRequest())
    assert "convert" in str(told.value.hint)


ARRAYS: dict[str, Any] = {"coef_": np.ones((3, 4)), "intercept_": np.ones(3)}
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "no coef_": ({"weights": np.ones(3)}, "expected the array coef_ .*; it has 'weights'"),
    "intercepts": ({**ARRAYS, "intercept_": np.ones(2)}, r"intercept_ has shape \(2,\), expected \(3,\)"),
    "classes": ({**ARRAYS, "classes_": np.arange(4)}, "classes_ has 4 entries, which does not match the 3 rows of coef_"),
    "NaN": ({**ARRAYS, "coef_": np.full((3, 4), np.nan)}, "coef_ has values that are not finite numbers"),
    "axes": ({**ARRAYS, "coef_": np.ones((3, 4, 1))}, r"coef_ has shape \(3, 4, 1\), expected \(K, D\)"),
    "scale": ({**ARRAYS, "scale_": np.zeros(4)}, "scale_ has zeros"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_arrays_that_do_not_fit_are_one_line(name: str, tmp_path: Path) -> None:
    arrays, told = ODD[name]
    np.savez(tmp_path / "model.npz", **arrays)
    with pytest.raises(DataError, match=told):
        open_model(str(tmp_path / "model.npz"), ModelRequest())


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04"])
def test_what_is_no_classifier_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(content)
    with pytest.raises(BnnError, match=r"model\.npz"):
        open_model(str(tmp_path / "model.npz"), ModelRequest())


def test_other_features_than_it_was_fitted_on_are_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", **ARRAYS)
    network = open_model(str(tmp_path / "model.npz"), ModelRequest()).build(None)
    with pytest.raises(DataError, match=r"expects 4 features, got inputs of shape \(2, 5\)"):
        network(torch.zeros(2, 5))


@pytest.mark.parametrize("write", [joblib.dump, lambda model, path: path.write_bytes(pickle.dumps(model))])
def test_convert_writes_the_arrays_of_a_pickle_only_where_it_is_trusted(
    write: Callable[[Any, Path], object], tmp_path: Path, cli: Cli
) -> None:
    source, target, model = tmp_path / "model.pkl", tmp_path / "model.npz", FITTED["names in an object array"]()
    write(model, source)
    refused = cli("convert", source, target)
    assert (refused.code, target.exists()) == (77, False)
    assert "sklearn.linear_model._logistic.LogisticRegression" in refused.stderr
    assert f"bnncli convert {source} {target} --trust-pickle" in refused.stderr
    assert cli("convert", source, target, "--trust-pickle").code == 0
    check(model, target)
    assert cli("convert", source, target, "--trust-pickle").code == 73
    assert cli("convert", source, target, "--trust-pickle", "--force").code == 0


def test_convert_reads_skops_files_and_keeps_arrays_that_are_no_classifier(tmp_path: Path, cli: Cli) -> None:
    skops = pytest.importorskip("skops.io")
    model = FITTED["scaled"]()
    skops.dump(model, tmp_path / "model.skops")
    assert cli("convert", tmp_path / "model.skops", tmp_path / "model.npz").code == 0
    check(model, tmp_path / "model.npz")
    np.savez(tmp_path / "data.npz", x=X)
    kept = cli("convert", tmp_path / "model.skops", tmp_path / "data.npz", "--force")
    assert (kept.code, "holds no classifier" in kept.stderr) == (73, True)
    odd = cli("convert", tmp_path / "data.npz", tmp_path / "other.npz")
    assert (odd.code, "expected a skops file" in odd.stderr) == (65, True)
    joblib.dump(LinearSVC().fit(X, TWO), tmp_path / "svc.joblib")
    margins = cli("convert", tmp_path / "svc.joblib", tmp_path / "other.npz", "--trust-pickle")
    assert (margins.code, "has no likelihood" in margins.stderr) == (65, True)
    assert not (tmp_path / "other.npz").exists()


def test_bytes_that_are_scaled_are_warned_of(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = (np.abs(X) * 20).astype(np.uint8)
    model = LogisticRegression(max_iter=500).fit(pixels / 255, TWO)
    np.savez("model.npz", coef_=model.coef_, intercept_=model.intercept_)
    np.savez("bytes.npz", x=pixels, y=(TWO == 7).astype(int))
    np.savez("floats.npz", x=(pixels / np.float32(255)).astype("f4"), y=(TWO == 7).astype(int))
    words = ("extract-features", "run", "--model", "sklearn:model.npz", "--json")
    warned = [cli(*words, f"--data=train=npz:{name}.npz", "--force").json["warnings"] for name in ("bytes", "floats")]
    assert [any("bytes are divided by 255" in text for text in texts) for texts in warned] == [True, False]
