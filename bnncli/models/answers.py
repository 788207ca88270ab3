"""Causal language models as classifiers of closed questions: the answer is a softmax over K rows of the output embedding.

The network below returns the logits of the K answers at the end of the prompt, so its last layer is a plain linear one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.data.transform import TransformedInputs
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.lazy import torch
from bnncli.models.huggingface import Texts, load_tokenizer, text_inputs
from bnncli.names import quote_name

if TYPE_CHECKING:
    from torch import Tensor, nn

ARGUMENTS = ("answers", "chat", "template")
_CAUSAL = re.compile(r"\w+(ForCausalLM|LMHeadModel)")
_FIELD = "{text}"
_TRUTHS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
_TOLERANCE = 1e-4  # of logits, relative to the largest


def is_causal(architecture: str | None) -> bool:
    """Return whether a class name is that of a causal language model."""
    return architecture is not None and _CAUSAL.fullmatch(architecture) is not None


def parse_flag(name: str, arguments: Mapping[str, str]) -> bool:
    """Return whether an argument of a model says yes; without it, no. Raises UsageError for another value."""
    value = arguments.get(name, "no")
    if value.lower() not in _TRUTHS:
        raise UsageError(f"\0model_arg\0 {name}: expected yes or no; got {value!r}")
    return _TRUTHS[value.lower()]


@dataclass(frozen=True)
class Question:
    """How a text becomes a prompt, and which answers are compared.

    Attributes:
        answers: the K answers, which are the classes.
        has_chat: whether the prompt is a user's message in the tokenizer's chat template.
        template: text with one {text}.
    """

    answers: tuple[str, ...]
    has_chat: bool = False
    template: str = _FIELD

    @classmethod
    def parse(cls, arguments: Mapping[str, str]) -> Question:
        """Parse the model's arguments.

        Raises:
            UsageError: an argument is unknown or malformed, or there are no answers.
        """
        for name in arguments:
            if name not in ARGUMENTS:
                raise UsageError(f"\0model_arg\0 {name}: expected {', '.join(ARGUMENTS)} for a language model")
        answers = tuple(one.strip() for one in arguments.get("answers", "").split(","))
        if len(answers) < 2 or len(set(answers)) < len(answers) or "" in answers:
            raise UsageError(
                f"\0model_arg\0 answers: expected at least two different answers; got {arguments.get('answers', '')!r}",
                hint="separate them with commas: \0model_arg\0 answers=A,B,C,D",
            )
        has_chat = parse_flag("chat", arguments)
        template = arguments.get("template", _FIELD).replace("\\n", "\n").replace("\\t", "\t")
        if template.count(_FIELD) != 1:
            raise UsageError(f"\0model_arg\0 template: expected a text with one {_FIELD}; got {template!r}")
        return cls(answers, has_chat, template)

    @property
    def lead(self) -> str:
        """Return what is between the prompt and the answer: a space, unless the prompt ends with white space."""
        return "" if self.has_chat or self.template[-1:].isspace() else " "


@dataclass(frozen=True)
class AnswerTokens:
    """The answers as tokens.

    Attributes:
        prefix: tokens that all answers begin with, which become the end of the prompt.
        ids: (K,), the next token of each answer; later ones are not looked at.
    """

    prefix: tuple[int, ...]
    ids: tuple[int, ...]


def find_answer_tokens(tokenizer: Any, question: Question, where: str) -> AnswerTokens:
    """Return the tokens that tell the answers apart, as they follow a prompt.

    Raises:
        DataError: an answer has unknown tokens, or two answers do not differ in the first token after the common ones.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    cue = "x:" if question.lead else "x:\n"
    base, found = encode(cue), []
    for answer in question.answers:
        whole = encode(f"{cue}{question.lead}{answer}")
        ids = whole[len(base) :] if whole[: len(base)] == base else encode(question.lead + answer)
        if not ids or tokenizer.unk_token_id in ids:
            message = f"{where}: the tokenizer does not know the answer {answer!r}"
            raise DataError(
                message, code="bad_answers", hint="use other answers, such as letters: \0model_arg\0 answers=A,B"
            )
        found.append(ids)
    common = 0
    while all(len(ids) > common + 1 for ids in found) and len({ids[common] for ids in found}) == 1:
        common += 1
    firsts = [ids[common] for ids in found]
    for place, first in enumerate(firsts):
        if first in firsts[:place]:
            one, other = question.answers[firsts.index(first)], question.answers[place]
            raise DataError(
                f"{where}: the answers {one!r} and {other!r} begin with the same token, so the last layer cannot tell them apart",
                code="bad_answers", hint="letter the choices in the prompt, and use \0model_arg\0 answers=A,B,C",
            )  # fmt: skip
    return AnswerTokens(tuple(found[0][:common]), tuple(firsts))


