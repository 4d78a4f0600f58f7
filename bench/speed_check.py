"""Greedy tokens of a recorded step held against plain torch in a wider type.

The recorded step decodes on its own; plain torch is given the same tokens, once in a wider type (the
reference) and once in the model's (to learn how far rounding alone moves logits). A token other than
the reference's is allowed where the reference itself is nearly tied: where its logit leads the other's by
no more than rounding can move the two.
"""

from __future__ import annotations

from typing import Any

import torch
from plain_torch import PlainStep

from graphcap.decode.decoder import Decoder
from graphcap.decode.prompts import Prompts

_LENGTH = 8
WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def check_tokens(decoder: Decoder, rows: int, tokens: int) -> dict[str, Any]:
    """Decode `tokens` tokens of `rows` random prompts by replay, and compare.

    Returns:
        ``ok``: every differing token is a near-tie, and logits are on average at most twice as far from
        the reference as those of plain torch in the model's dtype. ``equal``: tokens equal to the
        reference's, of ``compared``; ``equal_until_parting``: of each row the first so many;
        ``largest_lead``: of the reference's logit over that of a token chosen instead, beside
        ``lead_allowed``; ``error``, ``plain_error``: distance of logits from the reference, root mean
        square.
    """
    weights, device = decoder.weights, decoder.weights.device
    vocab_size, dtype = weights.shape.vocab_size, weights.dtype
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(vocab_size, (rows, _LENGTH), generator=generator)
    room = _LENGTH + tokens
    reference = PlainStep(weights, rows, room, compute=WIDER[dtype], experts="gathered")
    plain = PlainStep(weights, rows, room, experts="gathered")
    laid = Prompts(prompts.tolist(), tokens, decoder.cache, vocab_size)
    try:
        seen = []
        given = prompts.to(device)
        *before, last = laid.batches()
        for position, batch in enumerate(before):
            decoder.manager.run(batch)
            for step in (reference, plain):
                step.token_ids.copy_(given[:, position])
                step()
        outputs, fed = decoder.manager.run(last), given[:, -1]
        for _ in range(tokens):
            for step in (reference, plain):
                step.token_ids.copy_(fed)
            fed = outputs["token_ids"].long()
            seen.append(_held(outputs["logits"], fed, reference(), plain()))
            outputs = decoder.manager.run()
    finally:
        laid.close()
    by_name = {name: torch.stack([one[name] for one in seen]).cpu() for name in seen[0]}
    equal, lead = by_name["equal"], by_name["lead"]
    error, plain_error = (
        float(by_name[name].square().mean().sqrt()) for name in ("error", "plain_error")
    )
    largest_lead, allowed = float(lead.max()), 2 * float(by_name["plain_most"].max())
    until = [int(row.cumprod(0).sum()) for row in equal.T.int()]
    return {
        "rows": rows,
        "tokens": tokens,
        "compared": equal.numel(),
        "equal": int(equal.sum()),
        "equal_until_parting": until,
        "distinct": int(by_name["token"].unique().numel()),
        "largest_lead": largest_lead,
        "lead_allowed": allowed,
        "error": error,
        "plain_error": plain_error,
        "reference": f"plain torch in {str(WIDER[dtype]).removeprefix('torch.')}",
        "ok": error <= 2 * plain_error and largest_lead <= allowed,
    }


def _held(
    logits: torch.Tensor, tokens: torch.Tensor, wide: torch.Tensor, plain: torch.Tensor
) -> dict[str, torch.Tensor]:
    """One step, by row: (M,) each."""
    best, wanted = wide.max(-1)
    plain_distance = (plain.to(wide.dtype) - wide).abs()
    return {
        "token": tokens.clone(),
        "equal": tokens == wanted,
        "lead": best - wide.gather(1, tokens[:, None])[:, 0],
        # Written so that NaN stays NaN: it then fails every comparison.
        "error": (logits.to(wide.dtype) - wide).square().mean(-1).sqrt(),
        "plain_error": plain_distance.square().mean(-1).sqrt(),
        "plain_most": plain_distance.amax(-1),
    }
