"""Every Triton kernel compiles for an H200 at real sizes, also where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one program may use on sm_90."""


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    program = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {
        "_advance_kernel",
        "_align_experts_kernel",
        "_align_pairwise_kernel",
        "_argmax_join_kernel",
        "_argmax_kernel",
        "_attend_join_kernel",
        "_attend_kernel",
        "_attention_kernel",
        "_cache_write_kernel",
        "_conv_update_kernel",
        "_delta_rule_kernel",
        "_embedding_kernel",
        "_expert_gemm_kernel",
        "_fused_add_rms_norm_kernel",
        "_gated_rms_norm_kernel",
        "_join_kernel",
        "_linear_rows_kernel",
        "_linear_tiles_kernel",
        "_merge_kernel",
        "_output_gate_kernel",
        "_pair_down_kernel",
        "_pair_gate_up_kernel",
        "_rms_norm_kernel",
        "_rotary_embedding_kernel",
        "_router_rows_kernel",
        "_router_tiles_kernel",
        "_shared_gate_kernel",
        "_silu_and_mul_kernel",
        "_topk_softmax_kernel",
    }
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT, kernel
        # Whoever is launched to overlap with the kernel before it must wait for it.
        assert bool(kernel["waits"]) == ("launch_pdl" in kernel["options"]), kernel
