"""Programmatic dependent launch where it exists, and nothing where it does not."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from triton_support import DEVICE, ON_GPU

pytest.importorskip("triton", minversion="3.0")

from graphcap.moe.kernels import triton_pdl


def test_a_cpu_has_none() -> None:
    assert triton_pdl.pdl_options(torch.empty(1)) == {"PDL": False}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_device_has_it_from_sm_90_on() -> None:
    new = torch.cuda.get_device_capability() >= (9, 0)
    wanted = {"PDL": True, "launch_pdl": True} if new else {"PDL": False}
    assert triton_pdl.pdl_options(torch.empty(1, device=DEVICE)) == wanted


def test_a_triton_without_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("triton.language.extra.cuda")
    monkeypatch.delattr(cuda, "gdc_wait", raising=False)
    spec = importlib.util.spec_from_file_location("without_pdl", triton_pdl.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.IN_TRITON
    assert not module._on_device(torch.device("cuda", 0))
    assert callable(module.wait_for_previous)
