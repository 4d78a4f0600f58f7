"""Lint: runs a step without a GPU and lists what would break or weaken its capture, and where."""
