"""What fit-vi says of its Gaussian: the ELBO, how it was reached, what it is worth on val."""

from __future__ import annotations

from typing import Any

from bnncli.names import counted, percent
from bnncli.session.val_report import val_lines


def summary(metrics: dict[str, Any]) -> list[str]:
    """The numbers as lines for people."""
    elbo = metrics["elbo"]
    lines = [
        f"ELBO {elbo['value']:.2f} +- {elbo['standard_error']:.2f} nats ({metrics['elbo_draws']} draws, full "
        "data) with independent parameters; log importance weights have standard deviation "
        f"{metrics['log_weight_sd']:.2f}"
    ]
    ended = counted(metrics["epochs"], "epoch")
    if metrics["ended_early"]:
        ended = f"stopped after {metrics['epochs_run']} of {ended} because it no longer improves"
    lines.append(
        f"{metrics['optimizer']}, {metrics['estimator']} gradients, learning rate {metrics['learning_rate']:.3g}, batches of {metrics['batch_size']:,}, {ended}"
    )
    if metrics["kl_weight"] != 1:
        lines.append(
            f"the divergence from the prior had weight {metrics['kl_weight']:g}, not 1, so this fit neither "
            "approximates the target nor maximises its ELBO"
        )
    lines.append(f"the median parameter has {percent(metrics['median_share_of_prior'], '.3g')} of the prior's variance")
    if metrics["beside_base"] is not None:
        beside = metrics["beside_base"]
        lines.append(
            f"compared with {beside['name']}: the median parameter has {percent(beside['median_share'], '.3g')} "
            f"of its variance, and the means differ by {beside['rms_distance']:.2g} of its standard deviations "
            f"(rms over parameters; at most {beside['largest_distance']:.2g})"
        )
    lines += val_lines(metrics)
    return lines
