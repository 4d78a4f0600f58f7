"""The model whose steps are measured where a plan is wanted for experts alone.

A hybrid's layers do not run by plans, and under tensor parallelism a rank has a part of each expert; but
plans of experts go by the experts' sizes (see `ExpertPlans`), so layers of full attention around them can be
measured.
"""

from __future__ import annotations

from dataclasses import replace

from graphcap.decode.model_shape import ModelShape
from graphcap.errors import InputError


def measured_shape(shape: ModelShape, ranks: int = 1) -> ModelShape:
    """`shape`, or layers of full attention around the experts of a hybrid; on one of `ranks` of tensor
    parallelism with its share of the heads and of every expert, as vLLM divides them.

    Raises:
        InputError: heads, experts or dense layers cannot be divided so.
    """
    if shape.is_hybrid:
        shape = replace(
            shape,
            name=f"{shape.name} (experts)",
            model_type="qwen3_moe",
            linear_layers=(),
            delta=None,
            rotary_dim=None,
            shared_intermediate_size=0,
            decoder_sparse_step=1,
            mlp_only_layers=(),
            intermediate_size=max(1, shape.intermediate_size),
        )
    if ranks == 1:
        return shape
    divided = ["num_heads"]
    divided += ["moe_intermediate_size"] if shape.num_sparse_layers else []
    divided += ["intermediate_size"] if shape.num_sparse_layers < shape.num_layers else []
    for field in divided:
        size = getattr(shape, field)
        if size % ranks:
            raise InputError(
                f"tensor parallelism over {ranks} ranks: expected {field} to be a multiple of {ranks}, "
                f"found {size} in {shape.name}; give a number of ranks that divides it"
            )
    if shape.num_kv_heads % ranks and ranks % shape.num_kv_heads:
        raise InputError(
            f"tensor parallelism over {ranks} ranks: expected num_kv_heads to be a multiple or a divisor of "
            f"{ranks}, found {shape.num_kv_heads} in {shape.name}; give another number of ranks"
        )
    share = {field: getattr(shape, field) // ranks for field in divided}
    # Ranks beyond the heads of keys and values have copies of them.
    share["num_kv_heads"] = max(1, shape.num_kv_heads // ranks)
    return replace(shape, name=f"{shape.name} (a rank of {ranks})", **share)
