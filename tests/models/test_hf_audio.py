"""`hf:DIR` of sound: clips of very different lengths in one split have the logits that the library's own pipeline gives to each alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.hf_folders import AUDIO_MODELS, audio_folder, own_logits
from problems.optional_libraries import library
from problems.sounds import clip, clips, encoded, write_clips

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.data.labels import match_classes
from bnncli.data.pixels import Preprocess
from bnncli.data.sound import Sound
from bnncli.data.splits import InputSplit, load_split
from bnncli.errors import DataError, Interrupted
from bnncli.models import ModelRequest, SavedModel, open_model
from bnncli.models.features import ExtractedFeatures, collect, extract, read_unpadded
from bnncli.models.head_search import find_head
from bnncli.session.network import FeatureStore

pytestmark = pytest.mark.libraries

transformers = library("transformers")
QUICK = ("Wav2Vec2", "AST", "Whisper")


def pipeline_logits(folder: Path, samples: list[np.ndarray]) -> np.ndarray:
    return own_logits(folder, [{"array": one, "sampling_rate": 16_000} for one in samples], task="audio-classification")


def split_of(saved: SavedModel, folder: Path) -> InputSplit:
    split = load_split(f"audio:{folder}", name="train", preprocess=Preprocess(transform=saved.transform))
    return match_classes(split, saved.classes)


def extracted(saved: SavedModel, split: InputSplit, **options: Any) -> tuple[ExtractedFeatures, np.ndarray]:
    """The features of a split, and features times head."""
    network = saved.build(None)
    head = find_head(network, lambda count: next(split.batches(count)).inputs)
    found = collect(extract(network, head, split, **options), len(split))
    return found, head.logits(found.features).numpy()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.long) for kind in AUDIO_MODELS]
)
def test_logits_are_those_of_the_librarys_pipeline(tmp_path: Path, kind: str) -> None:
    folder, data = audio_folder(tmp_path / "model", kind), write_clips(tmp_path / "train")
    saved = open_model(f"hf:{folder}", ModelRequest())
    split = split_of(saved, data)
    assert (saved.transform and saved.transform.takes, saved.classes) == ("audio", ("worse", "same", "better"))
    expected = pipeline_logits(folder, [clips()[int(name[-5])] for name in split.names or ()])
    assert expected.std(axis=0).min() > 1e-3
    found, product = extracted(saved, split)
    np.testing.assert_allclose(found.logits.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(product, expected, atol=1e-5)
    assert found.num_truncated == {"AST": 5, "Whisper": 2}.get(kind, 0)  # longer than half a second; than two
    assert split.labels.tolist() == [2, 2, 2, 1, 1, 0, 0]  # though the folders are sorted the other way


def test_padding_would_have_changed_the_logits(tmp_path: Path) -> None:
    """A group norm sees the zeros behind a clip; so the network does not."""
    saved = open_model(f"hf:{audio_folder(tmp_path / 'model')}", ModelRequest())
    batch = next(split_of(saved, write_clips(tmp_path / "train")).batches(16))
    network = saved.build(None)

    def read(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            logits = network(**inputs).logits
        return logits, logits

    alone = read_unpadded(read, batch.inputs, batch.lengths)[0]
    assert float((read(batch.inputs)[0] - alone).abs().max()) > 1e-3


def test_long_clips_go_through_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.models.features.AT_ONCE", 8)
    passes: list[tuple[int, ...]] = []

    def read(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        passes.append(tuple(inputs["x"].shape))
        assert inputs["mask"].shape == inputs["x"].shape
        return inputs["x"].sum(dim=1, keepdim=True), inputs["x"].mean(dim=1, keepdim=True)

    lengths = (4, 2, 4, 9, 4)
    own = [torch.arange(size) + 10.0 * row for row, size in enumerate(lengths)]
    x = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
    features, output = read_unpadded(read, {"x": x, "mask": x}, lengths)
    assert passes == [(1, 2), (2, 4), (1, 4), (1, 9)]
    assert features[:, 0].tolist() == [float(one.sum()) for one in own]
    assert output[:, 0].tolist() == [float(one.mean()) for one in own]


def test_other_rates_are_resampled_channels_averaged_and_both_counted(tmp_path: Path) -> None:
    saved = open_model(f"hf:{audio_folder(tmp_path / 'model')}", ModelRequest())
    transform = saved.transform
    mono = clip(0.3)
    plain = transform([Sound(mono, 16_000)])
    for one in (Sound(mono, 16_000, 2), Sound(clip(0.3, 32_000), 32_000)):
        made = transform([Sound(mono, 16_000), one])
        assert (plain.num_converted, made.num_converted, made.lengths) == (0, 1, (4_800, 4_800))
    assert {"sampling_rate": 16_000, "resampling": "scipy.signal.resample_poly"}.items() <= transform.to_json().items()


def test_a_run_on_clips_is_that_of_images(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = audio_folder(tmp_path / "model"), write_clips(tmp_path / "train")
    (data / "better" / "1.wav").write_bytes(encoded(np.stack([clip(0.2, 8_000)] * 2, axis=1), 8_000))
    words = ["extract-features", str(folder), "--model", f"hf:{folder}", "--data", f"train=audio:{data}"]
    words += ["--batch-size", "3", "--save-every", "0"]
    done = cli(*words, "--run-dir", tmp_path / "whole.bnn", "--num-workers", "1")
    assert "train: 1 of 8 clips were resampled to the model's rate (scipy.signal.resample_poly) or" in done.stderr
    plain, left = FeatureStore._add, [1]

    def add(self: FeatureStore, batch: Any) -> None:
        if not left:
            raise Interrupted(15, "interrupted")
        left.pop()
        plain(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "_add", add)
        assert cli(*words).code == 143
    resumed = cli(*words, "--resume").stderr
    assert "resuming after 3 rows of train" in resumed
    assert "train: 1 of 8 clips were resampled" in resumed  # which was before the interruption
    whole, found = (read_features(tmp_path / run / "features/train.h5") for run in ("whole.bnn", "model.bnn"))
    assert found.header.content_digest == whole.header.content_digest
    assert "up to date" in cli(*words).stderr
    run = bnncli.open(folder, model=f"hf:{folder}")
    given = [{"array": samples, "sampling_rate": 16_000} for samples in (clips()[3], clips()[6])]
    np.testing.assert_allclose(run.features(given), whole.features[2:4], atol=1e-6)
    assert f"--model hf:{folder} --data train=audio:TRAIN" in cli("inspect", folder).stdout
    assert f"--data train=audio:{data}" in cli("inspect", data).stdout


def test_a_clip_that_is_too_short_is_named(tmp_path: Path) -> None:
    saved = open_model(f"hf:{audio_folder(tmp_path / 'model')}", ModelRequest())
    data = write_clips(tmp_path / "train")
    (data / "same/5.wav").write_bytes(encoded(clip(0.02)))  # of two layers: 40 + 15 * 20 samples make a position
    with pytest.raises(
        DataError, match=r"same/5.wav' is too short for the model: got 320 samples at 16,000 Hz, expected at least 340"
    ):
        list(split_of(saved, data).batches(16))


def test_an_adapter_on_a_network_of_sound_is_merged(tmp_path: Path) -> None:
    peft = library("peft")
    base = audio_folder(tmp_path / "base")
    network = transformers.AutoModelForAudioClassification.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}
        model = peft.get_peft_model(network, peft.LoraConfig(r=2, init_lora_weights=False, **settings))
        model.save_pretrained(tmp_path / "adapter")
    saved = open_model(f"peft:{tmp_path / 'adapter'}", ModelRequest(base_model=str(base)))
    samples = clip(0.4)
    inputs = {name: torch.from_numpy(array) for name, array in saved.transform([Sound(samples, 16_000)]).inputs.items()}  # type: ignore[union-attr]
    own = transformers.AutoFeatureExtractor.from_pretrained(base)(samples, sampling_rate=16_000, return_tensors="pt")
    with torch.inference_mode():
        expected, plain = (one.eval()(**own).logits for one in (model, transformers.AutoModelForAudioClassification.from_pretrained(base)))  # fmt: skip
        np.testing.assert_allclose(saved.build(None)(**inputs).logits, expected, atol=1e-5)
    assert float((expected - plain).abs().max()) > 1e-3


def test_a_nested_feature_extractor_is_found_and_an_odd_rate_refused(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "model")
    plain, path = open_model(f"hf:{folder}", ModelRequest()), folder / "preprocessor_config.json"
    own = json.loads(path.read_text())
    path.unlink()
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": own}))
    nested = open_model(f"hf:{folder}", ModelRequest())
    made, expected = (one.transform([Sound(clip(0.1), 16_000)]).inputs for one in (nested, plain) if one.transform)
    np.testing.assert_array_equal(made["input_values"], expected["input_values"])  # type: ignore[index, call-overload]
    path.write_text(json.dumps({**own, "sampling_rate": "16k"}))
    (folder / "processor_config.json").unlink()
    with pytest.raises(DataError, match="its feature extractor has sampling_rate '16k', expected an integer in Hz"):
        open_model(f"hf:{folder}", ModelRequest())
