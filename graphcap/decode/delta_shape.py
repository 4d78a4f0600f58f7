"""The sizes of a gated delta net (https://arxiv.org/abs/2412.06464), the linear attention of Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from graphcap.decode.config_reader import check_int, refuse

_CURE = "Correct the shape."


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of one gated-delta-net layer; the same in every layer of a model.

    Attributes:
        num_key_heads, num_value_heads: Gk (`linear_num_key_heads`) and Gv (`linear_num_value_heads`);
            each key head serves Gv / Gk value heads in a row.
        key_dim, value_dim: Dk (`linear_key_head_dim`) and Dv (`linear_value_head_dim`).
        conv_width: W (`linear_conv_kernel_dim`), the tokens that the short convolution sees.

    Raises:
        CheckpointError: on construction, if a value is no positive integer or does not fit another.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for field in fields(self):
            minimum = 2 if field.name == "conv_width" else 1
            check_int(f"delta: {field.name}", getattr(self, field.name), minimum, _CURE)
        if self.num_value_heads % self.num_key_heads:
            expected = f"a multiple of num_key_heads, {self.num_key_heads}"
            raise refuse("delta: num_value_heads", self.num_value_heads, expected, _CURE)

    @property
    def keys(self) -> int:
        """Gk * Dk: what one token's keys, or queries, measure."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Gv * Dv: what one token's values measure."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C: channels of the convolution, which goes over queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projection_rows(self) -> int:
        """Rows of the fused input projection: queries, keys, values, z, b and a."""
        return self.channels + self.values + 2 * self.num_value_heads

    def parameters(self, hidden_size: int) -> int:
        """Parameters of a layer's gated delta net, its input norm not included."""
        small = self.channels * self.conv_width + 2 * self.num_value_heads + self.value_dim
        return small + (self.projection_rows + self.values) * hidden_size

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one sequence's state in one layer, for a model of `dtype`."""
        recurrent = self.num_value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return recurrent + self.channels * (self.conv_width - 1) * dtype.itemsize
