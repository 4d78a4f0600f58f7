"""Writes weights as a Hugging Face checkpoint that transformers, vLLM and `load_checkpoint` read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from graphcap.decode.delta_weights import Grouped
from graphcap.decode.safetensors_files import INDEX, SINGLE, some
from graphcap.decode.shapes import ModelShape
from graphcap.decode.weights import ModelWeights, checkpoint_views
from graphcap.errors import CheckpointError

_GIB = 1 << 30
_ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def config_of(shape: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of `shape`, in the keys of transformers 4.51, which later ones read as well; of a
    hybrid also those of its model type, flat, whatever prefix it was loaded from."""
    eos = list(shape.eos_token_ids)
    config = {
        "architectures": [_ARCHITECTURES[shape.model_type]],
        "model_type": shape.model_type,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "intermediate_size": shape.intermediate_size,
        "norm_topk_prob": shape.norm_topk_prob,
        "decoder_sparse_step": shape.decoder_sparse_step,
        "mlp_only_layers": list(shape.mlp_only_layers),
        "attention_bias": shape.attention_bias,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
        **(_hybrid_keys(shape) if shape.is_hybrid else {}),
    }
    if (
        shape.model_type == "qwen3_5_moe_text"
    ):  # which has experts in every layer and needs no flags
        for key in (
            "intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        ):
            del config[key]
    return config


def _hybrid_keys(shape: ModelShape) -> dict[str, Any]:
    delta = shape.delta
    assert delta is not None
    kinds = ("full_attention", "linear_attention")
    rotary = shape.rotated / shape.head_dim
    if int(shape.head_dim * rotary) != shape.rotated:  # as its readers compute it: rounded down
        rotary = (shape.rotated + 0.5) / shape.head_dim
    return {
        "layer_types": [kinds[shape.is_linear(layer)] for layer in range(shape.num_layers)],
        "partial_rotary_factor": rotary,
        "shared_expert_intermediate_size": shape.shared_intermediate_size,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
    }


def _check_folder(folder: Path, needed: int) -> None:
    """Raise unless the folder can take the files and holds none that they could be mixed up with."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(f"{folder}: expected a folder to write to: {error}.") from error
    old = [n for n in files if n in ("config.json", INDEX) or n.endswith(".safetensors")]
    if old:
        raise CheckpointError(
            f"{folder}: expected no checkpoint in it, found {some(sorted(old))}. Give another folder,"
            " or remove them."
        )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: {needed / _GIB:.2f} GiB needed, {free / _GIB:.2f} GiB free. Make room, or give"
            " a folder on another disk."
        )


def _split(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `max_bytes`; a larger tensor gets a group of its own."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _on_host(view: torch.Tensor | Grouped) -> torch.Tensor:
    if isinstance(view, Grouped):
        return view.assembled().cpu()
    return view.to("cpu", copy=True).contiguous()


def save_checkpoint(
    weights: ModelWeights, folder: str | Path, max_shard_bytes: int = 4 * _GIB
) -> None:
    """Write config.json and the weights as safetensors, experts one by one, into `folder`.

    One file, model.safetensors, if all fit in `max_shard_bytes`; otherwise shards and their index.
    Holds one shard in host memory. config.json comes last: a folder that lacks it was not finished.

    Raises:
        CheckpointError: the folder cannot be written or holds a checkpoint already, the disk is
            full, the weights are on device "meta", or `max_shard_bytes` is not positive.
    """
    folder = Path(folder)
    if weights.device.type == "meta":
        raise CheckpointError(
            f"weights of '{weights.shape.name}': expected values to save, found device 'meta'. Draw or"
            " load them on a real device."
        )
    if max_shard_bytes <= 0:
        raise CheckpointError(
            f"max_shard_bytes: expected a number of bytes > 0, found {max_shard_bytes!r}."
            " Leave it out for shards of 4 GiB."
        )
    views = dict(checkpoint_views(weights))
    sizes = {name: view.nbytes for name, view in views.items()}
    total = sum(sizes.values())
    _check_folder(folder, total)
    groups = _split(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        # Copies: safetensors writes no tensors that share storage, as the fused ones' parts do.
        shard = {name: _on_host(views[name]) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = config_of(weights.shape, weights.dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
