"""Token classifiers: a word's class comes from the last hidden state at its first token.

An example is a word with its text. The network below returns one row of logits for each word, so its last layer is a
plain linear one; it computes a text whose words follow each other only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bnncli.data.transform import TransformedInputs, Word
from bnncli.errors import DataError, MissingInput
from bnncli.lazy import torch
from bnncli.models.huggingface import CONFIG, Texts, load_tokenizer, text_inputs
from bnncli.names import format_names, quote_name

if TYPE_CHECKING:
    from torch import Tensor, nn

# Byte-level tokenizers that need words with a space before them; those of the library's example run_ner.py.
_SPACED = ("bloom", "deberta", "gpt2", "roberta")
_HEADS = ("classifier", "score")  # the library's names
_TYPES = "token_type_ids"
_TOLERANCE = 1e-4  # of logits, relative to the largest


class _Window(NamedTuple):
    """Tokens of a text that the network sees at once, (L,) by name of the input, and the words' first tokens in them."""

    tokens: dict[str, list[int]]
    firsts: dict[int, int]


@dataclass(frozen=True)
class Words(Texts):
    """A tokenizer for words with their texts, padded on the right.

    A text of more than `max_length` tokens is seen in windows that overlap by half, each word in the window with the
    most tokens around it.

    Attributes:
        has_prefix_space: put a space before each word.
    """

    takes: str = "words"
    has_prefix_space: bool = False

    def load(self) -> Any:
        """Load the tokenizer. Raises DataError if it cannot tell which tokens belong to a word."""
        tokenizer = load_tokenizer(
            self.folder, self.digest, **({"add_prefix_space": True} if self.has_prefix_space else {})
        )
        if not tokenizer.is_fast:
            raise DataError(
                f"{quote_name(self.folder, limit=300)}: its tokenizer ({type(tokenizer).__name__}) does not tell which tokens "
                "belong to a word",
                code="slow_tokenizer", hint="use a fast tokenizer, which the library saves as tokenizer.json",
            )  # fmt: skip
        return tokenizer

    def __call__(self, items: Sequence[Word]) -> TransformedInputs:
        """Return (n, length) int64 by name: token ids, attention mask, and a one at the first token of the word."""
        tokenizer = self.load()
        texts: list[tuple[str, ...]] = []
        numbers = []
        for item in items:
            if not texts or item.words != texts[-1]:
                texts.append(item.words)
            numbers.append(len(texts) - 1)
        has_types = _TYPES in tokenizer.model_input_names
        every = [self._windows(encoding, has_types=has_types) for encoding in self._encode(tokenizer, texts)]
        chosen = [
            next(window for window in every[number] if item.place in window.firsts)
            for number, item in zip(numbers, items, strict=True)
        ]
        longest = max(len(window.tokens["input_ids"]) for window in chosen)
        padding = dict.fromkeys(chosen[0].tokens, 0) | {"input_ids": tokenizer.pad_token_id or 0}
        inputs = {name: np.full((len(items), longest), value, np.int64) for name, value in padding.items()}
        inputs["word_mask"] = np.zeros((len(items), longest), np.int64)
        for row, (item, window) in enumerate(zip(items, chosen, strict=True)):
            for name, values in window.tokens.items():
                inputs[name][row, : len(values)] = values
            inputs["word_mask"][row, window.firsts[item.place]] = 1
        return TransformedInputs(inputs)

    def _encode(self, tokenizer: Any, texts: Sequence[tuple[str, ...]]) -> list[Any]:
        """Return the tokens of each text. A word that has none is replaced by the token for unknown words."""

        def encode(some: Sequence[Sequence[str]]) -> list[Any]:
            given = [list(words) for words in some]
            return list(
                tokenizer(given, is_split_into_words=True, truncation=False, padding=False, verbose=False).encodings
            )

        found = encode(texts)
        for number, (words, encoding) in enumerate(zip(texts, found, strict=True)):
            missing = set(range(len(words))).difference(encoding.word_ids)
            if missing and tokenizer.unk_token is not None:
                (found[number],) = encode([[tokenizer.unk_token if k in missing else w for k, w in enumerate(words)]])
                missing = set(range(len(words))).difference(found[number].word_ids)
            if missing:
                names = format_names(words[place] for place in sorted(missing))
                raise DataError(f"the tokenizer has no tokens for the words {names}", code="bad_words")
        return found

    def _windows(self, encoding: Any, *, has_types: bool) -> list[_Window]:
        """Return the windows of a text, each with the words that it is chosen for."""
        words = encoding.word_ids
        places = [place for place, word in enumerate(words) if word is not None]
        begin, end = places[0], places[-1] + 1  # special tokens are around the text, and around each window
        firsts = {words[place]: place for place in reversed(places)}
        tokens = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask}
        if has_types and any(encoding.type_ids):
            tokens[_TYPES] = encoding.type_ids
        if self.max_length is None or len(words) <= self.max_length:
            return [_Window(tokens, firsts)]
        room = self.max_length - begin - (len(words) - end)
        if room < 2:
            raise DataError(f"the model takes {self.max_length} tokens, too few for a text", code="bad_words")
        starts = range(begin, max(begin + 1, end - room + room // 2), room // 2)
        windows = [
            _Window(
                {name: [*v[:begin], *v[start : min(start + room, end)], *v[end:]] for name, v in tokens.items()}, {}
            )
            for start in starts
        ]

        def context(place: int, start: int) -> int:
            """Return the tokens at the side with fewer, where the text goes on beyond the window; -1 outside it."""
            before = place - start if start > begin else len(words)
            after = start + room - 1 - place if start + room < end else len(words)
            return min(before, after) if start <= place < start + room else -1

        for word, place in firsts.items():
            best = max(range(len(starts)), key=lambda number, place=place: context(place, starts[number]))  # type: ignore[misc]
            windows[best].firsts[word] = place - starts[best] + begin
        return windows

    def to_json(self) -> dict[str, Any]:
        """Return the digest of the tokenizer's files, the length of a window, and how a word becomes tokens."""
        return {**super().to_json(), "words": "first token", "prefix_space": self.has_prefix_space}


def read_words(folders: Sequence[Path], config: Mapping[str, Any]) -> Words:
    """Return what prepares the words for a token classifier, with the tokenizer of the first folder that has one.

    Raises:
        DataError: the model also takes the places of words on a page. MissingInput: there is no tokenizer.
    """
    where = quote_name(folders[0], limit=300)
    if "max_2d_position_embeddings" in config or "dim_bbox" in config:
        message = f"{where}: the model takes the places of words on a page, which is not supported"
        raise DataError(message, code="not_supported", path=folders[0] / CONFIG)
    for folder in folders:
        if (texts := text_inputs(folder, config)) is not None:
            has_space = config.get("model_type") in _SPACED
            return Words(texts.folder, texts.digest, texts.max_length, has_prefix_space=has_space)
    raise MissingInput(f"{where} has no tokenizer, which a token classifier needs", path=folders[0])


def word_network(network: Any, words: Words) -> nn.Module:
    """Return a network from words to their logits (n, K).

    Args:
        network: the token classifier, prepared.

    Raises:
        DataError: its tokenizer cannot tell the words apart, or its logits are not those of its last layer.
    """
    words.load()
    where, kind = quote_name(words.folder, limit=300), type(network).__name__
    name = next((name for name in _HEADS if hasattr(network, name)), None)
    if name is None:
        raise DataError(f"{where}: {kind} has no layer named {format_names(_HEADS)}", code="not_linear")
    size = min(6, network.config.vocab_size)
    probe = torch.arange(network.config.vocab_size)[-size:].expand(size, -1)
    mask = torch.ones_like(probe)
    with torch.no_grad():
        theirs = network(input_ids=probe[:1], attention_mask=mask[:1]).logits[0]
        made = _word_classifier(network, name)
        ours = made(input_ids=probe, attention_mask=mask, word_mask=torch.eye(size, dtype=torch.int64))
    if not float((theirs - ours).abs().max()) <= _TOLERANCE * float(theirs.abs().max()):
        raise DataError(f"{where}: the logits of {kind} are not those of its layer {name!r}", code="not_linear")
    return made.eval().requires_grad_(False)


def _word_classifier(network: Any, name: str) -> nn.Module:
    from torch import nn

    class WordClassifier(nn.Module):
        """A token classifier that applies its last layer to one token of each example; its parameters keep their names."""

        def __init__(self) -> None:
            super().__init__()
            self.config = network.config
            for own, module in network.named_children():
                self.add_module(own, module)
            setattr(network, name, nn.Identity())  # so its logits are the input of that layer
            self._inner = (network,)  # not a submodule, which would change the names

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, word_mask: Tensor, token_type_ids: Tensor | None = None
        ) -> Tensor:
            """Return logits (n, K) at the place of the one in word_mask (n, L); padding is on the right."""
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            if token_type_ids is not None:
                given[_TYPES] = token_type_ids
            places = word_mask.argmax(dim=1)
            # With gradients, under transforms and in an exported graph, every example is a row.
            is_compact = torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()
            if is_compact:
                is_other = (input_ids[1:] != input_ids[:-1]) | (attention_mask[1:] != attention_mask[:-1])
                is_first = torch.nn.functional.pad(is_other.any(dim=1), (1, 0), value=True)
                firsts = is_first.nonzero()[:, 0]  # the only sync
                given = {key: value[firsts] for key, value in given.items()}
            hidden = self._inner[0](**given).logits  # (texts, L, D)
            if is_compact:
                features = hidden[is_first.cumsum(0) - 1, places]
            else:
                features = hidden.gather(1, places[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
            found: Tensor = getattr(self, name)(features)
            return found

    return WordClassifier()
