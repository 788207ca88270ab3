"""Small classifiers of the library transformers with random weights, saved as people save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from problems.optional_libraries import library

transformers = library("transformers")

WORDS = ["good", "bad", "film", "plot", "the", "a", "is", "and", "not", "very", "##ly", "fine", "awful"]
TEXTS = ["the film is very good", "a bad, awful plot", "not fine", "and the plot and the film and the plot " * 3]
LABELS = {0: "worse", 1: "same", 2: "better"}
SMALL: dict[str, Any] = {
    "num_labels": 3,
    "id2label": LABELS,
    "label2id": {name: index for index, name in LABELS.items()},
}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
VIT = {**BERT, "image_size": 8, "patch_size": 4}
TEXT_MODELS = {
    "Bert": dict(BERT, max_position_embeddings=16),
    "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 20, "max_position_embeddings": 16},
    "Roberta": dict(BERT, max_position_embeddings=18, pad_token_id=1),
}
IMAGE_MODELS = {
    "ViT": VIT,
    "DeiT": VIT,
    "ConvNext": {"hidden_sizes": [4, 6, 8, 10], "depths": [1, 1, 1, 1], "image_size": 32},
    "ResNet": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"},
}

_WAVES: dict[str, Any] = {
    **BERT, "conv_dim": (4, 4), "conv_stride": (20, 16), "conv_kernel": (40, 16), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 6,
}  # fmt: skip
_LAYERED: dict[str, Any] = {**_WAVES, "feat_extract_norm": "layer", "do_stable_layer_norm": True}
_SPECTRA: dict[str, Any] = {
    "frequency_stride": 16, "time_stride": 16, "patch_size": 16, "max_length": 48, "num_mel_bins": 16,
}  # fmt: skip
AUDIO_MODELS: dict[str, dict[str, Any]] = {
    "Wav2Vec2": _WAVES,
    "Wav2Vec2-layer": _LAYERED,
    "Hubert": _WAVES,
    "WavLM": _WAVES,
    "UniSpeech": _WAVES,
    "UniSpeechSat": _WAVES,
    "Data2VecAudio": {**_WAVES, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 1},
    "SEW": {**_WAVES, "squeeze_factor": 2},
    "SEWD": {**_WAVES, "squeeze_factor": 2, "max_position_embeddings": 64, "position_buckets": 8},
    "Wav2Vec2Conformer": _WAVES,
    "Wav2Vec2Bert": {**BERT, "feature_projection_input_dim": 160, "classifier_proj_size": 6, "add_adapter": False},
    "AST": {**BERT, **_SPECTRA},
    "Whisper": {
        "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_layers": 1,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 20, "vocab_size": 20, "num_mel_bins": 8,
        "max_source_positions": 100, "classifier_proj_size": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
}  # fmt: skip


def tokenizer(kind: str, **settings: Any) -> Any:
    """A tokenizer of few words."""
    names = (
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        if kind == "Roberta"
        else ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    )
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {name: index for index, name in enumerate([*names, *WORDS, ","])}
    own = Tokenizer(models.WordPiece(vocabulary, unk_token=names[3 if kind == "Roberta" else 1]))
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = ("<s>", "</s>") if kind == "Roberta" else ("[CLS]", "[SEP]")
    ids = [(first, vocabulary[first]), (last, vocabulary[last])]
    own.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=ids
    )
    special = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), names, strict=True))
    if kind != "Roberta":
        special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), names, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **special, **settings)


def text_folder(folder: Path, kind: str = "Bert", *, shards: bool = False, **config: Any) -> Path:
    """A text classifier with random weights, saved."""
    torch.manual_seed(0)
    settings = {**SMALL, **TEXT_MODELS[kind], "vocab_size": 20, **config}
    made = getattr(transformers, f"{kind}ForSequenceClassification")
    network = made(made.config_class(**settings)).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder, **({"max_shard_size": "3KB"} if shards else {}))
    own = tokenizer(kind, model_max_length=12)
    own.save_pretrained(folder)
    return folder


LLAMA = {**BERT, "num_key_value_heads": 1, "max_position_embeddings": 16, "head_dim": 8}
DECODERS = {"GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}} | dict.fromkeys(
    ("Llama", "Mistral", "Gemma", "Qwen2"), LLAMA
)


def decoder_folder(
    folder: Path, *, has_padding: bool, kind: str = "GPT2", side: str = "right", pad: int | None = None
) -> Path:
    """A decoder that classifies texts, whose configuration names this token for padding; its tokenizer has another, or none if that is asked for."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForSequenceClassification")
    settings = {**SMALL, **DECODERS[kind], "vocab_size": 20, "pad_token_id": pad}
    network = made(made.config_class(**settings)).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    own = tokenizer("Bert", model_max_length=12, padding_side=side)
    if not has_padding:
        own.pad_token = None
    own.save_pretrained(folder)
    return folder


