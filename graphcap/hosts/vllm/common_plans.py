"""Plans of experts that all tensor-parallel ranks have.

Each rank routes for itself. By another plan a router adds in another order, and where two experts are as good
as equal the ranks would add up parts of different ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace

import torch

from graphcap.decode.plan_choice import files_of_plans
from graphcap.decode.plan_files import cache_folder, read_plans
from graphcap.decode.plan_key import file_name_start, kernels_digest, versions_here
from graphcap.errors import InputError
from graphcap.explain import warn
from graphcap.hosts.vllm.ranks import alone, same
from graphcap.settings import Settings

logger = logging.getLogger(__name__)


def with_common_plans(settings: Settings, device: torch.device) -> Settings:
    """`settings`, without plans where those of the ranks would not be the same. Every rank must come here."""
    if device.type != "cuda" or alone() or same(digest(settings, device)):
        return settings
    warn(
        logger,
        "tune-cache",
        "experts run without plans on all tensor-parallel ranks: their tuned plans, cards or versions "
        "differ; give every node the same folder (here %s)",
        cache_folder(settings.tune_cache),
    )
    return replace(settings, schedule="plain")


def digest(settings: Settings, device: torch.device) -> int:
    """31 bits of what the choice of plans on `device`, a CUDA device, depends on."""
    here = versions_here()
    found: list[object] = [settings.kernels, settings.schedule, kernels_digest()]
    found += [here["triton"], here["torch"]]
    name = torch.cuda.get_device_name(device)
    found.append(name)
    folder = cache_folder(settings.tune_cache)
    for dtype in ("bfloat16", "float16"):
        for path in files_of_plans(folder, file_name_start(name, dtype)):
            try:
                found.append(read_plans(path).to_json())
            except InputError:
                found.append(None)
    text = json.dumps(found, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
