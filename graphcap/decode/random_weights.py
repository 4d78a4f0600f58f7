"""Random weights that behave like a trained model's: for tests, benchmarks and trials without one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from graphcap.decode.config_reader import parse_dtype
from graphcap.decode.delta_weights import DeltaWeights
from graphcap.decode.memory import as_device, ensure_fits
from graphcap.decode.shapes import ModelShape
from graphcap.decode.weights import (
    DeltaLayerWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
    empty_weights,
)

_CHUNK = 1 << 22
_NORM = (1.0, 0.1)
_ZERO_CENTRED_NORM = (0.0, 0.1)  # of hybrids, which multiply by 1 + weight
_TIME_BIAS = (-2.0, 1.0)  # with A near 1 a state keeps most of itself, of some heads nearly all
_BIAS = (0.0, 0.1)
_ROUTER_STD = 1.5
_LOGITS_STD = 3.0


class _Drawer:
    """Fills tensors from one generator, in the order of the calls."""

    def __init__(
        self,
        device: torch.device,
        seed: int,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.on_host = device.type == "cpu"
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, tensor: torch.Tensor, mean: float, std: float) -> None:
        if self.on_host and tensor.dtype != torch.float32:
            # The host draws half types with half the digits; draw float32 and round, by the chunk.
            flat = tensor.view(-1)
            buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32)
            for start in range(0, flat.numel(), _CHUNK):
                part = flat[start : start + _CHUNK]
                part.copy_(buffer[: part.numel()].normal_(mean, std, generator=self.generator))
        elif self.on_host:
            # In the same chunks, so that a half type is the rounded float32 draw of its seed.
            for part in tensor.view(-1).split(_CHUNK):
                part.normal_(mean, std, generator=self.generator)
        else:
            tensor.normal_(mean, std, generator=self.generator)
        self.done += tensor.nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _norm_draw(shape: ModelShape) -> tuple[float, float]:
    return _ZERO_CENTRED_NORM if shape.is_hybrid else _NORM


def _draw_attention(draw: _Drawer, layer: LayerWeights, shape: ModelShape, residual: float) -> None:
    draw(layer.qkv, 0.0, 1 / math.sqrt(shape.hidden_size))
    draw(layer.output, 0.0, residual / math.sqrt(layer.output.shape[1]))
    for bias, scale in ((layer.qkv_bias, 1.0), (layer.output_bias, residual)):
        if bias is not None:
            draw(bias, _BIAS[0], _BIAS[1] * scale)


def _draw_delta(draw: _Drawer, delta: DeltaWeights, residual: float) -> None:
    draw(delta.projection, 0.0, 1 / math.sqrt(delta.projection.shape[1]))
    draw(delta.conv, 0.0, 1 / math.sqrt(delta.conv.shape[1]))
    draw(delta.decay_log, 0.0, 0.5)
    draw(delta.time_bias, *_TIME_BIAS)
    draw(delta.norm, *_NORM)
    draw(delta.output, 0.0, residual / math.sqrt(delta.output.shape[1]))


def _draw_layer(draw: _Drawer, layer: LayerWeights | DeltaLayerWeights, shape: ModelShape) -> None:
    h = shape.hidden_size
    # 2L sublayers add to the residual stream; each adds 1/(2L) of a variance of about one.
    residual = 1 / math.sqrt(2 * shape.num_layers)
    norms = [layer.input_norm, layer.post_norm]
    if isinstance(layer, LayerWeights):
        norms[1:1] = [layer.q_norm, layer.k_norm]
    for norm in norms:
        draw(norm, *_norm_draw(shape))
    if isinstance(layer, LayerWeights):
        _draw_attention(draw, layer, shape, residual)
    else:
        _draw_delta(draw, layer.delta, residual)
    mlp = layer.mlp
    down = residual / math.sqrt(mlp.down.shape[-1])
    if isinstance(mlp, ExpertWeights):
        if mlp.shared is not None:
            draw(mlp.shared.gate_up, 0.0, 1 / math.sqrt(h))
            draw(mlp.shared.down, 0.0, residual / math.sqrt(mlp.shared.down.shape[-1]))
            draw(mlp.shared.gate, 0.0, 1 / math.sqrt(h))
        draw(mlp.router, 0.0, _ROUTER_STD / math.sqrt(h))
        # The weighted mean of K independent outputs is smaller by about sqrt(K).
        down *= math.sqrt(shape.top_k)
    draw(mlp.gate_up, 0.0, 1 / math.sqrt(h))
    draw(mlp.down, 0.0, down)


def random_weights(
    shape: ModelShape,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Normally distributed weights of `shape`, drawn on `device` and scaled to stay healthy.

    The embedding has standard deviation 1, projections 1/sqrt(fan in), projections into the residual
    stream 1/sqrt(2 * layers) of that, so the stream stays near 1 at any depth while every layer
    counts; a relative error of 1e-7 at the embedding grows to about 1e-6 over 64 layers, unless it
    turns a choice of experts. Router logits have a standard deviation of 1.5 (choices vary), the
    model's logits one of 3 (the likeliest token is clear). Norms are 1 +- 0.1 (those
    of hybrids, 1 + weight, likewise), biases +- 0.1. A tied
    embedding is scaled as an lm head, and the final norm's signs then alternate, since otherwise
    tokens would repeat themselves.

    The same shape, device type, dtype, seed and torch version give the same weights. Nothing is held
    beside the weights but, on the host, one buffer of 16 MiB. Device "meta" gives meta tensors and
    draws nothing.

    Args:
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        progress: called after each tensor with the bytes drawn and the bytes in all.

    Raises:
        CheckpointError: the dtype is none of these, or the weights do not fit on the device.
        BackendError: this machine has no such device.
    """
    target = as_device(device)
    dtype = parse_dtype("dtype of random_weights", dtype)
    ensure_fits(shape, target, dtype)
    weights = empty_weights(shape, device=target, dtype=dtype)
    if target.type == "meta":
        return weights
    draw = _Drawer(target, seed, weights.nbytes, progress)
    lm_head_std = _LOGITS_STD / math.sqrt(shape.hidden_size)
    draw(weights.embedding, 0.0, lm_head_std if shape.tie_word_embeddings else 1.0)
    for layer in weights.layers:
        _draw_layer(draw, layer, shape)
    draw(weights.final_norm, *_norm_draw(shape))
    if weights.lm_head is weights.embedding:
        # What is left of a token's embedding would make that token the likeliest to follow itself;
        # with every second sign turned it is no longer like its row of the lm head.
        weights.final_norm[1::2].neg_()
        if shape.is_hybrid:
            weights.final_norm[1::2].sub_(2.0)  # of 1 + weight
    else:
        draw(weights.lm_head, 0.0, lm_head_std)
    return weights
