"""The vLLM plugin."""
