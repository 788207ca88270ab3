"""Options of acquire."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, check_split_name, check_suffix, option
from bnncli.options.shared import trust_code_option

RULES = ("bald", "batchbald", "entropy", "margin", "random")


@dataclass(frozen=True)
class AcquireOptions(Checked):
    """Options of acquire."""

    pool: str = option("pool", "Split to choose from. Its labels, if any, are ignored.", metavar="SPLIT")
    batch: int = option(100, "Number of examples to choose.", minimum=1)
    by: str = option(
        "bald",
        "Acquisition rule. batchbald scores a batch jointly, which avoids near-duplicates; the other rules "
        "score each example separately.",
        choices=RULES,
    )
    posterior: str | None = option(
        None,
        "Posterior, by name or file. Default: auto's recommendation, else laplace.",
        metavar="NAME|FILE",
    )
    integrator: str | None = option(None, "Integrator. Default: the one predict uses.", family="integrators")
    samples: int | None = option(
        None,
        "Number of draws for a sampling integrator. Default: the same as predict, or 100 for batchbald.",
        minimum=1,
        is_rare=True,
    )
    candidates: int = option(
        5000,
        "Number of examples, those with the highest BALD scores, that batchbald considers. Its running time "
        "grows with this number.",
        minimum=1,
        is_rare=True,
    )
    exclude: str | None = option(
        None, "File of ids or names, one per line, to skip because they are already labelled.", metavar="FILE"
    )
    table: str | None = option(
        None, "Write the chosen examples and their scores to this .csv file.", metavar="FILE", writes=True
    )
    trust_code: bool = trust_code_option(is_recorded=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split_name(self.pool, "\0pool\0")
        if self.table is not None:
            check_suffix(self.table, "\0table\0", ("csv",))
