"""Reward models as classifiers of pairs of texts: which one is better, by the Bradley-Terry model of their scores.

The network below returns w . (h(second) - h(first)), the logit that the second text is better. A bias of the score would
cancel, so the last layer is linear without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.data.columns import PAIRS
from bnncli.data.transform import TransformedInputs
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.lazy import torch
from bnncli.models.answers import parse_flag
from bnncli.models.huggingface import Images, Sounds, Texts, inputs_of, load_tokenizer, set_padding_token, text_inputs
from bnncli.models.words import Words, read_words, word_network
from bnncli.names import quote_name

if TYPE_CHECKING:
    from torch import Tensor, nn

ARGUMENTS = ("pairs", "chat", "template")
_PROMPT, _ANSWER = "{prompt}", "{answer}"
_PLAIN = _PROMPT + _ANSWER
_PROBE = ("a", "yes, it is not")
_TOLERANCE = 1e-4  # of scores, relative to the largest


@dataclass(frozen=True)
class Comparison:
    """How a prompt and an answer become one text, and what the two classes are called.

    Attributes:
        classes: that the first text is better, and that the second is.
        has_chat: whether prompt and answer are messages in the tokenizer's chat template.
        template: text with one {answer} and at most one {prompt}.
    """

    classes: tuple[str, str] = ("first", "second")
    has_chat: bool = False
    template: str = _PLAIN

    @classmethod
    def parse(cls, arguments: Mapping[str, str]) -> Comparison:
        """Parse the model's arguments. Raises UsageError for unknown or malformed ones."""
        for name in arguments:
            if name not in ARGUMENTS:
                raise UsageError(f"\0model_arg\0 {name}: expected {', '.join(ARGUMENTS)} for a reward model")
        names = tuple(one.strip() for one in arguments.get("pairs", "").split(","))
        if names != ("yes",) and (len({*names}) != 2 or "" in names):
            raise UsageError(
                f"\0model_arg\0 pairs: expected yes, or the labels of a better first and a better second text; got "
                f"{arguments.get('pairs', '')!r}",
                hint="\0model_arg\0 pairs=yes, or \0model_arg\0 pairs=A,B for data with the labels A and B",
            )
        has_chat = parse_flag("chat", arguments)
        template = arguments.get("template", _PLAIN).replace("\\n", "\n").replace("\\t", "\t")
        if template.count(_ANSWER) != 1 or template.count(_PROMPT) > 1:
            raise UsageError(
                f"\0model_arg\0 template: expected a text with one {_ANSWER} and at most one {_PROMPT}; got {template!r}"
            )
        if has_chat and "template" in arguments:
            raise UsageError("\0model_arg\0: expected either chat or template; got both")
        return cls(cls.classes if names == ("yes",) else (names[0], names[-1]), has_chat, template)


