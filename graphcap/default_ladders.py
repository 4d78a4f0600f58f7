"""The ladders that engines record without being told, for comparison with a planned one.

Each function gives the sizes up to `max_batch`, the largest decode batch that the engine serves.
"""

from __future__ import annotations

from itertools import chain

VLLM_SOURCE = "vLLM 0.33.0, vllm/config/vllm.py, VllmConfig._set_cudagraph_sizes"
SGLANG_SOURCE = (
    "SGLang 0.5.23, srt/arg_groups/cuda_graph_hook.py, generate_decode_cuda_graph_batch_sizes"
)

_VLLM_LARGEST = 512


def vllm_ladder(max_batch: int) -> tuple[int, ...]:
    """vLLM's capture sizes for ``max_num_seqs=max_batch`` and one token for each sequence.

    1, 2, 4, steps of 8 below 256 and of 16 from there, up to 512 (1024 on data-centre Blackwell, which
    is not modelled), and ``max_num_seqs`` itself where it is at most that. Larger batches run eagerly.
    Source: `VLLM_SOURCE`. (vLLM 0.26 does not add ``max_num_seqs``; it captures up to twice as many.)
    """
    sizes = {*(1, 2, 4), *range(8, 256, 8), *range(256, _VLLM_LARGEST + 1, 16), max_batch}
    return tuple(sorted(size for size in sizes if size <= min(max_batch, _VLLM_LARGEST)))


def sglang_ladder(max_batch: int) -> tuple[int, ...]:
    """SGLang's decode capture sizes for ``cuda_graph_max_bs=max_batch``, no speculative decoding.

    1, 2, 4, 8, 12, steps of 8 from 16 to 256, of 16 below 512, of 32 from there, and the maximum.
    Source: `SGLANG_SOURCE`. SGLang chooses ``cuda_graph_max_bs`` by the memory of the device where it
    is not given; here it is the maximum batch.
    """
    steps = chain(range(16, 257, 8), range(272, 512, 16), range(512, max_batch + 1, 32))
    sizes = {1, 2, 4, 8, 12, *steps, max_batch}
    return tuple(sorted(size for size in sizes if size <= max_batch))


def powers_of_two(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, 8, … below `max_batch`, and `max_batch`."""
    return (*(1 << power for power in range((max_batch - 1).bit_length())), max_batch)


DEFAULTS = {"vllm": vllm_ladder, "sglang": sglang_ladder, "powers_of_two": powers_of_two}
