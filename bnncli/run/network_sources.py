"""What posteriors over other layers are made from beside features: the examples, and the files of the network."""

from __future__ import annotations

from collections.abc import Iterable

from bnncli.artifacts.provenance import Source
from bnncli.numerics.digests import file_sha256
from bnncli.run.inputs import Split


def network_sources(splits: Iterable[Split]) -> list[Source]:
    """The user's own inputs of some splits' features, as those record them; a network's file as it is now.

    Data are looked at when they are read. A network that was edited since is another input: what was fitted of it is no
    longer up to date, and cannot be fitted again before the features are made anew.
    """
    found: dict[str, Source] = {}
    for split in splits:
        header = split.content.header
        if header is None:
            continue
        for entry in header.inputs:
            if entry.get("is_artifact", True):
                continue
            path, digest = header.input_path(entry), str(entry["content_digest"])
            if entry["role"] == "model" and path.is_file():
                digest = f"sha256:{file_sha256(path)}"
            found[entry["role"]] = Source(entry["role"], path, digest, is_artifact=False)
    return list(found.values())
