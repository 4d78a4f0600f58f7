"""What ``graphcap decode`` measures: a token by either way, and what the buckets are and have served."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphcap.decode.decoder import Decoded, Decoder, EagerDecoder
    from graphcap.decode.plan_choice import PlanChoice
    from graphcap.report import ManagerStats


@dataclass(frozen=True)
class Measured:
    """Figures of one way to decode, per token. None: this device cannot give it."""

    operations_per_token: int | None
    launches_per_token: float | None
    allocations_per_token: int
    host_us_per_token: float | None
    ms_per_token: float | None


def figures_of_eager(
    eager: EagerDecoder, prompts: list[list[int]], decoded: list[Decoded]
) -> dict[str, Any]:
    """`Measured` of one eager step; `decoded`: runs, for the time."""
    from graphcap.decode.measure import activity
    from graphcap.decode.prompts import Prompts
    from graphcap.recorders.tape import count_step

    device = eager.step.weights.device
    laid = Prompts(prompts, 2, eager.cache, eager.step.weights.shape.vocab_size)
    try:
        for batch in laid.batches():
            eager.load(batch)
        if device.type == "cuda":
            seen = activity(eager.run, device)
            counts = (seen.operations, seen.launches, seen.allocations)
        else:
            before = eager.pool.allocations
            census = count_step(eager.run, device)
            requests = eager.pool.allocations - before
            counts = (census.total, census.total, census.allocations + requests)
    finally:
        laid.close()
    figures = asdict(Measured(*counts, None, _ms(decoded)))
    del figures["host_us_per_token"]
    return figures


def figures_of_replay(
    decoder: Decoder, prompts: list[list[int]], decoded: list[Decoded]
) -> dict[str, Any]:
    """`Measured` of one call of the manager; launches are None where only eager steps were seen."""
    from graphcap.decode.measure import activity, host_times
    from graphcap.decode.prompts import Prompts

    manager, device = decoder.manager, decoder.weights.device
    laid = Prompts(prompts, 2, decoder.cache, decoder.weights.shape.vocab_size)
    host: float | None = None
    launches: float | None = None
    at_once = decoder.tokens_per_launch

    def call() -> object:
        return manager.run() if at_once == 1 else manager.run_many(at_once)

    try:
        for batch in laid.batches():
            manager.run(batch)
        before, requests = manager.stats(), decoder.pool.allocations
        if device.type == "cuda":
            # Before the profiler, which stays attached and makes every later launch slower.
            host = host_times(call, device).queued / at_once
            seen = activity(call, device)
            # A loop is launched by the driver itself, which the profiler may not report.
            unseen = manager.loops(manager.ladder.bucket_for(len(prompts)) or 0) and not any(
                "GraphLaunch" in name for name in seen.calls
            )
            launches = _each(seen.launches + unseen, at_once)
            allocations = seen.allocations
        else:
            call()
            after = manager.stats()
            allocations = decoder.pool.allocations - requests
            if after.replays > before.replays:
                bucket = manager.ladder.bucket_for(len(prompts))
                assert bucket is not None
                # Steps on the tape are enqueued one by one, whatever the number of calls.
                made = after.replays - before.replays
                made += after.input_launches - before.input_launches
                launches = _each(made, at_once)
                allocations += manager.recording(bucket).census().allocations
    finally:
        laid.close()
    figures = asdict(Measured(None, launches, allocations, host, _ms(decoded)))
    del figures["operations_per_token"]
    return figures


def _each(count: int, tokens: int) -> float:
    """`count` of so many tokens, for each of them; an integer where it is whole."""
    return count // tokens if count % tokens == 0 else count / tokens


def buckets(decoder: Decoder, served: ManagerStats) -> list[dict[str, Any]]:
    """Of each bucket what its recording took, how its layers run and what it has served."""
    counts = {bucket.size: bucket for bucket in served.buckets}
    return [
        {
            "size": bucket.size,
            "nodes": bucket.nodes,
            "mib": bucket.nbytes / 2**20,
            "capture_ms": bucket.capture_ms,
            "replay_ms": bucket.replay_ms,
            "schedule": _schedule(decoder, bucket.size),
            "replays": counts[bucket.size].replays,
            "padding_rows": counts[bucket.size].padding_rows,
            "largest_difference": bucket.largest_difference,
        }
        for bucket in decoder.manager.report.buckets
    ]


def _schedule(decoder: Decoder, size: int) -> dict[str, Any]:
    """How the layers of a bucket run, and why."""
    from graphcap.decode.plan_json import plan_to_json

    def plain(choice: PlanChoice) -> dict[str, Any]:
        found = {
            "source": choice.source,
            "why": choice.why,
            "plan": plan_to_json(choice.plan),
        }
        return found if choice.experts is None else {**found, "experts": plain(choice.experts)}

    return plain(decoder.step.bucket_choice(size))


def census(decoder: Decoder, batch: int) -> dict[str, Any] | None:
    """What one replay launches for this batch; None where no recording serves it."""
    bucket = decoder.manager.ladder.bucket_for(batch)
    if bucket is None or not decoder.manager.serves(bucket):
        return None
    return decoder.manager.recording(bucket).census().to_json()


def _ms(runs: list[Decoded]) -> float | None:
    """Milliseconds a token: the median of the runs; None where none had a second token."""
    times = [run.seconds_per_token for run in runs if run.seconds_per_token is not None]
    return statistics.median(times) * 1e3 if times else None
