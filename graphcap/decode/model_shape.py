"""What a Qwen model with experts looks like: every number that weights and decode step follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphcap.decode.config_hybrid import HYBRID_TYPES, hybrid_fields
from graphcap.decode.config_json import shape_fields
from graphcap.decode.config_reader import (
    check_bool,
    check_float,
    check_int,
    check_ints,
    parse_dtype,
    refuse,
)
from graphcap.decode.delta_shape import DeltaShape

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
        model_type: ``qwen3_moe``, or one of the hybrids ``qwen3_next`` and ``qwen3_5_moe_text``, which
            differ from each other only in how a checkpoint names and orders weights. Hybrids need all
            that follows, and have an output gate on full attention and norms that multiply by
            1 + weight (`is_hybrid`).
        linear_layers: layers with a gated delta net in place of attention, see `is_linear`.
        delta: the sizes of those.
        rotary_dim: values of a head that RoPE rotates, the first ones; None: all D.
        shared_intermediate_size: I of the shared expert of each sparse layer.

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
    model_type: str = "qwen3_moe"
    linear_layers: tuple[int, ...] = ()
    delta: DeltaShape | None = None
    rotary_dim: int | None = None
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        at_least_one = (
            ["num_layers", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim"]
            + ["decoder_sparse_step", "max_position_embeddings"]
            + (["top_k", "moe_intermediate_size"] if self.num_experts else [])
            + (["shared_intermediate_size", "num_experts"] if self.is_hybrid else [])
        )
        for field in ("num_experts", "top_k", "moe_intermediate_size", *at_least_one):
            minimum = 1 if field in at_least_one else 0
            check_int(self._label(field), getattr(self, field), minimum, _CURE)
        for field in ("norm_topk_prob", "attention_bias", "tie_word_embeddings"):
            check_bool(self._label(field), getattr(self, field), _CURE)
        for field in ("rope_theta", "rms_norm_eps"):
            check_float(self._label(field), getattr(self, field), _CURE)
        for field in ("mlp_only_layers", "eos_token_ids", "linear_layers"):
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
        # Only a model all of whose layers have experts may lack the size of the others.
        dense = self.num_sparse_layers < self.num_layers
        minimum = 1 if dense or not self.is_hybrid else 0
        check_int(self._label("intermediate_size"), self.intermediate_size, minimum, _CURE)
        self._check_hybrid()

    def _check_hybrid(self) -> None:
        if self.model_type not in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
            expected = "'qwen3_moe', 'qwen3_next' or 'qwen3_5_moe_text'"
            raise refuse(self._label("model_type"), self.model_type, expected, _CURE)
        if self.is_hybrid:
            if self.delta is None:
                raise refuse(self._label("delta"), None, "the sizes of gated delta nets", _CURE)
            if self.rotary_dim is not None:
                check_int(self._label("rotary_dim"), self.rotary_dim, 2, _CURE)
                if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
                    expected = f"an even number up to head_dim, {self.head_dim}"
                    raise refuse(self._label("rotary_dim"), self.rotary_dim, expected, _CURE)
            return
        for field, unused in (
            ("delta", None),
            ("rotary_dim", None),
            ("linear_layers", ()),
            ("shared_intermediate_size", 0),
        ):
            if getattr(self, field) != unused:
                cure = "Only hybrids have it: give their model_type."
                raise refuse(self._label(field), getattr(self, field), repr(unused), cure)

    def _label(self, field: str) -> str:
        return f"shape '{self.name}': {field}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """The shape that a Hugging Face config.json of Qwen3-MoE, Qwen3-Next or Qwen3.5-MoE describes.

        Keys of transformers 4 and 5 are read. What would change the maths and is not supported is
        refused (see `config_json`, `config_hybrid`); keys that cannot change it are ignored.

        Raises:
            CheckpointError: names the key, what was found, what is supported, and the cure.
        """
        hybrid = config.get("model_type") in HYBRID_TYPES
        return cls(**(hybrid_fields if hybrid else shape_fields)(config, name))

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is of the kind that mixes gated delta nets with gated full attention."""
        return self.model_type != "qwen3_moe"

    def is_linear(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has a gated delta net in place of attention."""
        return layer in self.linear_layers

    @property
    def num_linear_layers(self) -> int:
        """How many layers have a gated delta net."""
        return sum(map(self.is_linear, range(self.num_layers)))

    @property
    def query_rows(self) -> int:
        """Rows of the query projection: Hq * D, twice that where each head brings its output gate."""
        return self.num_heads * self.head_dim * (2 if self.is_hybrid else 1)

    @property
    def rotated(self) -> int:
        """Values of a head that RoPE rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

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

    def _attention_parameters(self) -> int:
        """Parameters of one layer's attention, its norms of queries and keys included."""
        h, q, kv = self.hidden_size, self.query_rows, self.num_kv_heads * self.head_dim
        biases = q + 2 * kv + h if self.attention_bias else 0
        output = h * self.num_heads * self.head_dim
        return 2 * self.head_dim + (q + 2 * kv) * h + output + biases

    def _shared_parameters(self) -> int:
        """Parameters of one layer's shared expert and its gate."""
        shared = self.shared_intermediate_size
        return self.hidden_size * (3 * shared + 1) if shared else 0

    def parameter_count(self) -> int:
        """The number of weights, exactly; a tied lm head counts once."""
        h, sparse = self.hidden_size, self.num_sparse_layers
        moe = (
            self.num_experts * (h + 3 * h * self.moe_intermediate_size) + self._shared_parameters()
        )
        dense = 3 * h * self.intermediate_size
        linear = self.num_linear_layers
        delta = self.delta.parameters(h) if self.delta is not None else 0
        tables = 1 if self.tie_word_embeddings else 2
        return (
            tables * self.vocab_size * h
            + h  # final norm
            + self.num_layers * 2 * h  # the norms before attention and MLP
            + (self.num_layers - linear) * self._attention_parameters()
            + linear * delta
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
        exact for a batch of one. KV cache and recurrent states are not counted.
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
