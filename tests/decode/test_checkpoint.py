"""load_checkpoint: its options, what it allocates, and which extra tensors it accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SHAPE, assert_same, draw, edit_config, edit_tensors, load
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap.decode import memory
from graphcap.decode.checkpoint import load_checkpoint
from graphcap.decode.safetensors_files import SINGLE
from graphcap.decode.save_checkpoint import save_checkpoint
from graphcap.errors import BackendError, CheckpointError


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_first_layers_only(folder: Path, layers: int) -> None:
    whole, part = load(folder), load(folder, layers=layers)
    assert part.shape == whole.shape.with_layers(layers)
    assert len(part.layers) == layers
    whole.layers = whole.layers[:layers]
    assert_same(part, whole)


@pytest.mark.parametrize("layers", [0, 4, -1, True, 1.0])
def test_wrong_number_of_layers(folder: Path, layers: Any) -> None:
    with pytest.raises(CheckpointError, match=f"layers: .* from 1 to 3.*found {layers}"):
        load(folder, layers=layers)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_converted(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    weights = draw(dtype=stored)
    save_checkpoint(weights, tmp_path)
    found = load(tmp_path, dtype=wanted)
    for (name, tensor), (_, exact) in zip(
        found.named_tensors(), weights.named_tensors(), strict=True
    ):
        assert torch.equal(tensor, exact.to(wanted)), name


def test_dtype_of_the_config_comes_before_that_of_the_tensors(folder: Path) -> None:
    edit_config(folder, torch_dtype="float16")
    assert load(folder).dtype == torch.float16


def test_dtype_of_the_tensors_if_the_config_has_none(tmp_path: Path) -> None:
    save_checkpoint(draw(dtype=torch.bfloat16), tmp_path)
    edit_config(tmp_path, torch_dtype=None)
    assert load(tmp_path).dtype == torch.bfloat16


def test_several_dtypes_and_none_in_the_config(folder: Path) -> None:
    edit_config(folder, torch_dtype=None)
    name = "model.norm.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name].bfloat16()}))
    with pytest.raises(CheckpointError, match=r"tensors have several: BF16, F32.*--dtype"):
        load(folder)
    assert load(folder, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_other_dtype_asked_for(folder: Path, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"dtype of load_checkpoint: .*{dtype}"):
        load(folder, dtype=dtype)


@pytest.mark.parametrize("value", [70_000.0, -70_000.0, float("nan")])
def test_values_beyond_float16(folder: Path, value: float) -> None:
    edit_tensors(folder, lambda t: t["model.norm.weight"].__setitem__(3, value))
    with pytest.raises(
        CheckpointError, match=r"'model.norm.weight'.*float16 can hold.*Use dtype bf"
    ):
        load(folder, dtype=torch.float16)
    assert load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_progress_rises_to_the_total(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    weights = load(folder, dtype=torch.bfloat16, progress=lambda *c: calls.append(c))
    assert [c[0] for c in calls] == sorted({c[0] for c in calls})
    assert calls[-1] == (weights.nbytes, weights.nbytes)
    assert len(calls) == len(load_file(folder / SINGLE))


class _Allocations(TorchDispatchMode):
    """Elements of the tensors that `empty` made, and operations that copied outside of `copy_`."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.others: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            if name == "empty":
                self.elements += result.numel() * (result.dtype == torch.bfloat16)
            elif name in ("cat", "stack", "clone", "_to_copy", "new_empty", "zeros", "contiguous"):
                self.others.add(name)
        return result


def test_the_destination_is_allocated_once_and_nothing_is_copied_twice(folder: Path) -> None:
    with _Allocations() as seen:
        weights = load(folder, dtype=torch.bfloat16)
    assert seen.elements == weights.shape.parameter_count()
    assert seen.others == set()


def test_meta_checks_and_reads_nothing(folder: Path) -> None:
    weights = load_checkpoint(folder, device="meta", dtype=torch.bfloat16)
    assert weights.device.type == "meta"
    assert weights.nbytes == weights.shape.weight_bytes(torch.bfloat16)
    edit_tensors(folder, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_checkpoint(folder, device="meta")


def test_too_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        memory, "available_bytes", lambda device: SHAPE.weight_bytes(torch.float32) - 1
    )
    with pytest.raises(
        CheckpointError, match=r"'saved' do not fit on cpu.*at most 2 of the 3 layers"
    ):
        load(folder)
    assert load(folder, layers=2).shape.num_layers == 2
    assert load(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_device_that_is_not_here(folder: Path) -> None:
    with pytest.raises(BackendError, match="device 'cuda:99'"):
        load_checkpoint(folder, device="cuda:99")
