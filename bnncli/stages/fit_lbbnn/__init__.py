"""fit-lbbnn: features in, a network out whose weights are each in or out with a probability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bnncli.likelihoods import name_to_record, outputs_for
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.fit_lbbnn import FitLbbnnOptions
from bnncli.parameters.layouts import NetworkLayout
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior
from bnncli.session.run import Result, Run
from bnncli.stages.fit_lbbnn.summary import summary

COMMAND = Command(
    "Fit a latent binary network, which includes each weight with some probability.",
    "Fits a spike-and-slab network by maximising a lower bound on the evidence. By default it fits the last "
    "layer, on the extracted features; with --hidden, it fits a whole network on raw inputs (extract-features "
    "--model flatten). Reports the bound and the density. Writes posteriors/lbbnn.safetensors.",
    (FitLbbnnOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-lbbnn ckpt.pt",
        "bnncli fit-lbbnn mnist --hidden 400,600 --estimator lrt --epochs 250",
        "bnncli fit-lbbnn ckpt.pt --estimator mnf --name sparse --resume",
    ),
    section="Fit",
    place=100,
)


def run(run: Run, options: FitLbbnnOptions) -> Result:
    """Fit and publish; the result's metrics have the bound's parts and the density."""
    train = load_split(run, "train").check_labeled()
    layout = _layout(options, train)
    options = options.resolved(len(train.content.features))
    val = _val(run, options, layout)
    if val is None and options.slab_sd == "auto":
        options = replace(options, slab_sd="1")
    params = {**options.params(), "sizes": list(layout.sizes), "seed": run.compute.seed}
    params |= name_to_record(layout.likelihood_name)
    request = posterior_request(
        run,
        "lbbnn",
        params=params,
        algo_rev=_revisions.FIT_LBBNN,
        sources=[train.source] + ([val.source] if val is not None else []),
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: 4 * options.repeats * (3 * layout.num_weights + 2 * layout.num_biases),
    )

    def fit() -> Fitted:
        from bnncli.stages.fit_lbbnn import work

        return work.fit(run, options, train, val, layout=layout, request=request)

    return produce_posterior(run, request, fit, _report)


def _val(run: Run, options: FitLbbnnOptions, layout: NetworkLayout) -> Split | None:
    """The split that the slab's standard deviation is chosen on; None where it is given, learnt, or 1."""
    if options.slab_sd != "auto" or options.estimator == "concrete" or layout.num_layers > 1:
        return None
    val = load_split(run, "val") if run.folder.features("val").is_file() else None
    if val is not None and val.content.labels is not None and len(val.content.labels):
        return val
    run.console.info("no labelled val split to choose the slab's standard deviation on; using 1 (--slab-sd)")
    return None


def _layout(options: FitLbbnnOptions, train: Split) -> NetworkLayout:
    """Outputs as the network's head has them; without a head as many as the classes need."""
    head, num_classes = train.layout, len(train.content.classes)
    has_own = train.content.head_weight is not None or not head.likelihood.is_exclusive
    outputs = head.num_outputs if has_own else outputs_for(num_classes)
    return NetworkLayout((head.num_features, *options.hidden_sizes, outputs), head.likelihood_name)


def _report(meta: Mapping[str, Any]) -> Report:
    return Report(meta["metrics"], summary(meta["metrics"]))
