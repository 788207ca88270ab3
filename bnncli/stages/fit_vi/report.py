"""What fit-vi says of its Gaussian: the ELBO, how it was reached, what it is worth on val."""

from __future__ import annotations

from typing import Any

from bnncli.names import counted, percent
from bnncli.run.val_report import val_lines


def summary(metrics: dict[str, Any]) -> list[str]:
    """The numbers as lines for people."""
    elbo = metrics["elbo"]
    lines = [
        f"ELBO {elbo['value']:.2f} +- {elbo['standard_error']:.2f} nats ({metrics['elbo_draws']} draws, full data), of independent parameters; log importance "
        f"weights have standard deviation {metrics['log_weight_sd']:.2f}"
    ]
    ended = counted(metrics["epochs"], "epoch")
    if metrics["ended_early"]:
        ended = f"ended after {metrics['epochs_run']} of {ended} as it stands still"
    lines.append(
        f"{metrics['optimizer']}, {metrics['estimator']} gradients, learning rate {metrics['learning_rate']:.3g}, batches of {metrics['batch_size']:,}, {ended}"
    )
    if metrics["kl_weight"] != 1:
        lines.append(
            f"the divergence to the prior had weight {metrics['kl_weight']:g}, not 1: this is no approximation of the target, and not what maximises its ELBO"
        )
    lines.append(f"the median parameter has {percent(metrics['median_share_of_prior'], '.3g')} of the prior's variance")
    if metrics["beside_base"] is not None:
        beside = metrics["beside_base"]
        lines.append(
            f"beside {beside['name']}: the median parameter has {percent(beside['median_share'], '.3g')} of its variance, and the means are "
            f"{beside['rms_distance']:.2g} of its standard deviations apart (rms over parameters; at most {beside['largest_distance']:.2g})"
        )
    lines += val_lines(metrics)
    return lines
