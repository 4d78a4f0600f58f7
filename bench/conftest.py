"""Fixtures of the benchmarks. On CUDA, device times from events go to ``extra_info``."""

import statistics
from collections.abc import Callable

import pytest
import torch

from graphcap import Settings
from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.decode.weights import ModelWeights
from graphcap.moe.kernels import choose_backend

MAX_BATCH = 8
CONTEXT = 256


@pytest.fixture(scope="session")
def device() -> torch.device:
    torch.set_num_threads(1)  # operations this small are not shared among cores
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def weights(device: torch.device) -> ModelWeights:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return random_weights(preset("tiny"), device=device, dtype=dtype, seed=0)


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> DecodeKernels:
    return decode_kernels(choose_backend("auto", device))


def recorders() -> list[str]:
    return ["tape", "cuda"] if torch.cuda.is_available() else ["tape"]


@pytest.fixture(scope="session")
def decoders(weights: ModelWeights, kernels: DecodeKernels) -> dict[str, Decoder]:
    made = {}
    for recorder in recorders():
        decoder = Decoder(
            weights,
            kernels,
            max_batch=MAX_BATCH,
            max_context=CONTEXT,
            settings=Settings(recorder=recorder),
        )
        decoder.cache.fill_random(1)
        decoder.manager.capture()
        made[recorder] = decoder
    return made


def prompts(batch: int) -> list[list[int]]:
    return [[(17 * row + column) % 512 for column in range(4 + row % 5)] for row in range(batch)]


def device_milliseconds(call: Callable[[], object], device: torch.device) -> float | None:
    """Median time of one call between CUDA events; None on a CPU."""
    if device.type != "cuda":
        return None
    times = []
    for _ in range(20):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)
