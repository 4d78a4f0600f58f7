"""Recorders turn a step into a recording: ``cuda`` into a CUDA graph, ``tape`` into a tape."""
