"""vLLM 0.6.3, whose engine is V0: decode steps through graphcap's manager, experts on its pool."""
