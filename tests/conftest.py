"""Without a GPU the Triton kernels run in Triton's interpreter, which must be known before its import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The models here are tiny: threads that wait for each other cost more than the work.
torch.set_num_threads(1)
