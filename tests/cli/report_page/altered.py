"""Reports that no run here gives: with hostile texts, and as large as those of a big model on a GPU."""

from __future__ import annotations

import copy
import random
from typing import Any

Report = dict[str, Any]


def hostile(report: Report, text: str) -> Report:
    """`report` with every text ending in `text`, and names of open sets (reasons, packages, buckets
    without a recording) that are nothing else."""
    changed = _ending(copy.deepcopy(report), text)
    counts = {text: 3}
    for inner in (changed, *changed.get("managers", {}).values()):
        for name, value in (
            ("fallbacks", counts),
            ("moe_layers", counts),
            ("failures", {text: text}),
        ):
            if name in inner:
                inner[name] = value
        if inner.get("versions"):
            inner["versions"] = {text: text}
    return changed


def _ending(value: Any, text: str) -> Any:
    if isinstance(value, str):
        return value + text
    if isinstance(value, list):
        return [_ending(item, text) for item in value]
    if isinstance(value, dict):
        return {key: _ending(inner, text) for key, inner in value.items()}
    return value


def large(decoded: Report) -> Report:
    """As of 64 layers on a GPU: a thousand operations a step, long kernel names, many buckets."""
    draw = random.Random(0)
    names = [
        "_pair_gate_up_kernel",
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT",
        "kernel_unified_attention",
        "void vllm::rms_norm_kernel<c10::BFloat16, 8, 3, true>(c10::BFloat16*, c10::BFloat16 const*)",
    ]

    def lane(names: list[str], gap: float, us: float) -> dict[str, Any]:
        start, operations = 0.0, []
        for index in range(1100):
            length = us * draw.uniform(0.5, 1.5)
            operations.append([index % len(names), round(start, 2), round(length, 2)])
            start += length + gap * draw.uniform(0.0, 2.0)
        return {"names": names, "operations": operations}

    def timeline(host: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
        ends = [start + us for lane in (host, device) for _, start, us in lane["operations"]]
        return {"clock": "profiler", "host": host, "device": device, "us": max(ends)}

    once = {"names": ["cudaGraphLaunch"], "operations": [[0, 0.0, 12.0]]}
    changed = copy.deepcopy(decoded)
    changed["timeline"] = {
        "eager": timeline(lane(["cuLaunchKernelEx"], 30, 8), lane(names, 36, 2.8)),
        "replay": timeline(once, lane(names, 0.5, 2.8)),
    }
    changed["eager"] |= {"launches_per_token": 1095, "ms_per_token": 44.82}
    changed["census"]["kernels"] = [
        {"name": name, "grid": [132, 1, 1], "block": [128, 1, 1], "count": 64}
        for name in names * 30
    ]
    for row in changed["census"]["rows"]:
        row["nodes"] = row["count"] = 64 * row["count"]
    changed["buckets"] = [
        {
            "size": size,
            "nodes": 1097,
            "mib": 2.0,
            "capture_ms": 140.76,
            "replays": 1000 * size,
            "padding_rows": 123 * size,
        }
        for size in (1, 2, 4, *range(8, 257, 8))
    ]
    return changed
