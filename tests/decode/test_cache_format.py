"""A cache format is one of those that kernels know, or is refused when it is made."""

from __future__ import annotations

import pytest
import torch

from graphcap.decode.cache_format import CacheFormat
from graphcap.errors import InputError


def test_another_layout_is_refused() -> None:
    with pytest.raises(InputError, match="expected one of tokens, heads, packed, found 'Heads'"):
        CacheFormat("Heads")


def test_another_dtype_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"expected torch\.int64 or torch\.int32, found torch\.int16"
    ):
        CacheFormat("tokens", torch.int16)
