"""What fits in memory, and what is said where it does not; test_memory_peaks.py has the estimates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bnncli import registry
from bnncli.errors import DeviceError
from bnncli.flows._affine_sizes import num_elements
from bnncli.inference import memory
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.system import devices


@pytest.mark.parametrize("num_stored", [0, 1500])
def test_the_advised_number_of_draws_fits_and_one_more_does_not(
    monkeypatch: pytest.MonkeyPatch, num_stored: int
) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 30 << 30)
    sizes = {"num_stored": num_stored, "device": torch.device("cpu")}
    with pytest.raises(DeviceError, match="1500 draws with 2000000 parameters: needs about") as caught:
        memory.require_draws(2_000_000, num_used=1500, option="--samples", **sizes)
    most = int(str(caught.value.hint).removeprefix("use at most --samples "))
    memory.require_draws(2_000_000, num_used=most, **sizes)
    with pytest.raises(DeviceError, match="parameters: needs about"):
        memory.require_draws(2_000_000, num_used=most + 1, **sizes)


def test_no_content_depends_on_how_much_memory_is_free(
    cli: Any, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, free in (("little", 1 << 24), ("much", 1 << 50)):
        monkeypatch.setattr(devices, "_system_memory", lambda free=free: free)
        monkeypatch.setattr(devices, "_container_memory", lambda folder: 1 << 62)
        outputs = []
        for word, *options in (
            ("fit-laplace", "--structure", "kron", "--prior-precision", 10),
            ("hmc", "--chains", 3, "--warmup", 10, "--draws", 8),
            ("predict", "--posterior", "laplace", "--samples", 50),
        ):
            outputs += cli(word, small_run, *options, "--name", f"{word}-{name}", "--json").json["outputs"]
        judged = cli("diagnose", small_run, "--posterior", "laplace", "--json").json["posteriors"]
        found.append(([one["content_digest"] for one in outputs], judged))
    assert found[0] == found[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stored_draws_that_cannot_be_read_are_to_be_made_anew(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(
        "bnncli.system.memory.available_memory", lambda device: (60 if str(device) == "cpu" else 900) << 30
    )
    memory.require_draws(2_050_000, torch.device(device), num_used=10, num_stored=2560, option="--samples")
    with pytest.raises(DeviceError, match=r"6400 draws with 2050000 .* 42\.0 GiB are available on cpu") as caught:
        memory.require_draws(2_050_000, torch.device(device), num_used=10, num_stored=6400, option="--samples")
    assert caught.value.hint == "reduce the number of draws: hmc with fewer \0chains\0 or \0draws\0"


def test_a_flow_too_large_to_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 2 << 30)
    layout, device = HeadLayout(10, 5000), torch.device("cpu")
    training = memory.training_bytes(layout, num_layer_params=2 * num_elements(layout, "kron"), num_draws=8)
    with pytest.raises(DeviceError, match=r"refining a diag Gaussian with 50010 .* needs about 1\.9 GiB") as caught:
        memory.require_refinement("diag", layout, device, num_draws=8, training=training)
    assert caught.value.hint == "use \0flow\0 radial"
    batches = memory.training_bytes(layout, num_layer_params=0, num_draws=8, batch_size=1000)
    assert batches - memory.training_bytes(layout, num_layer_params=0, num_draws=8) == 4 * 1000 * (5000 + 4 * 8 * 10)


@pytest.mark.parametrize(("at_once", "least"), [(None, 5), (1, 18), (3, 13)])
def test_repeats_that_do_not_fit_are_refused_with_the_number_that_does(
    monkeypatch: pytest.MonkeyPatch, at_once: int | None, least: int
) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 1 << 30)
    layout, device = NetworkLayout((784, 400, 600, 10)), torch.device("cpu")
    sizes = {"batch_size": 100, "most_at_once": at_once}
    with pytest.raises(DeviceError, match=r"fit-lbbnn with 50 networks of 560610 parameters") as caught:
        memory.require_latent(layout, device, num_repeats=50, hint="use fewer --repeats", **sizes)
    assert str(caught.value.hint).startswith("use fewer --repeats, at most ")
    most = int(str(caught.value.hint).split()[-4])
    assert most >= least
    memory.require_latent(layout, device, num_repeats=most, hint="", **sizes)
    with pytest.raises(DeviceError):
        memory.require_latent(layout, device, num_repeats=most + 1, hint="", **sizes)


def test_every_structure_has_its_rank() -> None:
    assert set(memory.structures()) <= set(registry.names("covariances"))


@pytest.mark.parametrize(
    ("layout", "gigabytes", "chosen"),
    [
        (HeadLayout(10, 84), 16, "full"),
        (HeadLayout(10, 599), 16, "full"),  # 6,000 parameters
        (HeadLayout(10, 600), 16, "block"),
        (HeadLayout(100, 256), 16, "block"),
        (HeadLayout(100, 512), 16, "kron"),  # a block Hessian would take longer than the largest full one
        (HeadLayout(1000, 2048), 16, "kron"),
        (HeadLayout(1000, 50_000), 16, "diag"),
        (HeadLayout(10, 599), 1, "block"),
        (HeadLayout(1, 5000), 16, "full"),
    ],
    ids=str,
)
def test_the_automatic_structure_is_the_largest_that_is_sensible(
    monkeypatch: pytest.MonkeyPatch, layout: HeadLayout, gigabytes: int, chosen: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert memory.automatic_structure(layout, gigabytes << 30, device="cpu") == chosen


def test_what_does_not_fit_is_refused_with_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 4 << 30)
    with pytest.raises(DeviceError, match=r"full covariance with 10000 .*needs about 3.0 GiB.* 2.8 GiB") as caught:
        memory.require_fit("full", HeadLayout(100, 99), torch.device("cpu"))
    assert caught.value.hint == "use \0structure\0 block, the largest that fits"
    assert caught.value.exit == 69


def test_a_million_classes_times_a_hundred_thousand_features_fit_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 64 << 30)
    with pytest.raises(DeviceError, match="diag covariance") as caught:
        memory.require_fit("diag", HeadLayout(1_000_000, 100_000), torch.device("cpu"))
    assert "no structure fits" in str(caught.value.hint)


def test_a_base_too_large_to_refine_is_refused_with_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 2 << 30)
    with pytest.raises(DeviceError, match="refining a full Gaussian with 10000") as caught:
        memory.require_refinement("full", HeadLayout(100, 99), torch.device("cpu"), num_draws=256)
    assert caught.value.hint == "refine a base fitted with fit-laplace \0structure\0 block"
    memory.require_refinement("block", HeadLayout(100, 99), torch.device("cpu"), num_draws=256)


def test_the_advised_number_of_chains_fits_and_one_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 1 << 30)
    layout, device = HeadLayout(10, 84), torch.device("cpu")
    with pytest.raises(DeviceError, match="100000 chains") as caught:
        memory.require_sampling(layout, device, num_chains=100_000)
    most = int(str(caught.value.hint).split()[-1])
    memory.require_sampling(layout, device, num_chains=most)
    with pytest.raises(DeviceError, match="chains"):
        memory.require_sampling(layout, device, num_chains=most + 1)
