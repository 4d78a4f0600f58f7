"""What a Qwen3-MoE model looks like: every number that its weights and its decode step follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from graphcap.decode.config_json import (
    DTYPES,
    check_bool,
    check_float,
    check_int,
    check_ints,
    parse_dtype,
    refuse,
    shape_fields,
)
from graphcap.errors import CheckpointError

_CURE = "Correct the shape."


@dataclass(frozen=True)
class ModelShape:
    """The shape of one model. Names follow the key of config.json where the two differ.

    Attributes:
        name: the preset's or the checkpoint folder's, for messages.
        num_layers: decoder layers (`num_hidden_layers`).
        hidden_size: H, the width of the residual stream.
        vocab_size: V, rows of the embedding and of the lm head.
        num_heads, num_kv_heads, head_dim: Hq (`num_attention_heads`), Hk (`num_key_value_heads`), D.
        num_experts: E (`num_experts`, `num_local_experts`); 0 makes every layer dense.
        top_k: K, experts a token (`num_experts_per_tok`).
        moe_intermediate_size: I of one expert.
        intermediate_size: I of a dense layer.
        norm_topk_prob: divide the K routing weights by their sum.
        decoder_sparse_step, mlp_only_layers: which layers have experts, see `is_sparse`.
        attention_bias: q, k, v and output projections have biases.
        tie_word_embeddings: the lm head is the embedding.
        rope_theta: the base of RoPE.
        rms_norm_eps: added to the mean square in every norm.
        max_position_embeddings: positions the model was made for.
        dtype: the dtype that the checkpoint says its weights have; None: it does not say.
        eos_token_ids: tokens that end a sequence; may be empty.

    Raises:
        CheckpointError: on construction, if a value has the wrong type, is out of range, or does
            not fit another one.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    intermediate_size: int
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40_960
    dtype: torch.dtype | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least_one = (
            ["num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim"]
            + ["intermediate_size", "decoder_sparse_step", "max_position_embeddings"]
            + (["top_k", "moe_intermediate_size"] if self.num_experts else [])
        )
        for field in ("num_experts", "top_k", "moe_intermediate_size", *at_least_one):
            minimum = 1 if field in at_least_one else 0
            check_int(self._label(field), getattr(self, field), minimum, _CURE)
        for field in ("norm_topk_prob", "attention_bias", "tie_word_embeddings"):
            check_bool(self._label(field), getattr(self, field), _CURE)
        for field in ("rope_theta", "rms_norm_eps"):
            check_float(self._label(field), getattr(self, field), _CURE)
        for field in ("mlp_only_layers", "eos_token_ids"):
            # Normalised to a tuple so that a shape stays hashable.
            ints = check_ints(self._label(field), getattr(self, field), _CURE)
            object.__setattr__(self, field, ints)
        if self.dtype is not None:
            parse_dtype(self._label("dtype"), self.dtype)
        if self.num_heads % self.num_kv_heads:
            expected = f"a multiple of num_kv_heads, {self.num_kv_heads}"
            raise refuse(self._label("num_heads"), self.num_heads, expected, _CURE)
        if self.head_dim % 2:
            cure = "RoPE rotates pairs of values. " + _CURE
            raise refuse(self._label("head_dim"), self.head_dim, "an even number", cure)
        if self.num_experts and self.top_k > self.num_experts:
            expected = f"at most num_experts, {self.num_experts}"
            raise refuse(self._label("top_k"), self.top_k, expected, _CURE)

    def _label(self, field: str) -> str:
        return f"shape '{self.name}': {field}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """The shape that a Hugging Face config.json of Qwen3-MoE describes.

        Keys of transformers 4 and 5 are read. What would change the maths and is not supported is
        refused (see `config_json`); keys that cannot change it are ignored.

        Raises:
            CheckpointError: names the key, what was found, what is supported, and the cure.
        """
        return cls(**shape_fields(config, name))

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has experts: the rule of transformers' Qwen3MoeDecoderLayer."""
        return (layer not in self.mlp_only_layers) and (
            self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def num_sparse_layers(self) -> int:
        """How many layers have experts."""
        return sum(map(self.is_sparse, range(self.num_layers)))

    def with_layers(self, num_layers: int) -> ModelShape:
        """The same shape with another number of layers; which of them are sparse does not change."""
        return replace(self, num_layers=num_layers)

    def _layer_parameters(self) -> int:
        """Parameters of one layer outside its experts or dense MLP, router not included."""
        h, q, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        biases = q + 2 * kv + h if self.attention_bias else 0
        return 2 * h + 2 * self.head_dim + (q + 2 * kv) * h + h * q + biases

    def parameter_count(self) -> int:
        """The number of weights, exactly; a tied lm head counts once."""
        h, sparse = self.hidden_size, self.num_sparse_layers
        moe = self.num_experts * (h + 3 * h * self.moe_intermediate_size)
        dense = 3 * h * self.intermediate_size
        tables = 1 if self.tie_word_embeddings else 2
        return (
            tables * self.vocab_size * h
            + h  # final norm
            + self.num_layers * self._layer_parameters()
            + sparse * moe
            + (self.num_layers - sparse) * dense
        )

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights in `dtype`, exactly: `parameter_count` times the size of one."""
        return self.parameter_count() * dtype.itemsize

    def bytes_read_per_step(self, dtype: torch.dtype, batch: int = 1, experts: int = 0) -> int:
        """Bytes of weights that one step of `batch` sequences must read, each read once.

        Everything but the embedding and the experts is read whole; of the embedding `batch` rows
        (none more if it is the lm head too); of the experts those that any token chose. `experts` is
        their number in each sparse layer; 0 takes the most there can be, min(E, batch * K), which is
        exact for a batch of one. The KV cache is not counted.
        """
        h, sparse = self.hidden_size, self.num_sparse_layers
        check_int("batch", batch, 1, "Give the number of sequences in the step.")
        most = min(self.num_experts, batch * self.top_k)
        read = check_int("experts", experts, 0, "Give distinct experts a layer, or 0.") or most
        if read > most:
            raise refuse("experts", experts, f"at most min(E, batch * K) = {most}", "Lower it.")
        unread_experts = (self.num_experts - read) * 3 * h * self.moe_intermediate_size
        unread_rows = 0 if self.tie_word_embeddings else max(self.vocab_size - batch, 0)
        count = self.parameter_count() - sparse * unread_experts - unread_rows * h
        return count * dtype.itemsize


def _presets() -> dict[str, ModelShape]:
    tiny = ModelShape(
        name="tiny",
        num_layers=4,
        hidden_size=128,
        vocab_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        top_k=2,
        moe_intermediate_size=64,
        intermediate_size=256,
        mlp_only_layers=(1,),
        max_position_embeddings=1024,
    )
    qwen3 = ModelShape(
        name="qwen3-30b-a3b",
        num_layers=48,
        hidden_size=2048,
        vocab_size=151_936,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        top_k=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        norm_topk_prob=True,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=40_960,
        dtype=torch.bfloat16,
        eos_token_ids=(151_645,),
    )
    seed_64 = replace(
        qwen3,
        name="seed-64",
        num_layers=64,
        num_heads=16,
        num_kv_heads=2,
        num_experts=256,
        moe_intermediate_size=512,
    )
    return {shape.name: shape for shape in (tiny, seed_64, qwen3)}


PRESETS: Mapping[str, ModelShape] = MappingProxyType(_presets())
"""Shapes by name.

- `tiny`: ours, for tests on a CPU: both kinds of layer (layer 1 is dense), 1.0 million weights.
- `seed-64`: 64 layers of hidden 2048, 16 query and 2 kv heads of 128, 256 experts, top-8, expert
  intermediate 512, vocabulary 151,936: the layer of Qwen3.6-35B-A3B's experts in the 64 layers of the
  analysis that set this project's target, and the shape that the vLLM baseline was measured with.
  98 GiB in bfloat16. What the analysis leaves open (RoPE, norms, eos) is as in `qwen3-30b-a3b`.
- `qwen3-30b-a3b`: config.json of Qwen/Qwen3-30B-A3B as published with transformers 4.51.0. 57 GiB in
  bfloat16.
"""


def preset(name: str) -> ModelShape:
    """The preset called `name`; CheckpointError lists the names if there is none."""
    if name not in PRESETS:
        raise CheckpointError(
            f"no preset is called {name!r}; the presets are {', '.join(PRESETS)}."
            " For another model give the folder of its checkpoint."
        )
    return PRESETS[name]


__all__ = ["DTYPES", "PRESETS", "ModelShape", "preset"]
