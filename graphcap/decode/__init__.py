"""A complete decode step for Qwen3-MoE, Qwen3-Next and Qwen3.5-MoE: shapes, weights, the step itself."""
