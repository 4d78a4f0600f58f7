"""Runs scenarios in the wheel of vLLM 0.6.3, over what stands in for its kernels; see gather.py.

python gather_v0.py scenarios.v0_plugin scenarios.v0_decode
"""

from __future__ import annotations

import gc
import importlib
import sys

import torch
import v0.absent  # noqa: F401  # before vLLM
from environments import report
from gather import gather
from v0 import kernels

IMPORTED_ONCE = (
    "vllm",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.models.arctic",
    "vllm.model_executor.models.qwen2_moe",
    "vllm.worker.worker",
)


def main() -> None:
    torch.set_num_threads(1)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    kernels.install()
    gc.freeze()
    report({"scenarios": gather(sys.argv[1:])})


if __name__ == "__main__":
    main()
