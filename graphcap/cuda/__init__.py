"""Kernels in CUDA C++, where that was measured faster than Triton; compiled at run time, see `source`."""
