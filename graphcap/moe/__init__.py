"""Routed experts whose intermediates lie in the pool."""
