"""What a line that makes no artifact can see of its run: while that is the same, it need not run again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bnncli.artifacts.files import read_header
from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import NOT_OF_CONTENT, BnnError
from bnncli.numerics.digests import json_sha256
from bnncli.stages.grid.plan import Job


@dataclass(frozen=True)
class Seen:
    """What there was to see at one time.

    Args:
        artifacts: digests of the contents of those of the run, by their paths.
        settings: what sets options beside the line itself.
    """

    artifacts: Mapping[Path, str]
    settings: Mapping[str, object]

    def digest(self, *, apart_from: Collection[Path]) -> str:
        """Of all that is there but some artifacts: of lines beside it, for which it does not wait, so that these are chance."""
        others = {path.resolve() for path in apart_from}
        found = {str(path): text for path, text in self.artifacts.items() if path.resolve() not in others}
        return json_sha256({"artifacts": found, **self.settings})


def seen_by(job: Job, config: str | None) -> Seen | None:
    """What a line that makes no artifact can see: the artifacts of its run by their contents, and what sets options.

    None for a line that makes artifacts, which tells itself whether they are up to date; and where it is not known which run it sees.

    Args:
        config: the configuration file that was named.
    """
    if job.step.makes_artifacts:
        return None
    variables = {name: value for name, value in os.environ.items() if name.startswith("BNNCLI_")}
    path = Path(config or variables.get("BNNCLI_CONFIG") or "bnncli.toml")
    settings = path.read_bytes() if path.is_file() else b""
    if b"run-dir" in settings or b"run_dir" in settings:
        return None
    own = f"BNNCLI_{job.step.command}_RUN_DIR".upper().replace("-", "_")
    run_dir = job.given.get("run_dir", variables.get(own, variables.get("BNNCLI_RUN_DIR")))
    digest = hashlib.sha256(settings).hexdigest()
    return Seen(_artifacts(job, run_dir), {"variables": variables, "config": digest})


def _artifacts(job: Job, run_dir: str | None) -> dict[Path, str]:
    """Digests of the contents of the artifacts in a run folder, by their paths."""
    found: dict[Path, str] = {}
    try:
        folder = RunFolder.of(Path(job.checkpoint), run_dir, is_name=True)
    except BnnError:
        return found
    features = [folder.features(name) for name in folder.splits()]
    for path in [
        *features,
        *folder.posteriors(),
        *folder.prediction_files(),
        *folder.decision_files(),
        *folder.metrics_files(),
    ]:
        try:
            found[path] = read_header(path).content_digest
        except NOT_OF_CONTENT:
            raise
        except BnnError:
            found[path] = "damaged"
    return found