@dataclass(frozen=True)
class Pairs(Texts):
    """A tokenizer for pairs of texts, each padded on the right to the longest and truncated at `max_length` tokens."""

    takes: str = PAIRS
    comparison: Comparison = Comparison()

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return token ids and related inputs, (n, 2, length) int64 by name, and the number of pairs with a truncated text.

        Args:
            items: two texts, or a prompt and two answers; each a str or a list of chat messages.
        """
        tokenizer = load_tokenizer(self.folder, self.digest)
        texts = [
            self._write(tokenizer, rest[0] if rest else None, answer)
            for *rest, one, two in items
            for answer in (one, two)
        ]
        found, is_truncated = self.encode(texts, add_special_tokens=not self.comparison.has_chat)
        lengths = [len(row) for row in found["input_ids"]]
        if 0 in lengths:
            raise DataError("a text has no tokens", code="bad_pairs")
        inputs = {}
        for name, rows in found.items():
            padded = np.full((len(rows), max(lengths)), self.fill if name == "input_ids" else 0, np.int64)
            for row, values in zip(padded, rows, strict=True):
                row[: len(values)] = values
            inputs[name] = padded.reshape(len(items), 2, -1)
        return TransformedInputs(inputs, int(np.reshape(is_truncated, (-1, 2)).any(axis=1).sum()))

    @property
    def fill(self) -> int:
        """The id at padded positions, which the attention mask hides: the padding or end-of-text token, or 0."""
        tokenizer = load_tokenizer(self.folder, self.digest)
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return int(next(one for one in known if one is not None))

    def _write(self, tokenizer: Any, prompt: Any, answer: Any) -> str:
        """Return prompt and answer as one text."""
        if self.comparison.has_chat:
            return self._chat(tokenizer, prompt, answer)
        if not isinstance(answer, str) or not isinstance(prompt, str | None):
            raise DataError("these are chat messages, not texts", code="bad_pairs", hint="add \0model_arg\0 chat=yes")
        if prompt is not None and _PROMPT not in self.comparison.template:
            raise DataError(f"the data have a prompt, but the template has no {_PROMPT}", code="bad_pairs")
        parts = {_PROMPT: prompt or "", _ANSWER: answer}
        before, mark, after = self.comparison.template.partition(_ANSWER)
        return "".join(
            parts[mark] if part == mark else part.replace(_PROMPT, parts[_PROMPT]) for part in (before, mark, after)
        )

    def _chat(self, tokenizer: Any, prompt: Any, answer: Any) -> str:
        """Return the messages of prompt and answer in the tokenizer's chat template."""
        if tokenizer.chat_template is None:
            message = f"{quote_name(self.folder, limit=300)}: its tokenizer has no chat template"
            raise DataError(message, code="bad_pairs", hint="leave out \0model_arg\0 chat=yes")
        if prompt is None and isinstance(answer, str):
            raise DataError(
                "a chat begins with a prompt, but the data have only answers", code="bad_pairs",
                hint="name its column too: text=PROMPT+FIRST+SECOND",
            )  # fmt: skip
        if isinstance(prompt, str) and not isinstance(answer, str) and answer[0].get("role") != "assistant":
            raise DataError(
                "the messages of the answer already begin with a prompt", code="bad_pairs",
                hint="leave out its column: text=FIRST+SECOND",
            )  # fmt: skip
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        said = [*said, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]
        try:
            return str(tokenizer.apply_chat_template(said, tokenize=False))
        except Exception as error:  # of the template, which is code of the tokenizer's author
            why = " ".join(str(error).split())[:200]
            message = f"the tokenizer's chat template does not take these messages: {type(error).__name__}: {why}"
            raise DataError(message, code="bad_pairs") from error

    def to_json(self) -> dict[str, Any]:
        """Return the digest of the tokenizer's files, and how a text is made."""
        return {
            **super().to_json(),
            "pairs": True,
            "chat": self.comparison.has_chat,
            "template": self.comparison.template,
        }


def read_pairs(folders: Sequence[Path], config: Mapping[str, Any], arguments: Mapping[str, str]) -> Pairs:
    """Return the pairs that a reward model's arguments describe, with the tokenizer of the first folder that has one.

    Raises:
        UsageError: the arguments are malformed. MissingInput: there is no tokenizer.
    """
    comparison = Comparison.parse(arguments)
    for folder in folders:
        if (texts := text_inputs(folder, config)) is not None:
            return Pairs(texts.folder, texts.digest, texts.max_length, comparison=comparison)
    raise MissingInput(
        f"{quote_name(folders[0], limit=300)} has no tokenizer, which pairs of texts need", path=folders[0]
    )


def read_inputs(
    folders: Sequence[Path], kind: str, config: Mapping[str, Any], arguments: Mapping[str, str]
) -> Pairs | Words | Texts | Images | Sounds | None:
    """Return what prepares the inputs of a classifier of Sequence, Token, Image or Audio, from the first folder that has it.

    Raises:
        BnnError: as raised by `read_pairs`, `read_words` or `inputs_of`.
    """
    if arguments:
        return read_pairs(folders, config, arguments)
    return read_words(folders, config) if kind == "Token" else inputs_of(folders[0], kind, config)


