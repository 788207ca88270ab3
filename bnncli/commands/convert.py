"""convert: write a checkpoint's weights as a safetensors state dict, or a linear classifier's as npz."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import check_writable, publish_bytes, remove_dead_temporaries
from bnncli.artifacts.freshness import carries_our_mark
from bnncli.data.arrays import npz_names
from bnncli.errors import OutputExists, UsageError
from bnncli.models.checkpoint_files import sniff, sniff_zip
from bnncli.models.checkpoints import convert_checkpoint
from bnncli.models.sharded import find_sharded_folder, shards_of
from bnncli.models.sklearn_arrays import convert_classifier
from bnncli.numerics.digests import tensor_digest
from bnncli.options.command import Argument, Command, CommonOptions, WriteOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.session.run import Result, Run
from bnncli.system.input_files import open_regular


@dataclass(frozen=True)
class ConvertOptions(CheckedOptions):
    """Options of convert."""

    trust_pickle: bool = option(
        False, "Unpickle SOURCE, which can run any code in it. Use it only with files that you trust."
    )
    state: str | None = option(
        None,
        "Which weights to take from a checkpoint with several sets: a key that inspect lists, or ema for the "
        "averaged ones.",
        metavar="NAME",
    )


COMMAND = Command(
    "Write a checkpoint's weights as a safetensors state dict.",
    "Also reads folders: shards with an index, and distributed checkpoints from torch (FSDP) and DeepSpeed "
    "(ZeRO 1 to 3). If TARGET ends in .npz, writes the arrays of a scikit-learn linear classifier, for --model "
    "sklearn:FILE. Unpickles code only with --trust-pickle.",
    (ConvertOptions, WriteOptions, CommonOptions),
    (
        "bnncli convert ckpt.ckpt ckpt.safetensors --trust-pickle",
        "bnncli convert step-1000/ step-1000.safetensors",
        "bnncli convert model.joblib model.npz --trust-pickle",
    ),
    (
        Argument("source", "The checkpoint: a file, or a folder with several files."),
        Argument(
            "target", "The safetensors file to write, or an .npz file for a scikit-learn classifier.", writes=True
        ),
    ),
    section="Files",
    place=50,
)


_OF_PYTORCH = (".pt", ".pth", ".ckpt", ".bin")  # what torch.load is expected to read


def execute(run: Run, options: ConvertOptions) -> Result:
    """Write the weights of a checkpoint. With --trust-pickle the file's own code may run."""
    source, target = Path(run.arguments["source"]), Path(run.arguments["target"])
    if target.suffix.lower() in _OF_PYTORCH:
        raise UsageError(
            f"expected a target that ends in .safetensors; got {target}",
            hint=f"name it {target.with_suffix('.safetensors')}",
        )
    if not run.write.dry_run:
        remove_dead_temporaries(target.parent, of=target)
    if target.exists() and not run.write.force:
        raise OutputExists(f"{target} exists", hint="add --force to replace it", path=target)
    if target.exists() and not target.is_file():
        raise OutputExists(f"{target} is not a file", path=target)
    is_classifier = target.suffix == ".npz"
    if target.exists():
        _check_kind(target, "npz" if is_classifier else "safetensors")
    check_writable(target.parent, hint="write to another folder")
    if not (source.is_dir() and (find_sharded_folder(source) or shards_of(source))):
        with open_regular(source):  # a missing file is reported before the slow imports
            pass
    if is_classifier:
        return _write_classifier(run, options, source, target)
    from safetensors.torch import save

    state = convert_checkpoint(source, trust_pickle=options.trust_pickle, wanted=options.state, say=run.console.info)
    size = sum(tensor.nbytes for tensor in state.values())
    digest = tensor_digest(state)
    output: dict[str, Any] = {"role": "state_dict", "path": str(target), "content_digest": digest}
    summary = [f"{len(state)} tensors, {size / 1e6:.1f} MB, weights digest {digest[:27]}"]
    return _publish(
        run,
        output,
        lambda: save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}),
        size,
        summary,
    )


def _check_kind(target: Path, kind: str) -> None:
    """Raise OutputExists unless the file to replace is empty or may come from convert."""
    with open_regular(target) as stream:
        found = sniff(stream)
        if (sniff_zip(stream) if found == "zip" else found) not in (kind, "empty"):
            what = "an npz file" if kind == "npz" else f"a {kind} file"
            raise OutputExists(f"{target} is not {what}", hint="give another name", path=target)
    if kind == "npz" and target.stat().st_size and "coef_" not in npz_names(target):
        raise OutputExists(f"{target} holds no classifier", hint="give another name", path=target)
    if target.stat().st_size and carries_our_mark(target):
        raise OutputExists(f"{target} is an artifact of bnncli", hint="give another name", path=target)


def _write_classifier(run: Run, options: ConvertOptions, source: Path, target: Path) -> Result:
    """Write the arrays of a scikit-learn classifier."""
    import numpy as np

    if options.state is not None:
        raise UsageError("--state chooses among a checkpoint's weights, but a classifier has only one set")
    arrays = convert_classifier(source, target, trust_pickle=options.trust_pickle)
    digest = tensor_digest(arrays)
    output: dict[str, Any] = {"role": "classifier", "path": str(target), "content_digest": digest}
    size = sum(array.nbytes for array in arrays.values())
    shape = " x ".join(map(str, arrays["coef_"].shape))
    summary = [f"{', '.join(arrays)}; coefficients {shape}, weights digest {digest[:27]}"]

    def content() -> bytes:
        stream = BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]
        return stream.getvalue()

    return _publish(run, output, content, size, summary)


def _publish(run: Run, output: dict[str, Any], content: Callable[[], bytes], size: int, summary: list[str]) -> Result:
    """Write the file, or say that it would be written."""
    target = Path(output["path"])
    if run.write.dry_run:
        return Result("planned", [output], lines=[f"write {target} ({size / 1e6:.1f} MB)"], summary=summary)
    action = "replaced" if target.exists() else "computed"
    publish_bytes(target, content(), may_replace=run.write.force)
    return Result(action, [output], summary=summary)
