"""The write into the ring: torch's kernels and Triton's one against plain Python, on random contents."""

from __future__ import annotations

import logging
import random
import re
from importlib.util import find_spec

import pytest
import torch

from graphcap import ring as ring_module
from graphcap.ring import write, write_operation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {
    "int32": (torch.int32, ()),
    "int64": (torch.int64, ()),
    "bool": (torch.bool, ()),
    "half": (torch.bfloat16, ()),
    "wide": (torch.float32, (3, 2)),
}


def operations():
    found = [pytest.param(write, id="torch")]
    if find_spec("triton") is not None:
        import triton

        if int(triton.__version__.split(".")[0]) >= 3:
            from graphcap.ring_triton import write as fused

            found.append(pytest.param(fused, id="triton"))
    return found


def drawn(draw: random.Random, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    values = torch.randint(-9, 10, shape, generator=generator)
    return (values > 0 if dtype == torch.bool else values.to(dtype)).to(DEVICE)


@pytest.mark.parametrize("operation", operations())
@pytest.mark.parametrize("rows", [1, 3, 128, 300])
@pytest.mark.parametrize(
    "kinds", [("int32",), ("int64", "wide", "bool"), ("wide",), ("half", "bool")]
)
@pytest.mark.parametrize("ends", [None, (), (3,), (-9, 0, 4, 2**40)])
def test_against_plain_python(operation, rows, kinds, ends):
    draw = random.Random(f"{rows} {kinds} {ends}")
    length, more = draw.randint(1, 5), 4
    # The places of a bucket are the first rows of those of the largest one.
    whole = [
        drawn(draw, dtype, length, rows + more, *shape) for dtype, shape in map(KINDS.get, kinds)
    ]
    places = tuple(place[:, :rows] for place in whole)
    cursor = torch.tensor([draw.randrange(length)], device=DEVICE)
    counts = drawn(draw, torch.int64, rows + more)
    live = drawn(draw, torch.bool, rows + more)
    hit = drawn(draw, torch.bool, rows)
    values = torch.tensor((1,) if ends == () else ends or (), dtype=torch.int64, device=DEVICE)
    for _ in range(2 * length + 1):
        outputs = tuple(drawn(draw, dtype, rows, *shape) for dtype, shape in map(KINDS.get, kinds))
        last = None
        if ends is not None:
            last = drawn(draw, torch.bool if ends == () else torch.int32, 2 * rows)[::2]
        at = int(cursor)
        expected = [place.tolist() for place in whole]
        for place, output in zip(expected, outputs, strict=True):
            place[at][:rows] = output.tolist()
        expected_counts, expected_live = counts.tolist(), live.tolist()
        if last is not None:
            for row, value in enumerate(last.tolist()):
                expected_counts[row] += expected_live[row]
                if value is True or (ends and value in ends):
                    expected_live[row] = False
        operation(places, outputs, cursor, length, counts[:rows], live[:rows], last, values, hit)
        assert [place.tolist() for place in whole] == expected
        assert cursor.tolist() == [(at + 1) % length]
        assert counts.tolist() == expected_counts
        assert live.tolist() == expected_live


def test_a_cpu_takes_torchs_kernels():
    assert write_operation(torch.device("cpu")) is write


def test_a_kernel_that_fails_or_errs_is_not_taken_and_it_is_said(monkeypatch, caplog):
    pytest.importorskip("triton", minversion="3.0")
    from graphcap import ring_triton as fused

    caplog.set_level(logging.WARNING)

    class Cuda:
        type = "cuda"

    hold = ring_module._hold_against_torch
    monkeypatch.setattr(ring_module, "_hold_against_torch", lambda op, _: hold(op, DEVICE))
    assert write_operation(Cuda()) is fused.write

    def raises(*_):
        raise RuntimeError("no compiler")

    def does_nothing(*_):
        return

    for function, text in ((raises, "no compiler"), (does_nothing, "expected .*found")):
        monkeypatch.setattr(fused.write, "function", function)
        caplog.clear()
        assert write_operation(Cuda()) is write
        assert "written by torch's kernels" in caplog.text
        assert re.search(text, caplog.text)
