"""Section: steps that ran eagerly and buckets without a recording, with reasons."""

from __future__ import annotations

from graphcap.page.run import Run
from graphcap.page.tables import Cell, absent, note, table
from graphcap.page.text import number

REASONS = {
    "above_max_batch": "more rows than the largest bucket: raise the maximum batch of the ladder",
    "mixed_above_max_tokens": "a prefill larger than the largest mixed recording: nothing to do, or lower "
    "max_num_batched_tokens",
    "cascade_attention": "many sequences share a long prefix: --disable-cascade-attn",
    "not_recorded": "the bucket could not be recorded: see its reason below",
    "verification": "the bucket differed from the eager step: see its reason below",
    "rank_failed": "the bucket failed on another tensor-parallel rank: see that rank's report",
    "stale_recording": "a weight or a cache is not where it was recorded: copy new weights in place, "
    "or restart",
    "inputs_moved": "the engine made new input buffers: restart, and report it",
    "long_sequence": "a sequence is longer than what is recorded: raise max_seq_len_to_capture",
    "other_inputs": "the engine gave the step other tensors than were recorded: report it",
}
"""Reason of a fallback -> when it happens and what to do."""


def fallbacks(run: Run) -> str:
    parts = []
    if run.fallbacks is None:
        parts.append(absent("steps that ran eagerly: it was written before the first."))
    elif not run.fallbacks:
        is_early = run.kind == "plugin" and not run.ended
        when = " until the report was written, when the capture ended" if is_early else ""
        parts.append(note(f"No step ran eagerly for want of a recording{when}."))
    else:
        rows: list[list[Cell]] = [
            [reason, REASONS.get(reason, "see the log"), number(steps)]
            for reason, steps in sorted(run.fallbacks.items(), key=lambda entry: -entry[1])
        ]
        parts.append(table(["reason", "when, and what to do", "steps"], rows, text_columns=2))
    failed: list[list[Cell]] = [
        [f"{r.kind} {size}" if len(run.recordings) > 1 else size, why]
        for r in run.recordings
        for size, why in r.failures.items()
    ]
    if failed:
        parts.append("<h3>Buckets without a recording</h3>")
        parts.append(table(["bucket", "why"], failed, text_columns=2))
    return "".join(parts)