def finish_network(network: nn.Module, transform: Any) -> nn.Module:
    """Return a classifier with the tokenizer's padding token, or the network of single words or of pairs of texts."""
    if isinstance(transform, Words):
        return word_network(network, transform)
    network = set_padding_token(network, transform)
    return compare_scores(network, transform) if isinstance(transform, Pairs) else network


def compare_scores(network: Any, pairs: Pairs) -> nn.Module:
    """Return a network from pairs of texts to the logit (n, 1) that the second is better.

    Args:
        network: the reward model, prepared.

    Raises:
        DataError: it has several outputs, or its score is not linear in the features of its last layer.
    """
    where = quote_name(Path(pairs.folder), limit=300)
    tokens = load_tokenizer(pairs.folder, pairs.digest)([*_PROBE])
    probes = [
        {name: torch.tensor(rows[place : place + 1]) for name, rows in tokens.items()} for place in range(len(_PROBE))
    ]
    called: list[tuple[str, nn.Linear, Tensor]] = []

    def note(name: str) -> Any:
        return lambda layer, args, output: called.append((name, layer, args[0]))

    handles = [
        layer.register_forward_hook(note(name))
        for name, layer in network.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    try:
        with torch.no_grad():
            scores = torch.cat([network(**one).logits for one in probes])
    finally:
        for handle in handles:
            handle.remove()
    if scores.shape[1:] != (1,):
        message = f"{where}: pairs of texts need a model with one output, its score; it has {tuple(scores.shape)[-1]}"
        raise DataError(message, code="bad_pairs", hint="leave out \0model_arg\0 pairs")
    name, layer, features = called[-1]
    made = _compared_scores(network, name, layer, pairs, is_last_token=features.ndim == 3)
    with torch.no_grad():
        vectors = torch.cat([made.vectors(**one) for one in probes])
        ours = vectors @ layer.weight.T + (0 if layer.bias is None else layer.bias)
    if ours.shape != scores.shape or float((ours - scores).abs().max()) > _TOLERANCE * (1 + float(scores.abs().max())):
        raise DataError(f"{where}: the score is not linear in the features of {quote_name(name)}", code="not_linear")
    return made.eval().requires_grad_(False)


def _compared_scores(network: Any, name: str, layer: nn.Linear, pairs: Pairs, *, is_last_token: bool) -> Any:
    from torch import nn

    head = nn.Linear(layer.in_features, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(layer.weight)
    owner, _, attribute = name.rpartition(".")
    setattr(network.get_submodule(owner), attribute, nn.Identity())
    padding = getattr(network.config, "pad_token_id", None)

    class ComparedScores(nn.Module):
        """A reward model without its score, and the score as a layer of the difference of two texts' features."""

        def __init__(self) -> None:
            super().__init__()
            self.config = copy(network.config)
            self.config.pad_token_id = pairs.fill
            self.body = network
            self.head = head

        def vectors(self, **inputs: Tensor) -> Tensor:
            """Return features (n, D) of texts that are padded on the right."""
            if not is_last_token:
                found: Tensor = self.body(**inputs).logits
                return found
            # The library takes the last token that is not padding by its id, which may also be in the text.
            hidden = getattr(self.body, self.body.base_model_prefix)(**inputs, use_cache=False).last_hidden_state
            is_own = inputs["attention_mask"] != 0
            if padding is not None:
                is_own = is_own & (inputs["input_ids"] != padding)
            last = (torch.arange(is_own.shape[1], device=is_own.device) * is_own).argmax(dim=1)
            return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
            """Return logits (n, 1) of pairs (n, 2, L)."""
            given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
            first, second = (
                self.vectors(**{name: value[:, place] for name, value in given.items() if value is not None})
                for place in range(2)
            )
            found: Tensor = self.head(second - first)
            return found

    return ComparedScores()
