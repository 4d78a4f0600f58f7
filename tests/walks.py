"""A step that writes the slots of its next step, and what it does in plain Python."""

from __future__ import annotations

from typing import Any

import torch

from graphcap.buckets import BucketLadder
from graphcap.inputs import PadPolicy, Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.ring import Ring, Stop
from graphcap.settings import Settings

MODULUS = 31
SLOTS = {
    "token": Slot((), torch.int32, PadPolicy.ZERO),
    "position": Slot((), torch.int64, PadPolicy.fill(-1)),
}
TOKENS = {"token": ((), torch.int32)}


class Walk:
    """Each row walks on its own: token, position -> (5 token + 3 position + 7) mod 31, position + 1."""

    def __init__(self) -> None:
        self.calls = 0
        self.fail_at: set[int] = set()

    def __call__(self, inputs: Any) -> dict[str, torch.Tensor]:
        self.calls += 1
        token, position = inputs["token"], inputs["position"]
        if token.shape[0] in self.fail_at and inputs["num_rows"].device.type == "cpu":
            torch.nonzero(token)
        sampled = (token * 5 + position.int() * 3 + 7) % MODULUS
        pair = torch.stack([sampled, position.int()], 1).float()
        token.copy_(sampled)
        position.add_(1)
        return {"token": sampled, "pair": pair, "even": sampled % 2 == 0}


def walk(token: int, position: int, steps: int) -> list[int]:
    tokens = []
    for _ in range(steps):
        token = (token * 5 + position * 3 + 7) % MODULUS
        position += 1
        tokens.append(token)
    return tokens


def walks(batch: dict[str, torch.Tensor], steps: int) -> list[list[int]]:
    """Row by row."""
    pairs = zip(batch["token"].tolist(), batch["position"].tolist(), strict=True)
    return [walk(token, position, steps) for token, position in pairs]


def batch_of(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return draw(rows, torch.Generator().manual_seed(seed))


def draw(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "token": torch.randint(MODULUS, (rows,), generator=generator).int(),
        "position": torch.randint(1000, (rows,), generator=generator),
    }


def walker(
    length: int = 8,
    *,
    stop: Stop | None = None,
    outputs: Any = TOKENS,
    device: str = "cpu",
    settings: Settings | None = None,
    **options: Any,
) -> CaptureManager:
    """A manager with buckets 2, 4 and 6 whose ring keeps `outputs`."""
    return CaptureManager(
        options.pop("step", None) or Walk(),
        StaticInputs(6, SLOTS, device),
        ladder=BucketLadder((2, 4), 6),
        settings=settings or Settings(),
        example=draw,
        ring=Ring(length, outputs, stop),
        **options,
    )


def counted(tokens: list[int], ends: tuple[int, ...]) -> int:
    """How many of the tokens belong to a row that one of `ends` ends."""
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