@dataclass(frozen=True)
class Prompts(Texts):
    """A tokenizer for prompts, padded on the right; a prompt longer than `max_length` tokens loses its beginning.

    Attributes:
        question: template and answers.
    """

    question: Question = Question(())

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return token ids and attention mask, (n, length) int64 by name, and the number of truncated prompts."""
        if items and not isinstance(items[0], str):
            raise DataError("a prompt is one text; got pairs of texts", code="bad_prompts")
        tokenizer = load_tokenizer(self.folder, self.digest)
        tokens = find_answer_tokens(tokenizer, self.question, quote_name(self.folder, limit=300))
        first, num_truncated, rows = self._start(tokenizer), 0, []
        for item in items:
            ids = tokenizer(self._fill(tokenizer, item), add_special_tokens=False, verbose=False)["input_ids"]
            room = len(ids) if self.max_length is None else self.max_length - len(first) - len(tokens.prefix)
            num_truncated += len(ids) > room
            rows.append([*first, *ids[max(0, len(ids) - room) :], *tokens.prefix])
            if not rows[-1]:
                raise DataError("a prompt has no tokens", code="bad_prompts")
        longest = max(map(len, rows), default=0)
        inputs = np.full((len(rows), longest), self.pad_token_id, np.int64)
        mask = np.zeros_like(inputs)
        for row, ids in enumerate(rows):
            inputs[row, : len(ids)], mask[row, : len(ids)] = ids, 1
        return TransformedInputs({"input_ids": inputs, "attention_mask": mask}, num_truncated)

    def _fill(self, tokenizer: Any, text: str) -> str:
        """Return the prompt of a text."""
        filled = self.question.template.replace(_FIELD, text)
        if not self.question.has_chat:
            return filled
        if tokenizer.chat_template is None:
            message = f"{quote_name(self.folder, limit=300)}: its tokenizer has no chat template"
            raise DataError(message, code="bad_prompts", hint="leave out \0model_arg\0 chat=yes")
        said = [{"role": "user", "content": filled}]
        return str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))

    def _start(self, tokenizer: Any) -> list[int]:
        """Return the special tokens before a prompt; a chat template has its own."""
        if self.question.has_chat:
            return []
        plain, whole = (tokenizer("x", add_special_tokens=flag)["input_ids"] for flag in (False, True))
        return list(next((whole[:k] for k in range(len(whole)) if whole[k : k + len(plain)] == plain), []))

    @property
    def pad_token_id(self) -> int:
        """The padding token, which the attention mask hides: the end-of-text token or 0 if there is none."""
        tokenizer = load_tokenizer(self.folder, self.digest)
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return int(next(one for one in known if one is not None))

    def to_json(self) -> dict[str, Any]:
        """Return the digest of the tokenizer's files, and what makes a prompt."""
        own = {
            "answers": list(self.question.answers),
            "chat": self.question.has_chat,
            "template": self.question.template,
        }
        return {**super().to_json(), **own}


def read_prompts(folders: Sequence[Path], config: Mapping[str, Any], arguments: Mapping[str, str]) -> Prompts:
    """Return the prompts that a language model's arguments describe, with the tokenizer of the first folder that has one.

    Args:
        config: of the model.

    Raises:
        DataError: there are no arguments. UsageError: they are malformed. MissingInput: there is no tokenizer.
    """
    where = quote_name(folders[0], limit=300)
    if not arguments:
        raise DataError(
            f"{where}: a language model is a classifier only of given answers", code="not_a_classifier", path=folders[0],
            hint="name them: \0model_arg\0 answers=A,B,C,D",
        )  # fmt: skip
    question = Question.parse(arguments)
    for folder in folders:
        if (texts := text_inputs(folder, config)) is not None:
            return Prompts(texts.folder, texts.digest, texts.max_length, question=question)
    raise MissingInput(f"{where} has no tokenizer, which prompts and answers need", path=folders[0])


def answer_network(network: Any, prompts: Prompts) -> nn.Module:
    """Return a network from prompts to the logits (n, K) of the answers.

    Args:
        network: the causal language model, prepared.

    Raises:
        DataError: its logits are not linear in its last hidden state, or the answers cannot be told apart.
    """
    tokenizer, where = load_tokenizer(prompts.folder, prompts.digest), quote_name(Path(prompts.folder), limit=300)
    tokens = find_answer_tokens(tokenizer, prompts.question, where)
    output = network.get_output_embeddings()
    if not isinstance(output, torch.nn.Linear):
        raise DataError(f"{where}: the model has no linear output embedding", code="not_linear")
    if max(tokens.ids) >= output.out_features:
        raise DataError(
            f"{where}: the model has {output.out_features} tokens, fewer than its tokenizer", code="bad_answers"
        )
    made = _closed_question(network, output, tokens.ids)
    probe = torch.tensor([[*tokens.prefix, *tokens.ids][:8]])
    with torch.no_grad():
        theirs = network(input_ids=probe, attention_mask=torch.ones_like(probe)).logits[0, -1, list(tokens.ids)]
        ours = made(input_ids=probe, attention_mask=torch.ones_like(probe))[0]
        scale = float((theirs @ ours) / (ours @ ours).clamp_min(1e-30))
        if float((theirs - scale * ours).abs().max()) > _TOLERANCE * float(theirs.abs().max()):
            raise DataError(
                f"{where}: the logits are not linear in the last hidden state (such as final_logit_softcapping)",
                code="not_linear", hint="the last layer cannot be made Bayesian; use \0layers\0 of the network's code",
            )  # fmt: skip
        if abs(scale - 1) > _TOLERANCE:  # a constant factor on all logits
            for parameter in made.head.parameters():
                parameter.mul_(scale)
    return made.eval().requires_grad_(False)


def _closed_question(network: Any, output: nn.Linear, ids: Sequence[int]) -> Any:
    from torch import nn

    class ClosedQuestion(nn.Module):
        """The body of a language model, and the output embedding of the answers."""

        def __init__(self) -> None:
            super().__init__()
            self.config = network.config
            self.body = getattr(network, network.base_model_prefix)
            self.head = nn.Linear(output.in_features, len(ids), bias=output.bias is not None)
            with torch.no_grad():
                self.head.weight.copy_(output.weight[list(ids)])
                if output.bias is not None:
                    self.head.bias.copy_(output.bias[list(ids)])

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            """Return logits (n, K) at each prompt's last token; padding is on the right."""
            hidden = self.body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
            last = (attention_mask.sum(dim=1, keepdim=True).unsqueeze(2) - 1).clamp_min(0)  # (n, 1, 1)
            found: Tensor = self.head(hidden.gather(1, last.expand(-1, 1, hidden.shape[2])).squeeze(1))
            return found

    return ClosedQuestion()
