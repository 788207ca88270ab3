"""posteriors/map.safetensors: the network as trained, which extract-features writes beside the features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.artifacts.features import FeatureFile, head_digest
from bnncli.artifacts.posteriors import gradient_passes, write_posterior
from bnncli.artifacts.provenance import Source
from bnncli.likelihoods import name_to_record
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.parameters.layouts import HeadLayout
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import head_theta
from bnncli.session.produce import Computed, Request, produce
from bnncli.session.run import Result, Run


def make_map(
    run: Run, options: ExtractFeaturesOptions, content: FeatureFile, checkpoint: dict[str, Any] | None
) -> Result:
    """The network as trained, as a posterior with all its mass at the head's weights."""
    weight, bias = content.head_weight, content.head_bias
    if weight is None:
        return Result()
    layout = HeadLayout(weight.shape[0], weight.shape[1], bias is not None, content.likelihood)
    size = 16 * layout.num_params
    target = run.folder.posterior("map")
    params = {"last_layer": options.last_layer, **name_to_record(content.likelihood)}
    source = Source("head", Path(options.from_npz or run.checkpoint_path), head_digest(content), is_artifact=False)
    request = Request(
        target, "posterior", "map", params, _revisions.EXTRACT_FEATURES, [source], checkpoint, lambda: size
    )

    def compute() -> Computed:
        from bnncli.posteriors.point import Point  # here, for torch

        theta = head_theta(weight, bias)
        assert theta is not None
        tensors, meta = Point(theta, layout).to_tensors()
        meta |= {"method": "map", "param_layout": layout.to_json(), "classes": content.classes, "metrics": {}}
        passes = None if checkpoint is None else gradient_passes(run.checkpoint_path)
        meta |= {} if passes is None else {"gradient_passes": passes}

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_posterior(target, tensors, meta=meta, provenance=provenance, may_replace=may_replace)

        return Computed(publish)

    return produce(run, request, compute)
