"""Which of a network's modules theta's pieces belong to, by the parameters' names alone."""

from __future__ import annotations

from itertools import groupby

from bnncli.theta.layout import ParamLayout


def module_places(layout: ParamLayout) -> dict[str, slice]:
    """Where each module's own parameters lie in theta; a module's name is what is before the last dot of theirs."""
    places = {}
    for module, group in groupby(layout.parts, key=lambda part: part.name.rpartition(".")[0]):
        parts = list(group)
        places[module] = slice(parts[0].place.start, parts[-1].place.stop)
    return places
