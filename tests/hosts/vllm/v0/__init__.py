"""What stands in, under the real vLLM 0.6.3, for packages and kernels that are not on this machine."""
