"""The heads that networks have, each in a file that `bnncli extract-features` runs on: how far features times head are from what
the network itself returns, in how many seconds, and the line to type.

    python benchmarks/heads.py          # the networks are in head_networks.py
    python benchmarks/heads.py --only softmax --out heads.json

Networks are small, their weights random, and the commands run in this process. Forms that need a library which cannot be
imported are named and left out. Exits 1 where a difference is more than rounding explains.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from head_networks import FORMS, drawn, make
from torch import Tensor, nn

QUICK = ("linear layer", "softmax", "ReLU and average behind it", "Lightning with extra buffers")
MUCH = 1e-5  # of 1 + the largest output; 8-bit layers round by themselves


@dataclass(frozen=True)
class Case:
    """What is run, and what it must give.

    Attributes:
        checkpoint: the first argument.
        words: those that follow; `--data` is added.
        expected: what the network returns for the images.
        before: a command that is run first.
        tolerance: of the difference.
    """

    checkpoint: str
    words: tuple[str, ...]
    expected: Tensor
    link: Callable[[Tensor], Tensor] = lambda logits: logits
    before: tuple[str, ...] = ()
    size: int = 8
    tolerance: float = MUCH


def images(size: int) -> Tensor:
    return torch.randn(12, 3, size, size, generator=torch.Generator().manual_seed(0))


def plain() -> tuple[nn.Module, dict[str, Tensor], tuple[str, ...], Tensor]:
    """A network with a linear layer, its state, how it is named, and its logits."""
    network = drawn(make("linear layer"))
    return (
        network,
        network.state_dict(),
        ("--model", "head_networks.py:make", "--model-arg", "form=linear layer"),
        network(images(8)),
    )


def of_state(save: Callable[[dict[str, Tensor]], str], *, before: tuple[str, ...] = ()) -> Case:
    """A state as `save` keeps it; before: how it is converted."""
    _, state, words, expected = plain()
    place = save(state)
    return Case(before[2] if before else place, words, expected, before=before)


def saved(value: Any, name: str = "ckpt.pt") -> str:
    torch.save(value, name)
    return name


def lightning() -> Case:
    return of_state(
        lambda state: saved(
            {
                "state_dict": {f"model.{name}": one for name, one in state.items()} | {"metric.total": torch.ones(())},
                "pytorch-lightning_version": "2.5.0", "epoch": 3, "global_step": 9, "hyper_parameters": {"lr": 0.1},
            },
            "last.ckpt",
        )
    )  # fmt: skip


def distributed() -> Case:
    def save(state: dict[str, Tensor]) -> str:
        from torch.distributed import checkpoint

        checkpoint.save({"model": state}, checkpoint_id="dcp", no_dist=True)
        return "dcp"

    return of_state(save, before=("convert", "dcp", "dcp.pt"))


def shards() -> Case:
    from safetensors.torch import save_file

    def save(state: dict[str, Tensor]) -> str:
        names = [*state]
        places: dict[str, str] = {}
        for number, part in enumerate((names[:4], names[4:]), 1):
            file = f"model-0000{number}-of-00002.safetensors"
            save_file({name: state[name].contiguous() for name in part}, file)
            places |= dict.fromkeys(part, file)
        Path("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return "model.safetensors.index.json"

    return of_state(save)


def quantised() -> Case:
    network, _, words, _ = plain()
    quantize = torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, dtype=torch.qint8)
    return Case(saved(quantize.state_dict()), words, quantize(images(8)), tolerance=0.02)


def script() -> Case:
    network, *_, expected = plain()
    torch.jit.trace(network, images(8)).save("net.pt")
    return Case("script", ("--model", "jit:net.pt"), expected)


def exported() -> Case:
    network, *_, expected = plain()
    batch = torch.export.Dim("n", min=2)
    torch.export.save(torch.export.export(network, (images(8),), dynamic_shapes={"images": {0: batch}}), "net.pt2")
    return Case("program", ("--model", "export:net.pt2"), expected)


def onnx() -> Case:
    network, *_, expected = plain()
    needs("onnx", "onnxruntime")
    torch.onnx.export(
        network, (images(8),), "net.onnx", dynamo=False, input_names=["images"], dynamic_axes={"images": {0: "n"}}
    )
    return Case("graph", ("--model", "onnx:net.onnx"), expected)


def of_library(kind: str, name: str, size: int, *words: str) -> Case:
    """A network that timm or torchvision builds."""
    library = needs(kind)
    network = drawn(
        library.create_model(name, num_classes=3) if kind == "timm" else getattr(library.models, name)(num_classes=3)
    )
    place = saved(network.state_dict())
    return Case(
        place, ("--model", f"{kind}:{name}", "--model-arg", "num_classes=3", *words), network(images(size)), size=size
    )


def deit(is_adapted: bool) -> Case:
    """A vision transformer of Hugging Face: two tokens with a head each, or an adapter on the head."""
    transformers = needs("transformers")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "num_labels": 3,
    }
    places = {"image_size": 8, "patch_size": 4}
    with torch.no_grad():
        if not is_adapted:
            network = drawn(
                transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**places, **sizes))
            )
            network.save_pretrained("deit")
            return Case("run", ("--model", "hf:deit"), network(images(8)).logits)
        peft = needs("peft")
        network = drawn(transformers.ViTForImageClassification(transformers.ViTConfig(**places, **sizes)))
        network.save_pretrained("vit")
        drawn(peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["classifier"]))).save_pretrained(
            "adapter"
        )
        base = transformers.ViTForImageClassification.from_pretrained("vit")
        network = peft.PeftModel.from_pretrained(base, "adapter").eval()
        return Case("run", ("--model", "peft:adapter", "--base-model", "vit"), network(images(8)).logits)


FILES: dict[str, Callable[[], Case]] = {
    "SqueezeNet": lambda: of_library("torchvision", "squeezenet1_1", 64, "--last-layer", "identity"),
    "VOLO": lambda: of_library("timm", "volo_d1_224", 224, "--last-layer", "identity"),
    "BiT": lambda: of_library("timm", "resnetv2_50x1_bit", 64),
    "distilled DeiT": lambda: deit(is_adapted=False),
    "LoRA, merged": lambda: deit(is_adapted=True),
    "TorchScript": script,
    "exported program": exported,
    "ONNX": onnx,
    "DCP folder": distributed,
    "Lightning with extra buffers": lightning,
    "sharded safetensors": shards,
    "8-bit linear layers": quantised,
}


def needs(*libraries: str) -> Any:
    """The last of these libraries. Raises ImportError, or RuntimeError where it is of another torch."""
    return [importlib.import_module(name) for name in libraries][-1]


def of_form(name: str) -> Case:
    form, network = FORMS[name], drawn(make(name))
    words = ("--model", "head_networks.py:make", "--model-arg", f"form={name}", *form.words)
    return Case(saved(network.state_dict()), words, form.of(network(images(8))), form.link)


def measured(name: str) -> dict[str, Any]:
    """A form's difference, seconds and line; run in a folder of its own."""
    from bnncli.artifacts.features import read_features
    from bnncli.cli.execute import run_command_line

    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        case = of_form(name) if name in FORMS else FILES[name]()
    expected = case.expected.reshape(len(case.expected), -1).double()
    labels = (
        np.arange(len(expected)) % expected.shape[1]
        if "multilabel" not in case.words
        else np.arange(36).reshape(12, 3) % 2
    )
    np.savez("train.npz", x=images(case.size).numpy(), y=labels)
    line = ("extract-features", case.checkpoint, *case.words, "--data", "train=npz:train.npz")
    messages, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stderr(messages):
        codes = [run_command_line([*words], io.StringIO()) for words in (case.before, line) if words]
    seconds = time.perf_counter() - start
    typed = " && ".join(
        f"bnncli {' '.join(f'{word!r}' if ' ' in word else word for word in words)}"
        for words in (case.before, line)
        if words
    )
    row = {
        "form": name,
        "seconds": seconds,
        "line": typed,
        "difference": None,
        "tolerance": case.tolerance * (1 + float(expected.abs().max())),
    }
    if any(codes):
        return {**row, "message": messages.getvalue().strip()}
    found = read_features(Path(f"{case.checkpoint}.bnn/features/train.h5"))
    assert found.head_weight is not None
    bias = 0 if found.head_bias is None else found.head_bias.astype(np.float64)
    logits = torch.from_numpy(found.features.astype(np.float64) @ found.head_weight.T.astype(np.float64) + bias)
    return {**row, "difference": float((case.link(logits) - expected).abs().max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="forms with this in their names")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"these alone: {', '.join(QUICK)}")
    parser.add_argument("--device", default="cpu", help="cpu: there is nothing here for a GPU")
    options = parser.parse_args()
    names = [name for name in (QUICK if options.quick else (*FORMS, *FILES)) if options.only in name]
    out, here, rows = None if options.out is None else options.out.absolute(), Path.cwd(), []
    print(f"{'form':34} {'difference':>11} {'seconds':>8}  line")
    for name in names:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shutil.copy(Path(__file__).with_name("head_networks.py"), folder)
            os.chdir(folder)
            try:
                row = measured(name)
            except (ImportError, RuntimeError) as error:
                print(f"{name:34} left out: {str(error).splitlines()[0]}")
                continue
            finally:
                os.chdir(here)
        rows.append(row)
        difference = "failed" if row["difference"] is None else f"{row['difference']:.1e}"
        print(f"{name:34} {difference:>11} {row['seconds']:8.1f}  {row['line']}", flush=True)
        if row["difference"] is None:
            print(row["message"])
    if out is not None:
        out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    if any(row["difference"] is None or row["difference"] > row["tolerance"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
