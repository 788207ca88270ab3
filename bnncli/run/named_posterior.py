"""The posterior that was asked for by its name, or the command that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.run.session import Run

# By the name that a command gives its posterior by itself; with "-all" behind it where it is over all layers.
_OF_LAYERS = {
    "laplace": "fit-laplace",
    "refine": "refine",
    "hmc": "hmc",
    "sghmc": "fit-sghmc",
    "swag": "fit-swag",
    "vi": "fit-vi",
}
_OF_THE_HEAD = {"temperature": "fit-temperature", "lbbnn": "fit-lbbnn"}
_ALL = "-all"


def maker_of(run: Run, name: str, *, trust_code: bool = False) -> str | None:
    """The command, to be pasted, that makes a posterior of this name by itself; None where somebody chose the name.

    Args:
        trust_code: whether the code of the run's network may be run.
    """
    command = (_OF_LAYERS | _OF_THE_HEAD).get(name)
    if command is not None:
        return run.suggest(command)
    over_all = _OF_LAYERS.get(name.removesuffix(_ALL)) if name.endswith(_ALL) else None
    return None if over_all is None else run.suggest(over_all, layers="all", trust_code=trust_code)


def find_named(run: Run, name: str, *, flag: str, otherwise: str, trust_code: bool = False) -> Path:
    """The file of the posterior called `name`, or that file itself.

    Args:
        flag: the option it came by, for messages.
        otherwise: the command for a name that no command gives by itself.
        trust_code: whether the code of the run's network may be run.

    Raises:
        MissingInput: when there is neither, with the command that would make it, or the name that was meant.
    """
    maker = maker_of(run, name, trust_code=trust_code)
    return run.folder.find_posterior(name, flag=flag, maker=maker or otherwise, is_meant=maker is not None)


def find_base(run: Run, options: Any, name: str | None) -> Path:
    """The file of the base that was named; of None, that of the Gaussian which fit-laplace makes of these layers.

    Args:
        options: with `layers`, `is_last_layer`, `trust_code`, `default_base`.

    Raises:
        MissingInput: there is none, with the command that makes it.
    """
    over = {} if options.is_last_layer else {"layers": options.layers, "trust_code": options.trust_code}
    if name is None or name == options.default_base:
        maker = run.suggest("fit-laplace", **over)
        return run.folder.find_posterior(options.default_base, flag="\0base\0", maker=maker, is_meant=True)
    otherwise = run.suggest("fit-laplace", **over, name=name)
    return find_named(run, name, flag="\0base\0", otherwise=otherwise, trust_code=options.trust_code)
