"""A checkpoint's weights: how they were saved, what saved them, which network they look like, and its head."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bnncli.models.build import recognised
from bnncli.models.checkpoints import Checkpoint, load_whole, states_in
from bnncli.models.recognition import guess, possible_heads
from bnncli.names import listed, prefixes_of, quoted
from bnncli.options.declaration import spelled
from bnncli.stages.inspect.found import Found

_HYPER_PARAMETERS = ("hyper_parameters", "hparams", "args", "config", "cfg", "opt", "model_args", "model_kwargs")
_MAX_HYPER_PARAMETERS, _MAX_HEADS, _MAX_DEPTH = 60, 6, 4
_PLAIN = (str, int, float, bool, type(None))


def checkpoint_found(path: Path) -> Found:
    """What a checkpoint is. Raises what load_checkpoint raises."""
    checkpoint, saved = load_whole(path)
    found = Found("checkpoint")
    found.add("format", checkpoint.format, key="format")
    found.add("selected key", str(checkpoint.selected_key))
    found.document["selected_key"] = checkpoint.selected_key
    found.add("stripped prefixes", ", ".join(checkpoint.stripped_prefixes) or "none")
    found.document["stripped_prefixes"] = list(checkpoint.stripped_prefixes)
    found.add("weights digest", checkpoint.weights_digest, key="weights_digest")
    found.add("file sha256", checkpoint.file_sha256, key="file_sha256")
    found.add("parameters", str(sum(tensor.numel() for tensor in checkpoint.state.values())))
    notes = [spelled(note) for note in checkpoint.notes]
    for note in notes:
        found.add("note", note)
    found.document["notes"] = notes
    _add_origin(found, saved)
    _add_states(found, saved)
    _add_network(found, checkpoint, saved)
    arrays = {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in checkpoint.state.items()
    }
    found.facts += [[f"tensor {quoted(name)}", described] for name, described in arrays.items()]
    found.document["arrays"] = arrays
    return found


def _add_origin(found: Found, saved: Any) -> None:
    """What wrote the file, as far as it tells, with the settings it kept."""
    if not isinstance(saved, Mapping):
        return
    version = saved.get("pytorch-lightning_version")
    if isinstance(version, str):
        found.add("created by", f"Lightning {version}", key="made_by")
    elif isinstance(saved.get("arch"), str) and "state_dict" in saved:
        found.add("created by", f"a timm-style training script, arch {saved['arch']}", key="made_by")
    for name in ("epoch", "global_step", "step", "iteration"):
        if isinstance(saved.get(name), int):
            found.add(name, saved[name])
    told = {
        key: value for name in _HYPER_PARAMETERS for key, value in _flat(saved.get(name), name)
    }  # fmt: skip
    for key, value in list(told.items())[:_MAX_HYPER_PARAMETERS]:
        found.add(key if len(key) <= 80 else f"{key[:80]}...", value)
    if told:
        found.document["hyper_parameters"] = dict(list(told.items())[:_MAX_HYPER_PARAMETERS])


def _flat(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Plain values by dotted name; of a list, what it says in one line."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}", depth + 1)
    elif isinstance(value, _PLAIN) and depth:
        yield name, value
    elif isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value):
        yield name, ", ".join(map(str, value[:20]))


def _add_states(found: Found, saved: Any) -> None:
    """The states to choose from, where there are several."""
    states = states_in(saved)
    if len(states) > 1:
        for one in states:
            averaged = ", averaged" if one.is_averaged else ""
            found.add(f"state {quoted(one.key)}", f"{one.num_tensors} tensors{averaged} (--state {one.key})")
    found.document["states"] = [one._asdict() for one in states]


def _add_network(found: Found, checkpoint: Checkpoint, saved: Any) -> None:
    """What the network looks like, and the line that would run it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.state.items()}
    heads = possible_heads(shapes)
    for place, head in enumerate(heads[:_MAX_HEADS]):
        outputs = "1 output" if head.num_classes == 1 else f"{head.num_classes} classes"
        found.add("head" if not place else "or head", f"{quoted(head.name)}: {outputs}, {head.num_features} features")
    if len(heads) > _MAX_HEADS:
        found.add("or head", f"one of {len(heads) - _MAX_HEADS} more")
    found.document["heads"] = [head._asdict() for head in heads]
    network, model, data = _network_of(checkpoint, saved, shapes)
    found.add("network", network, key="network")
    found.suggest(checkpoint.path, model=model, data=data)


def _network_of(
    checkpoint: Checkpoint, saved: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, str | None, str]:
    """The network in words, --model (None: not known), and a split of its kind."""
    images = "images:TRAIN"
    built_in = recognised(checkpoint.state)
    if built_in:
        name, arguments = built_in[0]
        sizes = ", ".join(f"{key} {value}" for key, value in arguments.items())
        unsure = "; activation=relu is a guess" if name == "mlp" else ""
        return f"{name} ({sizes}){unsure}", name, "npz:TRAIN.npz"
    if (config := checkpoint.path.parent / "config.json").is_file() and '"model_type"' in _text(config):
        folder = checkpoint.path.parent
        return f"weights of the Hugging Face folder {folder}", f"hf:{folder}", "SPEC"
    arch = saved.get("arch") if isinstance(saved, Mapping) else None
    told = guess(shapes)
    if isinstance(arch, str) and arch.isidentifier() and (told is None or told.model is None):
        return f"arch {arch}, according to the file", f"timm:{arch}", images
    if told is not None:
        is_text = told.model is None and "Hugging Face" in told.text
        return told.text, "hf:DIR" if is_text else told.model, "SPEC" if told.model is None else images
    parts = [prefix[:-1] for prefix in prefixes_of(shapes) if prefix.count(".") == 1]
    return f"unknown; its parts: {listed(parts)}" if parts else "unknown", None, "SPEC"


def _text(path: Path) -> str:
    """The start of a small file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 20)
    except OSError:
        return ""
