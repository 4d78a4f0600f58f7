"""``graphcap decode --timeline``: one step eagerly and one by replay, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphcap.decode.cache import PagedCache
    from graphcap.decode.decoder import Decoder, EagerDecoder
    from graphcap.decode.timeline import Timeline

_TOKENS = 3  # the first of each prompt, and at most two steps


def timelines(
    eager: EagerDecoder, decoder: Decoder, prompts: list[list[int]]
) -> dict[str, dict[str, Any] | None]:
    """Timelines of the step that follows the prompts. Comes after everything that is timed: a profiler
    stays attached and makes later launches slower.

    Returns:
        ``eager`` and ``replay`` -> `Timeline` as plain values; ``replay`` is None where no recording
        serves so many prompts.
    """
    from graphcap.decode.timeline import profiled, timed

    device = decoder.weights.device

    def bring_eagerly(batch: Any) -> None:
        eager.load(batch)
        eager.run()

    with _brought(prompts, eager.cache, decoder, bring_eagerly):
        by_eager = profiled(eager.run, device) if device.type == "cuda" else timed(eager.run)
    bucket = decoder.manager.ladder.bucket_for(len(prompts))
    if bucket is None or not decoder.manager.serves(bucket):
        return {"eager": asdict(by_eager), "replay": None}
    with _brought(prompts, decoder.cache, decoder, decoder.manager.run):
        by_replay = _replayed(decoder, bucket)
    return {"eager": asdict(by_eager), "replay": asdict(by_replay)}


def _replayed(decoder: Decoder, bucket: int) -> Timeline:
    from graphcap.decode.timeline import of_times, profiled
    from graphcap.recorders.tape import TapeRecording

    device = decoder.weights.device
    if device.type == "cuda":
        return profiled(decoder.manager.run, device)
    recording = decoder.manager.recording(bucket)
    assert isinstance(recording, TapeRecording)  # there is no other on a CPU
    return of_times(recording.timed_replay())


@contextmanager
def _brought(
    prompts: list[list[int]],
    cache: PagedCache,
    decoder: Decoder,
    bring: Callable[[Any], object],
) -> Iterator[None]:
    """Inside, the prompts have been read and the next step may follow."""
    from graphcap.decode.prompts import Prompts

    laid = Prompts(prompts, _TOKENS, cache, decoder.weights.shape.vocab_size)
    try:
        for batch in laid.batches():
            bring(batch)
        yield
    finally:
        laid.close()
