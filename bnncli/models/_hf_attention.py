"""Attention of networks of the library transformers as torch.func can differentiate it, example by example.

By default the library looks at the values of an attention mask, to leave it out where nothing is padded, which has no rule for
vmap. Its own extension points take a mask that is always made, and the same attention otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnncli.models._extra import require

if TYPE_CHECKING:
    from torch import nn

_NAME = "bnncli_plain"
_CHOOSE = "set_attn_implementation"


def with_plain_attention(network: nn.Module) -> nn.Module:
    """The network itself; what is in it of the library transformers makes its attention masks whatever they hold from now on."""
    for part in network.modules():
        if hasattr(part, _CHOOSE):
            _choose(part)
            break
    return network


def _choose(network: Any) -> None:
    transformers = require("transformers", extra="hf")
    masks = require("transformers.masking_utils", extra="hf")
    attention = require("transformers.integrations.sdpa_attention", extra="hf")

    def mask(*sizes: Any, **settings: Any) -> Any:
        return masks.sdpa_mask(
            *sizes, **{**settings, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )

    transformers.AttentionMaskInterface.register(_NAME, mask)
    transformers.AttentionInterface.register(_NAME, attention.sdpa_attention_forward)
    try:
        network.set_attn_implementation(_NAME)
    except (ValueError, ImportError):  # a network without that kind of attention has one that can be differentiated
        network.set_attn_implementation("eager")
