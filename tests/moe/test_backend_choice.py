"""Which kernel backend a step is built with, and that a slow one is not chosen in silence."""

from __future__ import annotations

import logging

import pytest
import torch

from graphcap.errors import BackendError
from graphcap.moe import kernels
from graphcap.moe.kernels import choose_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_triton_version", lambda: None)


def test_a_device_gets_triton_and_a_cpu_the_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_triton_version", lambda: "3.6.0")
    assert choose_backend("auto", CUDA).name == "triton"
    assert choose_backend("auto", CPU).name == "reference"
    assert choose_backend("reference", CUDA).why == "asked for"


def test_slow_kernels_on_a_device_are_a_warning(
    without_triton: None, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, logger="graphcap"):
        assert choose_backend("auto", CUDA).name == "reference"
        (record,) = caplog.records
        assert "pip install triton" in record.getMessage()
        caplog.clear()
        assert choose_backend("auto", CPU).name == "reference"
        assert not caplog.records


def test_what_cannot_be_had_is_refused(without_triton: None):
    with pytest.raises(BackendError, match="pip install triton"):
        choose_backend("triton", CUDA)
    with pytest.raises(BackendError, match="no vllm kernels"):
        choose_backend("vllm", CUDA)
    with pytest.raises(BackendError, match=r"ixformer cannot be imported .*No module named"):
        choose_backend("ixformer", CUDA)
    with pytest.raises(BackendError, match=r"run on a CoreX card, found device cpu; use auto"):
        choose_backend("ixformer", CPU)


def test_a_triton_that_is_too_old_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    class Old:
        __version__ = "2.1.0"

        @staticmethod
        def dot(input, other, allow_tf32=True):
            """tl.dot as Triton 2.1 has it."""

    kernels._triton_version.cache_clear()
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels, "import_module", lambda name: Old)
    try:
        with caplog.at_level(logging.WARNING, logger="graphcap"):
            assert choose_backend("auto", CUDA).name == "reference"
            with pytest.raises(BackendError, match=r"older than 3\.0"):
                choose_backend("triton", CUDA)
        assert "Triton 2.1.0 is too old for graphcap's kernels" in caplog.text
    finally:
        kernels._triton_version.cache_clear()


def test_a_broken_triton_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(name: str) -> None:
        raise ImportError("libtriton is for another machine")

    kernels._triton_version.cache_clear()
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels, "import_module", broken)
    try:
        with caplog.at_level(logging.WARNING, logger="graphcap"):
            assert choose_backend("auto", CUDA).name == "reference"
        assert "libtriton is for another machine" in caplog.text
    finally:
        kernels._triton_version.cache_clear()