TAGS = {0: "O", 1: "B-PER", 2: "I-PER"}
_XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 20}
TOKEN_MODELS: dict[str, dict[str, Any]] = {
    **TEXT_MODELS,
    "XLMRoberta": TEXT_MODELS["Roberta"],
    "DebertaV2": {**BERT, "max_position_embeddings": 16, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "Deberta": {**BERT, "max_position_embeddings": 16},
    "Electra": {**BERT, "max_position_embeddings": 16, "embedding_size": 8},
    "Albert": {**BERT, "max_position_embeddings": 16, "embedding_size": 8},
    "MPNet": {**BERT, "max_position_embeddings": 18, "pad_token_id": 1},
    "ModernBert": {
        **BERT,
        "max_position_embeddings": 16,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "cls_token_id": 0,
        "eos_token_id": 2,
        "sep_token_id": 2,
    },
    "XLNet": _XLNET,
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    "GPT2": DECODERS["GPT2"],
    "Llama": DECODERS["Llama"],
    "Mistral": DECODERS["Mistral"],
}


def token_folder(folder: Path, kind: str = "Bert", **settings: Any) -> Path:
    """A token classifier with random weights and its tokenizer, saved."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForTokenClassification")
    config = {**SMALL, "id2label": TAGS, "label2id": {name: index for index, name in TAGS.items()}}
    network = made(made.config_class(**{**config, "vocab_size": 20, **TOKEN_MODELS[kind], **settings})).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    own = tokenizer("Roberta" if "pad_token_id" in TOKEN_MODELS[kind] else "Bert", model_max_length=12)
    own.save_pretrained(folder)
    return folder


def image_folder(folder: Path, kind: str = "ViT", *, channels: int = 3, shards: bool = False) -> Path:
    """An image classifier with random weights, and its processor, saved."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForImageClassification")
    network = made(made.config_class(**SMALL, **IMAGE_MODELS[kind], num_channels=channels)).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder, **({"max_shard_size": "3KB"} if shards else {}))
    size = network.config.image_size if kind != "ResNet" else 32
    own = {"ViT": "ViT", "DeiT": "DeiT"}.get(kind, "ConvNext")
    sizes: dict[str, Any] = {"size": {"height": size, "width": size}}
    if own == "DeiT":
        sizes = {"size": {"height": size + 2, "width": size + 2}, "crop_size": {"height": size, "width": size}}
    if own == "ConvNext":
        sizes = {"size": {"shortest_edge": size}, "crop_pct": 0.8}
    processor = getattr(transformers, f"{own}ImageProcessor")
    processor(**sizes, image_mean=[0.4] * channels, image_std=[0.3] * channels).save_pretrained(folder)
    return folder


def feature_extractor(kind: str) -> Any:
    """What makes inputs of sound for a model; AST's hears half a second, Whisper's two seconds."""
    if kind == "AST":
        sizes = {name: _SPECTRA[name] for name in ("max_length", "num_mel_bins")}
        return transformers.ASTFeatureExtractor(**sizes)
    if kind == "Whisper":
        return transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    if kind == "Wav2Vec2Bert":
        return transformers.SeamlessM4TFeatureExtractor()
    is_masked = kind == "Wav2Vec2-layer"
    return transformers.Wav2Vec2FeatureExtractor(return_attention_mask=is_masked, do_normalize=True)


def audio_folder(folder: Path, kind: str = "Wav2Vec2", **config: Any) -> Path:
    """A classifier of sound with random weights, and its feature extractor, saved."""
    torch.manual_seed(0)
    name = kind.removesuffix("-layer")
    made = getattr(transformers, f"{name}For{'Audio' if name in ('AST', 'Whisper') else 'Sequence'}Classification")
    network = made(made.config_class(**{**SMALL, **AUDIO_MODELS[kind], **config})).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    feature_extractor(kind).save_pretrained(folder)
    return folder


def pictures(mode: str = "RGB") -> list[Image.Image]:
    """Pictures of several sizes."""
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(256, size=(40 + 3 * index, 50, 3), dtype=np.uint8)).convert(mode)
        for index in range(3)
    ]


def own_logits(folder: Path, items: list[Any], *, task: str) -> np.ndarray:
    """What the library's own pipeline gives, one item at a time: (n, K)."""
    run = transformers.pipeline(task, model=str(folder), device="cpu")
    cut = {"truncation": True} if task == "text-classification" else {}
    found = [run(item, top_k=None, function_to_apply="none", **cut) for item in items]
    names = [run.model.config.id2label[index] for index in range(run.model.config.num_labels)]
    return np.array([[{one["label"]: one["score"] for one in scores}[name] for name in names] for scores in found])
