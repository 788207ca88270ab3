"""The network that a run's features were made by, opened again as they record it.

A record is a file, which may come from anybody: code that it names is run only where the caller names it too. Built-in
networks and models that bring their own definition are read without running any.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from bnncli import data, registry
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import UNKNOWN_MAKER
from bnncli.artifacts.headers import Header, interpreting
from bnncli.errors import BnnError, DataError, Untrusted, UsageError
from bnncli.models import SavedModel, is_kind
from bnncli.numerics.digests import file_sha256, tensor_digest
from bnncli.run.model_files import ModelFiles, opened_model
from bnncli.run.network import Network
from bnncli.run.session import Run
from bnncli.system.user_code import CodeFolder

_PROGRAM = "jit"  # the kind of model that is a program


class RecordedNetwork:
    """The network that the features of a run were made by.

    Attributes:
        header: of the split whose record this is.
        network: filled with the checkpoint's weights.
        preprocess: what was done to the inputs.
        dtype: that features are stored in.
        folder: of the code that made it, for what that imports later; None without code.
    """

    def __init__(self, run: Run, header: Header, params: Mapping[str, Any], code: str | None) -> None:
        self.header, self._code = header, code
        with interpreting(header.path):
            layer, self.dtype = header.meta["layer"], str(params["dtype"])
            sizes = {name: params[name] for name in ("mean", "std", "resize", "crop")}
            sizes |= {name: params[name] for name in ("no_exif", "background") if name in params}
            spec, arguments, state = str(params["model"]), list(params["model_arg"]), params.get("state")
        saved = saved_as(spec, header)
        self.preprocess = data.Preprocess.parse(**sizes, transform=None if saved is None else saved.transform)
        self.network = Network.of(run, spec, arguments, layer, saved, params.get("output"), state=state)
        self.network.autocast = params.get("autocast")
        self.folder = CodeFolder(spec) if ":" in spec and not is_kind(spec) else None
        record = self.network.record
        if record is not None and record["weights_digest"] != header.weights_digest:
            raise DataError(f"{header.path} was created from other weights", code="wrong_checkpoint", path=header.path)

    def is_of(self, header: Header, code: str | None) -> bool:
        """Whether it was made as this header says, of this code."""
        return (self.header.content_digest, self._code) == (header.content_digest, code)

    def visible(self) -> AbstractContextManager[object]:
        """While it runs: the folder of its code is there to import from."""
        return nullcontext() if self.folder is None else self.folder.visible()

    def check_head(self, head: Any) -> None:
        """Pass when the network's last layer is the head that the run's features belong to. Raises DataError otherwise."""
        parts = {} if head is None else {"weight": head.weight, "bias": head.bias}
        digest = tensor_digest({name: part.numpy() for name, part in parts.items() if part is not None})
        if digest != self.header.meta.get("head_digest"):
            raise DataError(
                f"the last linear layer of {self.network.spec!r} is not the head stored in {self.header.path}",
                code="wrong_head",
                hint=self.network.run.remake(self.header, force=True) or UNKNOWN_MAKER,
                path=self.header.path,
            )


def network_header(run: Run) -> Header:
    """The header of the first split of the run that can be used; its network is that of all.

    Raises:
        DataError: all are stale or damaged.
    """
    first: BnnError | None = None
    for name in run.folder.splits():
        try:
            header = read_header(run.folder.features(name))
            run.use(header)
            return header
        except DataError as error:
            first = first or error
    raise first or DataError(f"{run.checkpoint_path} has no features", hint=run.suggest("status"))


Opened = TypeVar("Opened", bound=RecordedNetwork)


def open_recorded(
    kind: type[Opened], run: Run, header: Header, named: str | None, known: Opened | None = None
) -> Opened:
    """The network that a split was made by, as this kind; all is checked again where it is known.

    Args:
        named: what the caller calls it; code is run only if it is named.
        known: the one of an earlier call, given back where split and code are still the same.

    Raises:
        DataError: the split was made by none, or the code has changed since.
        Untrusted: the network is code that nobody named.
        UsageError: another network was named.
    """
    params = header.provenance.get("params", {})
    spec = params.get("model")
    if not isinstance(spec, str):
        raise DataError(
            f"the run {run.checkpoint_path} has no network to compute features with",
            code="no_network",
            hint="its features were computed elsewhere; compute features for these inputs there too",
        )
    if named is None and runs_code(spec):
        raise Untrusted(
            f"bnncli will not run the code of {spec!r} just because the run folder names it",
            hint=f"if the code is yours, name it: bnncli.open({str(run.checkpoint_path)!r}, model={spec!r})",
        )
    if named is not None and named != spec:
        _check_same_code(spec, named)
    code = _checked_code(run, header, named or spec) if ":" in spec else None
    if known is not None and known.is_of(header, code):
        return known
    return kind(run, header, {**params, "model": named or spec}, code)


def runs_code(spec: str) -> bool:
    """Whether opening this network runs code that is not ours: a factory, a TorchScript program, or a kind that others installed."""
    kind, colon, _ = spec.partition(":")
    own = {*registry.own_names("models")} - {_PROGRAM} if colon else {*registry.own_names("networks")}
    return kind not in own


def _check_same_code(spec: str, named: str) -> None:
    """Pass when the same factory of a file, or a model of the same kind, is named by another path. Raises UsageError otherwise."""
    if is_kind(spec) and named.partition(":")[0] == spec.partition(":")[0]:
        return  # whether its files are the same is looked at next
    (place, _, factory), (own, _, recorded) = named.rpartition(":"), spec.rpartition(":")
    if not (place.endswith(".py") and own.endswith(".py") and factory == recorded):
        raise UsageError(f"\0model\0: the features of this run come from {spec!r}; got {named!r}")


def _checked_code(run: Run, header: Header, named: str) -> str | None:
    """Digest of a network's file or files, which are as they were when the features were made; None where there are none.

    Raises:
        DataError: one has changed; where that is allowed, it is warned of.
    """
    recorded = [entry["content_digest"] for entry in header.inputs if entry["role"] == "model"]
    found = _files_of_model(named, header) if is_kind(named) else _file_of_code(named)
    if found is None:
        return None
    place, digest = found
    if not recorded or recorded == [digest]:
        return digest
    message = f"{place} has changed since {header.path} was created from it"
    if is_kind(named):  # the folder that has all of several files says little
        message = f"the files of {named!r} have changed or moved since {header.path} was created from them"
    if not run.inputs.allow_stale:
        hint = run.remake(header, force=True) or UNKNOWN_MAKER
        raise DataError(message, code="stale_input", hint=hint, path=place)
    run.console.warn(f"{message}; using it anyway (\0allow_stale\0)")
    return digest


def _file_of_code(named: str) -> tuple[Path, str] | None:
    """The file of a factory and its digest; None where a module is named."""
    code = Path(named.rpartition(":")[0])
    return (code, f"sha256:{file_sha256(code)}") if code.suffix == ".py" and code.is_file() else None


def _files_of_model(named: str, header: Header) -> tuple[Path, str] | None:
    """The folder of a saved model's files and their digest; None where it has none."""
    saved = saved_as(named, header)
    if saved is None or not saved.files:
        return None
    files = ModelFiles.of(saved.files)
    return files.folder, f"sha256:{files.sha256()}"


def saved_as(spec: str, header: Header) -> SavedModel | None:
    """The saved model that features were made by, as their parameters say; None for other networks."""
    with interpreting(header.path):
        params = header.provenance["params"]
        arguments = list(params["model_arg"])
        asked = {name: params.get(name) for name in ("base_model", "feature_node")}
    return opened_model(spec, arguments, **asked)
