"""Devices that are not there, and weights that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphcap.decode import memory
from graphcap.decode import random_weights as drawing
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import ModelShape, preset
from graphcap.decode.weights import ModelWeights
from graphcap.errors import BackendError, CheckpointError

TINY = preset("tiny")


def draw(
    shape: ModelShape = TINY, seed: int = 0, dtype: torch.dtype = torch.float32
) -> ModelWeights:
    return random_weights(shape, device="cpu", dtype=dtype, seed=seed)


def test_device_that_means_nothing() -> None:
    with pytest.raises(BackendError, match="device 'gpu0': expected a name such as 'cuda'"):
        random_weights(TINY, device="gpu0", dtype=torch.float32, seed=0)


def test_device_that_is_not_here() -> None:
    with pytest.raises(BackendError, match=r"device 'cuda:99': expected a CUDA device.*found"):
        random_weights(TINY, device="cuda:99", dtype=torch.float32, seed=0)


def set_available(monkeypatch: pytest.MonkeyPatch, available: int | None) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: available)


def test_weights_that_fit_exactly_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = TINY.weight_bytes(torch.float32)
    set_available(monkeypatch, needed)
    assert draw().nbytes == needed


def test_too_little_memory_names_layers_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available(monkeypatch, TINY.weight_bytes(torch.float32) - 1)
    message = (
        r"'tiny' do not fit on cpu: 0.00 GiB needed in float32.*at most 3 of the 4 layers .--layer"
    )
    with pytest.raises(CheckpointError, match=message + ".*use dtype bfloat16"):
        draw()


def test_memory_is_asked_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available(monkeypatch, 40 * 2**30)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(drawing, "empty_weights", never)
    with pytest.raises(CheckpointError, match=r"98.35 GiB needed in bfloat16, 40.00 GiB") as error:
        random_weights(preset("seed-64"), device="cpu", dtype=torch.bfloat16, seed=0)
    # The number named fits, one more does not.
    layers = int(str(error.value).split("--layers ")[1].split(")")[0])
    sizes = [
        preset("seed-64").with_layers(n).weight_bytes(torch.bfloat16)
        for n in (0 + layers, layers + 1)
    ]
    assert sizes[0] <= 40 * 2**30 < sizes[1]
    assert "float16" not in str(error.value).replace("bfloat16", "")


def test_memory_that_not_even_one_layer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available(monkeypatch, 1000)
    with pytest.raises(CheckpointError, match="Cure: only more memory helps") as error:
        draw()
    assert "--layers" not in str(error.value)


def test_unknown_memory_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    set_available(monkeypatch, None)
    assert draw().nbytes == TINY.weight_bytes(torch.float32)


def test_meminfo(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24000 kB\nMemFree:   7 kB\nMemAvailable:   12345 kB\n")
    assert memory.meminfo_available(file) == 12345 * 1024
    file.write_text("MemTotal:       24000 kB\n")
    assert memory.meminfo_available(file) is None
    assert memory.meminfo_available(tmp_path / "none") is None


def test_available_bytes_of_other_devices_is_not_known() -> None:
    assert memory.available_bytes(torch.device("meta")) is None


def test_available_bytes_of_cuda_counts_what_the_allocator_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert memory.available_bytes(torch.device("cuda")) == 130


@pytest.mark.parametrize("fitting", range(1, 11))
def test_the_number_of_layers_named_is_the_largest_that_fits(
    fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = TINY.with_layers(11)
    for spare in (0, 1000):  # no layer is that small
        available = shape.with_layers(fitting).weight_bytes(torch.bfloat16) + spare
        set_available(monkeypatch, available)
        with pytest.raises(CheckpointError, match=rf"at most {fitting} of the 11 layers"):
            draw(shape, dtype=torch.bfloat16)
