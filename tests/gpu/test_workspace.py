"""cuBLAS's workspaces, whose addresses graphs hold, are nobody else's memory whatever torch is asked to give
back."""

import pytest
import torch

from graphcap import BucketLadder, CaptureManager, Settings, Slot, StaticInputs

WIDTH = 4096
clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


class Step(torch.nn.Module):
    """Products deep enough for cuBLAS to split them, for which it needs its workspace."""

    def __init__(self, device):
        super().__init__()
        draw = {"device": device, "dtype": torch.bfloat16}
        self.first = torch.randn(64, WIDTH * 8, **draw) * 0.01
        self.second = torch.randn(64, 64, **draw) * 0.1
        self.bias = torch.randn(64, **draw)

    def forward(self, slots):
        narrow = slots["x"] @ self.first.T
        return {"y": torch.nn.functional.linear(narrow, self.second, self.bias)}


@pytest.mark.skipif(clear is None, reason="this torch cannot be asked to give them back")
def test_graphs_keep_their_workspace(device):
    step = Step(device)
    inputs = StaticInputs(4, {"x": Slot((WIDTH * 8,), torch.bfloat16)}, device)
    settings = Settings(recorder="cuda", strict=True)
    manager = CaptureManager(step, inputs, ladder=BucketLadder([2], 4), settings=settings)
    report = manager.capture()
    assert not report.failures
    clear()
    torch.cuda.empty_cache()
    # Whatever was given back is somebody else's now, and holds what they wrote.
    others = [torch.full((2**20,), float("nan"), device=device) for _ in range(64)]
    for rows in (1, 2, 3, 4):
        x = torch.randn(rows, WIDTH * 8, device=device, dtype=torch.bfloat16)
        found = manager.run({"x": x})["y"].clone()
        torch.cuda.synchronize()
        expected = (x.float() @ step.first.float().T) @ step.second.float().T + step.bias.float()
        assert torch.allclose(found.float(), expected, rtol=0.05, atol=0.05)
    assert all(other.isnan().all() for other in others)
    manager.close()
