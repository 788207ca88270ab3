"""Features with several labels an example, drawn from independent logistic models, and the head of those models."""

from __future__ import annotations

import numpy as np

Arrays = dict[str, np.ndarray]

NUM_LABELS, NUM_FEATURES = 4, 5
SHIFT = np.array([-2.0, -0.5, 0.0, 1.0])


def label_arrays(*, sharpness: float = 1.0, head_scale: float = 1.0, seed: int = 0, **sizes: int) -> Arrays:
    """What --from-npz takes: splits of these sizes, `far` without labels, and the head times `head_scale`."""
    random = np.random.default_rng(seed)
    weight = sharpness * random.normal(size=(NUM_LABELS, NUM_FEATURES))
    arrays: Arrays = {}
    for split, size in (sizes or {"train": 160, "val": 80, "test": 120, "far": 40}).items():
        features = random.normal(size=(size, NUM_FEATURES)) * (4 if split == "far" else 1)
        arrays[f"features_{split}"] = features.astype(np.float32)
        if split != "far":
            probs = 1 / (1 + np.exp(-(features @ weight.T + SHIFT)))
            arrays[f"labels_{split}"] = (random.random(probs.shape) < probs).astype(np.int8)
    arrays["head_weight"] = (head_scale * weight).astype(np.float32)
    arrays["head_bias"] = (head_scale * SHIFT).astype(np.float32)
    return arrays
