# mypy: allow-untyped-defs
"""The write into a ring as one Triton kernel, where torch takes three to six."""

import torch
import triton
import triton.language as tl

from graphcap.operations import operation

_BLOCK = 128


@triton.jit
def _write_kernel(
    place_ptr,
    output_ptr,
    cursor_ptr,
    counts_ptr,
    live_ptr,
    ends_ptr,
    values_ptr,
    rows,
    place_stride,
    output_stride,
    ends_stride,
    length,
    n_values,
    KEEPS: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One warp, so that the cursor is read by all before it is written by one."""
    at = tl.load(cursor_ptr)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        if KEEPS:
            output = tl.load(output_ptr + row * output_stride, mask=inside)
            tl.store(place_ptr + at * place_stride + row, output, mask=inside)
        if ENDS:
            live = tl.load(live_ptr + row, mask=inside, other=0)
            counts = tl.load(counts_ptr + row, mask=inside, other=0)
            tl.store(counts_ptr + row, counts + live, mask=inside)
            last = tl.load(ends_ptr + row * ends_stride, mask=inside, other=0)
            for index in range(n_values):
                goes_on = last != tl.load(values_ptr + index)
                live = live * goes_on.to(tl.uint8)
            tl.store(live_ptr + row, live, mask=inside)
    tl.store(cursor_ptr, (at + 1) % length)


@operation("ring", "triton: ring_write")
def write(
    places: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    cursor: torch.Tensor,
    length: int,
    counts: torch.Tensor,
    live: torch.Tensor,
    ends: torch.Tensor | None,
    values: torch.Tensor,
    hit: torch.Tensor,
) -> None:
    """As `graphcap.ring.write`. The first output of one element a row goes with the rest of the work;
    others take a copy each."""
    small = next((i for i, output in enumerate(outputs) if output.dim() == 1), None)
    for index, (place, output) in enumerate(zip(places, outputs, strict=True)):
        if index != small:
            place.index_copy_(0, cursor, output.unsqueeze(0))
    place, output = (cursor, cursor) if small is None else (places[small], outputs[small])
    last = cursor if ends is None else ends
    _write_kernel[(1,)](
        _plain(place),
        _plain(output),
        cursor,
        counts,
        live.view(torch.uint8),
        _plain(last),
        values,
        live.shape[0],
        place.stride(0),
        output.stride(0),
        last.stride(0),
        length,
        values.shape[0],
        KEEPS=small is not None,
        ENDS=ends is not None,
        BLOCK=_BLOCK,
        num_warps=1,
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Booleans as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
