"""A complete decode step for Qwen3-MoE checkpoints: shapes, weights and the step itself."""
