"""Networks of the library transformers, filled strictly: it leaves random what a file of weights does not have, with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from bnncli.checkpoints.load import check_finite, load_checkpoint
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted
from bnncli.lazy import torch
from bnncli.models._extra import part, require
from bnncli.models._hf_folder import CONFIG, PICKLED, WEIGHTS, architecture_of, weight_files
from bnncli.models._hf_inputs import Images, Sounds, Texts
from bnncli.names import listed, quoted

if TYPE_CHECKING:
    from torch import Tensor, nn

NO_PADDING = -1  # the number of no token
_COUNTER = ".num_batches_tracked"  # of batch norms, which files from before torch 0.4.1 have not; prediction needs none


def classifier(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor] | None) -> nn.Module:
    """The classifier of a folder of `save_pretrained`, in evaluation mode, float32, on the CPU.

    Args:
        config: of config.json.
        state: what fills it; None for the folder's own weights.

    Raises:
        DataError: a weight is missing, unknown or of another shape, or the library cannot make the network.
        Untrusted: its definition is code in its folder.
    """
    made_by, name = load_config(folder), architecture_of(config)
    transformers = require("transformers", extra="hf")
    made = part(transformers, str(name), extra="hf")
    if made is None:
        raise _unknown(folder, config, f"transformers {transformers.__version__} has no {name}")
    if state is None:
        state = pickled_state(folder)
    network, info = load(made, folder, made_by, state)
    check_filled(
        info, what=f"the {'checkpoint' if state is not None else 'folder'} does not match {name}", folder=folder
    )
    return settled(network)


def load_config(folder: Path, **changes: Any) -> Any:
    """The library's own reading of config.json; it never runs code of the folder.

    Raises:
        DataError, Untrusted: it cannot.
    """
    transformers = require("transformers", extra="hf")
    with told(folder):
        return transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **changes
        )


def load(made: Any, folder: Path, config: Any, state: Mapping[str, Tensor] | None) -> tuple[nn.Module, dict[str, Any]]:
    """A network of a class of the library, and what it says of names that did not fit."""
    if state is None and not weight_files(folder):
        message = f"{quoted(folder, limit=300)} has no weights; looked for {WEIGHTS}, its index, and {PICKLED}"
        raise MissingInput(message, path=folder, hint="pass a weights file as the checkpoint")
    given = {} if state is None else {"state_dict": dict(state)}
    with told(folder):
        network, info = made.from_pretrained(
            str(folder) if state is None else None, config=config, dtype=torch.float32, output_loading_info=True,
            ignore_mismatched_sizes=True, local_files_only=True, trust_remote_code=False, use_safetensors=True, **given,
        )  # fmt: skip
        own, whole = network.state_dict(), _no_reals(folder, state)
    if odd := sorted(name for name in whole & own.keys() if own[name].is_floating_point()):
        raise DataError(
            f"{quoted(folder, limit=300)}: the weights {listed(odd)} are integers, but the network expects "
                "floating-point numbers",
            code="quantised", path=folder, hint="save the model before quantisation",
        )  # fmt: skip
    return network, info


def _no_reals(folder: Path, state: Mapping[str, Tensor] | None) -> set[str]:
    """Names of the tensors whose numbers are whole, which the library would take for real ones."""
    if state is not None:
        return {name for name, tensor in state.items() if not tensor.is_floating_point()}
    found: set[str] = set()
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as stored:
                names = list(stored.keys())
                found |= {name for name in names if not stored.get_slice(name).get_dtype().startswith(("F", "BF"))}
    return found


def check_filled(
    info: Mapping[str, Any],
    *,
    what: str,
    folder: Path,
    may_miss: Callable[[str], bool] = lambda name: False,
    may_have: Callable[[str], bool] = lambda name: False,
) -> None:
    """Nothing, when every weight of a network came out of its file, and every one of the file went into it.

    Args:
        info: as from_pretrained gives it; names that the architecture itself declares ignorable are not in it.
        may_miss, may_have: names that may be missing or of another shape, and ones that may be unknown.

    Raises:
        DataError: with the names.
    """
    missing = sorted(name for name in info["missing_keys"] if not name.endswith(_COUNTER) and not may_miss(name))
    unknown = sorted(name for name in info["unexpected_keys"] if not may_have(name))
    odd = sorted((name, tuple(came), tuple(own)) for name, came, own in info["mismatched_keys"] if not may_miss(name))
    parts = [f"missing from the weights ({len(missing)}): {listed(missing)}"] if missing else []
    parts += [f"not in the network ({len(unknown)}): {listed(unknown)}"] if unknown else []
    parts += [f"{quoted(name)} has shape {came} in the weights, {own} in the network" for name, came, own in odd[:3]]
    parts += [" ".join(str(text).split())[:200] for text in info.get("error_msgs", [])[:1]]
    if parts:
        raise DataError(f"{quoted(folder, limit=300)}: {what}; {'; '.join(parts)}", code="wrong_weights", path=folder)


def settled(network: nn.Module) -> nn.Module:
    """The network in evaluation mode, float32, without gradients; it keeps no cache of what it has seen."""
    check_finite({name: value for name, value in network.state_dict().items() if isinstance(value, torch.Tensor)})
    config: Any = network.config
    if getattr(config, "use_cache", None):
        config.use_cache = False
    return network.float().eval().requires_grad_(False)


def with_padding(network: nn.Module, transform: Texts | Images | Sounds | None) -> nn.Module:
    """The network, told the token that its tokenizer pads texts with where its configuration names none.

    Decoders classify by a text's last token that is no padding. Without a token for it they see texts unpadded, and take the last.
    """
    config: Any = network.config
    if isinstance(transform, Texts) and getattr(config, "pad_token_id", None) is None:
        token = transform.pad_token_id
        config.pad_token_id = NO_PADDING if token is None else token
    return network


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """The library is silent inside the block, and what it raises is an error in the folder.

    Raises:
        DataError, Untrusted: with the first line of what was raised.
    """
    logging = require("transformers.utils.logging", extra="hf")
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    except (BnnError, MemoryError):
        raise
    except Exception as error:  # others' code: whatever it raises, this folder cannot be used
        why = " ".join(str(error).split())
        if "trust_remote_code" in why:
            raise _is_code(folder) from error
        message = f"{quoted(folder, limit=300)}: cannot load the model: {type(error).__name__}: {why[:200]}"
        raise DataError(message, path=folder) from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _is_code(folder: Path) -> Untrusted:
    return Untrusted(
        f"{quoted(folder, limit=300)}: the model is defined by code in the folder (auto_map in {CONFIG}), which "
        "bnncli never runs",
        hint="if you trust this code, use \0model\0 file.py:factory with a factory that builds the network",
        path=folder / CONFIG,
    )


def _unknown(folder: Path, config: Mapping[str, Any], why: str) -> BnnError:
    if "auto_map" in config:
        return _is_code(folder)
    return DataError(f"{quoted(folder, limit=300)}: {why}", path=folder / CONFIG)


def pickled_state(folder: Path) -> dict[str, Tensor] | None:
    """Weights that are in torch's own format; None where they are safetensors."""
    files = weight_files(folder)
    return load_checkpoint(files[0]).state if files and files[0].name.startswith(PICKLED) else None
