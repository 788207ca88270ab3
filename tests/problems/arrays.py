"""Features, labels and heads, as --from-npz reads them."""

from __future__ import annotations

import numpy as np


def make_arrays(
    seed: int = 0, num_classes: int = 3, num_features: int = 5, num_train: int = 240
) -> dict[str, np.ndarray]:
    """Features of overlapping Gaussian classes with a head that fits them, as --from-npz reads them."""
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(num_classes, num_features))
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", num_train), ("val", 80), ("test", 120)):
        labels = generator.integers(num_classes, size=count)
        features = centers[labels] + generator.normal(size=(count, num_features))
        arrays |= {f"features_{split}": features.astype(np.float32), f"labels_{split}": labels.astype(np.int64)}
    arrays["features_far"] = (3 * generator.normal(size=(60, num_features))).astype(np.float32)
    arrays["head_weight"] = (2 * centers).astype(np.float32)
    arrays["head_bias"] = (-(centers**2).sum(axis=1)).astype(np.float32)
    return arrays


def make_wide_arrays(num_test: int = 0) -> dict[str, np.ndarray]:
    """Fewer training examples than features, and a head that generalises: what spreads round it hedges without need."""
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(4, 60)) / 3
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", 50), ("val", 400), ("test", num_test)):
        labels = generator.integers(4, size=count)
        features = centers[labels] + generator.normal(size=(count, 60)) / 2
        if count:
            arrays |= {f"features_{split}": features.astype(np.float32), f"labels_{split}": labels.astype(np.int64)}
    arrays["head_weight"] = (4 * centers).astype(np.float32)
    arrays["head_bias"] = (-2 * (centers**2).sum(axis=1)).astype(np.float32)
    return arrays
