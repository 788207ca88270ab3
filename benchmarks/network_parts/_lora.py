"""A text classifier with a LoRA adapter, trained in plain torch and saved by the library peft."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from network_parts._bench import LeftOut

LENGTH = 32  # tokens, what is over is cut
RANK = 2
ADAPTED_LAYERS = 2  # the last of the encoder


def train_adapter(
    encoder: Path, texts: Sequence[str], labels: Sequence[int], out: Path, *,
    names: Sequence[str], epochs: int, seed: int = 0, batch_size: int = 32, learning_rate: float = 2e-3
) -> None:  # fmt: skip
    """Adapts queries and values of the last layers, trains the classifier with them and writes both, with the tokenizer, to `out`.

    Adam with a cosine to zero on the mean cross-entropy, without dropout. A folder that is there is kept.

    Raises:
        LeftOut: transformers or peft cannot be imported.
    """
    if out.exists():
        return
    try:
        import peft
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    except ImportError as error:
        raise LeftOut(f"needs transformers and peft: {error}") from None
    tokenizer = AutoTokenizer.from_pretrained(encoder, model_max_length=LENGTH)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a classifier that is made here
        torch.manual_seed(seed)
        label2id = {name: index for index, name in enumerate(names)}
        network = AutoModelForSequenceClassification.from_pretrained(
            encoder, label2id=label2id, id2label=dict(enumerate(names))
        )
        last = network.config.num_hidden_layers
        layers = list(range(last - ADAPTED_LAYERS, last))
        adapter = {"target_modules": ["query", "value"], "layers_to_transform": layers}
        model = peft.get_peft_model(network, peft.LoraConfig(task_type="SEQ_CLS", r=RANK, **adapter))
        model.eval()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(texts) // batch_size))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for batch in torch.randperm(len(texts), generator=generator).split(batch_size):
                inputs = tokenizer([texts[row] for row in batch], padding=True, truncation=True, return_tensors="pt")
                loss = cross_entropy(model(**inputs).logits, torch.tensor([labels[row] for row in batch]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        tokenizer.save_pretrained(out)
        model.save_pretrained(out)
