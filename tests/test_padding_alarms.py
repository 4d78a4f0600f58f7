"""What verification must not take for padding that is felt: rounding that depends on shapes, and a state that
padding advances only while it is made like a real row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import WIDTH, floats, manager_of

from graphcap.inputs import PadPolicy, Slot

SEQUENCES = 16
SLOTS = {
    "x": Slot((WIDTH,), torch.float32),
    "sequence": Slot((), torch.int64, PadPolicy.fill(SEQUENCES)),
}


class Recurrent:
    """Each sequence has a state that its token is added to; padding adds to one that is nobody's. A product
    of another shape is rounded otherwise, and the choice that hangs on it falls otherwise too.

    Args:
        leak: what a row gets of those after it, padding too.
        rounding: by how much another shape is rounded otherwise, after layers that amplify it.
    """

    def __init__(self, leak: float = 0.0, rounding: float = 1e-7) -> None:
        self.state = torch.zeros(SEQUENCES + 1, WIDTH)
        self.leak, self.rounding = leak, rounding

    def __call__(self, inputs: Any) -> Any:
        x, sequence = inputs["x"], inputs["sequence"]
        rounding = 1 + self.rounding * x.shape[0]
        self.state.index_add_(0, sequence, x)
        y = self.state[sequence] * rounding + self.leak * x.flip(0).abs().cummax(0)[0]
        token = torch.full((x.shape[0],), x.shape[0])  # as near to a tie as can be
        return {"token": token, "y": y}

    def example(self, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        sequences = torch.randperm(SEQUENCES, generator=generator)[:rows]
        return {"x": torch.randn(rows, WIDTH, generator=generator), "sequence": sequences}


def failures(step: Recurrent) -> dict[int, str]:
    manager = manager_of(
        step, max_batch=8, buckets=(1, 4), slots=SLOTS, example=step.example, state=[step.state]
    )
    found = manager.capture().failures
    if not found:
        x = floats(3)
        step.state.zero_()
        out = manager.run({"x": x, "sequence": torch.tensor([4, 2, 9])})
        assert torch.allclose(out["y"], x)
        assert torch.allclose(step.state[[4, 2, 9]], x)
    return found


def test_a_recurrent_state_and_a_near_tie_are_no_fault() -> None:
    assert not failures(Recurrent())


def test_nor_is_rounding_that_layers_have_amplified() -> None:
    """Row 0 then differs from the unpadded step, and it feels padding that is like it: the padding that is
    like row 1 tells that this is its own state."""
    step = Recurrent(rounding=0.05)
    manager = manager_of(
        step, max_batch=8, buckets=(1, 4), slots=SLOTS, example=step.example, state=[step.state]
    )
    assert not manager.capture().failures


@pytest.mark.parametrize("like", [0, 1])
def test_padding_that_writes_where_one_real_row_does_is_found(like: int) -> None:
    """Whichever row that is: here the last that comes wins."""

    class Overwriting(Recurrent):
        def __call__(self, inputs: Any) -> Any:
            x, sequence = inputs["x"], inputs["sequence"]
            rows = torch.arange(x.shape[0])
            padding = rows >= inputs["num_rows"].long()
            at = torch.where(padding, sequence[min(like, x.shape[0] - 1)], sequence)
            self.state.index_copy_(0, at, torch.where(padding[:, None], x + 1, x))
            return {"y": self.state[sequence] + 0.0}

    found = failures(Overwriting())
    assert set(found) == {4, 8}
    assert f"in real row {like}" in found[4]


def test_a_row_that_feels_all_padding_but_that_like_it_is_found() -> None:
    """Rows count those of other sequences: padding like row 0 is what makes row 0 right, and only that."""

    class Counting(Recurrent):
        def __call__(self, inputs: Any) -> Any:
            sequence = inputs["sequence"]
            others = (sequence[:, None] != sequence).sum(1, keepdim=True)
            return {"y": inputs["x"] + others}

    found = failures(Counting())
    assert set(found) == {4, 8}
    assert "in real row 0" in found[4]


@pytest.mark.parametrize("leak", [1e-3, 1.0])
def test_what_reaches_real_rows_is_still_found_beside_them(leak: float) -> None:
    found = failures(Recurrent(leak))
    assert set(found) == {4, 8}
    assert "what padding rows hold changes output 'y'" in found[4]


def test_an_output_without_columns_is_no_fault() -> None:
    manager = manager_of(
        lambda inputs: {"none": inputs["x"][:, :0], "y": inputs["x"] * 2}, max_batch=8
    )
    assert not manager.capture().failures
    assert manager.run({"x": floats(3)})["none"].shape == (3, 0)
