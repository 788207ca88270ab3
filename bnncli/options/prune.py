"""Options of prune."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class PruneOptions(Checked):
    """Options of prune."""

    posterior: str = option("lbbnn", "Latent binary network to prune, by name or file.", metavar="NAME|FILE")
    rule: str = option(
        "median",
        "Weights to keep: those with inclusion probability above 1/2 (median), or the most probable ones up to "
        "\0density\0.",
        choices=("median", "density"),
    )
    density: float | None = option(
        None, "Share of the weights to keep, with \0rule\0 density.", minimum=0.0, maximum=1.0
    )
    split: str | None = option(None, "Labelled split to measure accuracy on. Default: test, else val.", metavar="SPLIT")
    dense: str | None = option(
        None,
        "Also write a dense state dict for torch.nn.Sequential (0.weight, 0.bias, 2.weight, ...) to this "
        "safetensors file.",
        metavar="FILE",
        writes=True,
        numeric=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rule == "density") != (self.density is not None):
            raise UsageError("\0rule\0 density and \0density\0 go together: give both or neither")
