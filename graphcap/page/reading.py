"""Reads a report of any kind into a `Run`. Unknown fields are ignored, missing ones may be None."""

from __future__ import annotations

from graphcap.page.fields import Field, parse
from graphcap.page.parts import (
    optional_count,
    optional_number,
    optional_text,
    read_buckets,
    read_census,
    read_counts,
    read_failures,
    read_layout,
    read_timeline,
)
from graphcap.page.run import Census, Pool, Recordings, Run, Way


def read_run(content: bytes, source: str) -> Run:
    """The run in the file `content`, called `source` in messages and on the page.

    Raises:
        InputError: it is not JSON or not a report, or a field of it is wrong; names the field.
    """
    field = parse(content, source)
    if "host" in field and "managers" in field:
        return _plugin(field, source)
    if "eager" in field and "replay" in field:
        return _decode(field, source)
    if "recorder" in field and "pool_bytes" in field:
        return _capture(field, source)
    raise field.wrong("the report of a decode, of a capture or of the vLLM plugin")


def _decode(field: Field, source: str) -> Run:
    eager, replay = field["eager"], field["replay"]
    recorder, batch = field["recorder"].text(), field["batch"].count()
    bucket = optional_count(field, "bucket")
    recordings = Recordings(
        "decode",
        "sequences",
        read_buckets(field),
        read_failures(field["failures"]),
        read_census(field.get("census")),
    )
    serves = any(recorded.size == bucket for recorded in recordings.buckets)
    layers, device = field["layers"].count(), field["device"].text()
    kernels, timeline = field["kernels"], field.get("timeline")
    seconds = optional_number(field, "capture_seconds")
    served_by = f"bucket {bucket}" if serves else "no recording serves it"
    lower = optional_number(field, "pool_lower_bound_mib")
    return Run(
        kind="decode",
        source=source,
        title=f"{field['shape'].text()}, batch {batch} on {device}",
        facts=(
            ("shape", f"{field['shape'].text()}, {layers} layers, {field['dtype'].text()}"),
            ("batch", f"{batch} of at most {field['max_batch'].count()} ({served_by})"),
            ("device", device),
            ("recorder", recorder),
            ("kernels", f"{kernels['backend'].text()} ({kernels['why'].text()})"),
            ("tokens", f"{field['tokens'].count()} for each sequence"),
            *([("capture", f"{seconds:.2f} s")] if seconds is not None else []),
            *_versions(field),
        ),
        before=_way("eager", eager),
        after=_way(f"replay ({recorder})" if serves else "eager fallback", replay),
        equal=field["outputs_equal"].flag(),
        recordings=(recordings,),
        pool=Pool(
            _bytes(field["pool_mib"].number()),
            None if lower is None else _bytes(lower),
            read_layout(field.get("pool_layout")),
        ),
        fallbacks=read_counts(field["fallbacks"]),
        layers=layers,
        eager=None if timeline is None else read_timeline(timeline.get("eager")),
        replayed=None if timeline is None else read_timeline(timeline.get("replay")),
    )


def _capture(field: Field, source: str) -> Run:
    served = field.get("served")
    recordings = _manager("decode", field, served)
    recorder = field["recorder"].text()
    return Run(
        kind="capture",
        source=source,
        title=f"capture on {field['device'].text()}",
        facts=(
            ("device", field["device"].text()),
            ("recorder", recorder),
            ("capture", f"{field['seconds'].number():.2f} s"),
            *_versions(field),
        ),
        before=_recorded(recordings.census),
        after=_replayed(recorder, recordings),
        equal=None,
        recordings=(recordings,),
        pool=_pool(field),
        fallbacks=None if served is None else read_counts(served["fallbacks"]),
        notes=tuple(note.text() for note in field["notes"].list()),
    )


def _plugin(field: Field, source: str) -> Run:
    managers = dict(field["managers"].items())
    if "decode" not in managers or not managers.keys() <= {"decode", "mixed"}:
        raise field["managers"].wrong("an object with 'decode', and 'mixed' where it is recorded")
    decode = managers.pop("decode")
    served = field.get("served")  # decode steps only
    recordings = [_manager("decode", decode, served)]
    recordings += [_manager(kind, manager) for kind, manager in managers.items()]
    recorder, device = decode["recorder"].text(), decode["device"].text()
    choice = field["choice"]
    seconds = sum(m["seconds"].number() for m in (decode, *managers.values()))
    moe = "; ".join(f"{count} layers: {what}" for what, count in _counted(field["moe_layers"]))
    chosen = ", ".join(item.text() for item in choice["chosen"].list())
    left = ", ".join(item.text() for item in choice["left_alone"].list())
    notes = [note.text() for note in field["notes"].list()]
    notes += [note.text() for m in (decode, *managers.values()) for note in m["notes"].list()]
    breaks = field["breaks"].count()
    return Run(
        kind="plugin",
        source=source,
        title=f"vLLM {field['vllm'].text()} on {device}",
        facts=(
            ("vLLM", f"{field['vllm'].text()}, rank {field['rank'].count()}"),
            ("device", device),
            ("recorder", recorder),
            ("mixed batches", choice["mixed"].text()),
            *([("set by graphcap", chosen)] if chosen else []),
            *([("left alone", left)] if left else []),
            *([("MoE layers", moe)] if moe else []),
            ("capture", f"{seconds:.2f} s"),
            *_versions(decode),
        ),
        before=_recorded(recordings[0].census),
        after=_replayed(recorder, recordings[0], breaks),
        equal=None,
        recordings=tuple(recordings),
        pool=_pool(decode),
        fallbacks=read_counts((field if served is None else served)["fallbacks"]),
        ended=served is not None,
        notes=tuple(dict.fromkeys(notes)),
    )


def _manager(kind: str, field: Field, served: Field | None = None) -> Recordings:
    return Recordings(
        kind,
        "tokens" if kind == "mixed" else "rows",
        read_buckets(field, served),
        read_failures(field["failures"]),
        read_census(field.get("census")),
    )


def _way(name: str, field: Field) -> Way:
    return Way(
        name,
        optional_count(field, "launches_per_token"),
        optional_count(field, "operations_per_token"),
        optional_count(field, "allocations_per_token"),
        optional_number(field, "host_us_per_token"),
        optional_number(field, "ms_per_token"),
    )


def _recorded(census: Census | None) -> Way | None:
    """The eager step of a capture, of which the recording shows the operations and nothing else."""
    return None if census is None else Way("operations of the step", census.total, census.total)


def _replayed(recorder: str, recordings: Recordings, breaks: int = 0) -> Way | None:
    if not recordings.buckets:
        return None
    name = f"replay ({recorder}" + (f", of which {breaks} operations run live)" if breaks else ")")
    return Way(name, 1)


def _pool(field: Field) -> Pool:
    lower = optional_count(field, "pool_lower_bound_bytes")
    return Pool(field["pool_bytes"].count(), lower, read_layout(field.get("pool_layout")))


def _versions(field: Field) -> list[tuple[str, str]]:
    versions = field.get("versions")
    if versions is None:
        return []
    named = [(name, optional_text(versions, name)) for name, _ in versions.items()]
    return [("versions", ", ".join(f"{name} {text}" for name, text in named if text))]


def _counted(field: Field) -> list[tuple[str, int]]:
    return [(what, count.count()) for what, count in field.items()]


def _bytes(mib: float) -> int:
    return round(mib * 2**20)
