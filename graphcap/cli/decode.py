"""``graphcap decode``: record a decode step, decode eagerly and by replay, compare, print a table."""

from __future__ import annotations

import argparse
import os
import random
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from graphcap.cli.options import (
    add_model,
    chosen_dtype,
    chosen_shape,
    default_device,
    positive,
    print_json,
    progress_bar,
    seed,
    settings_with,
)
from graphcap.errors import InputError, SettingsError

if TYPE_CHECKING:
    import torch

    from graphcap.decode.decoder import Decoded, Decoder, EagerDecoder
    from graphcap.decode.weights import ModelWeights
    from graphcap.report import ManagerStats

_TURNS = 3
_SMALL_BYTES = 64 * 2**20
_COUNTED = (
    3  # tokens for which there is room at least: what counts and times single steps needs them
)


@dataclass(frozen=True)
class Measured:
    """Figures of one way to decode, per token. None: this device cannot give it."""

    operations_per_token: int | None
    launches_per_token: float | None
    allocations_per_token: int
    host_us_per_token: float | None
    ms_per_token: float | None


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "decode",
        help="decode eagerly and by replay, check that tokens are equal, print a table",
        description="Records a decode step for every bucket, decodes the same prompts eagerly and by "
        "replay, and checks that the tokens are equal. Exit code 1 if they are not.",
    )
    add_model(parser, default_shape="tiny")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences (default 3)")
    parser.add_argument(
        "--max-batch", type=positive, default=8, metavar="N", help="end of the ladder (default 8)"
    )
    parser.add_argument(
        "--tokens", type=positive, default=32, metavar="N", help="new tokens each (default 32)"
    )
    parser.add_argument(
        "--prompt-ids",
        action="append",
        metavar="1,2,3",
        help="token ids of a prompt, once per sequence (default: drawn from the seed)",
    )
    parser.add_argument(
        "--tokens-per-launch",
        type=positive,
        default=1,
        metavar="N",
        help="tokens that one call decodes, in one graph launch where driver and torch allow (default 1)",
    )
    parser.add_argument("--recorder", choices=("auto", "cuda", "tape"))
    parser.add_argument(
        "--schedule",
        choices=("auto", "fused", "plain"),
        default="auto",
        help="how layers run: plain, operation by operation; fused, by fused Triton kernels; auto, each "
        "bucket as was measured by graphcap tune or for a packaged table, else by rule (default auto)",
    )
    parser.add_argument("--buckets", metavar="1,2,4", help="bucket sizes (default: auto)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N")
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="with --json: also run one step each way under the profiler, for graphcap report",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from graphcap.cli.counting import without_checks
    from graphcap.cli.timelines import timelines
    from graphcap.decode.cache import PagedCache
    from graphcap.decode.decoder import Decoder, EagerDecoder
    from graphcap.decode.kernels import decode_kernels
    from graphcap.decode.schedule import check_schedule
    from graphcap.moe.kernels import choose_backend
    from graphcap.moe.ranges import nvtx_ranges
    from graphcap.report import versions

    if options.timeline and not options.json:
        raise SettingsError(
            "--timeline is part of the JSON: add --json, and draw it by graphcap report"
        )
    settings = settings_with(recorder=options.recorder, buckets=options.buckets)
    device = default_device()
    backend = choose_backend(settings.kernels, device)
    kernels = decode_kernels(backend)
    check_schedule(options.schedule, kernels)
    shape = chosen_shape(options)
    prompts = _prompts(options, shape.vocab_size)
    longest = max(map(len, prompts)) + options.tokens
    if longest > shape.max_position_embeddings:
        raise InputError(
            f"{options.tokens} new tokens after a prompt of {max(map(len, prompts))} make {longest}, "
            f"and {shape.name} was made for {shape.max_position_embeddings} positions; "
            f"ask for fewer tokens"
        )
    room = longest + max(0, _COUNTED - options.tokens)
    weights = _weights(options, device)
    _share_cores(weights)
    sequences = max(options.max_batch, len(prompts))

    eager = EagerDecoder(
        weights,
        PagedCache(
            weights.shape,
            num_sequences=len(prompts),
            max_context=room,
            device=device,
            dtype=weights.dtype,
            format=kernels.cache_format,
        ),
        kernels,
        nvtx_ranges(settings),
        options.schedule,
        settings.tune_cache,
    )
    with progress_bar("decoding eagerly"):
        eager.decode(prompts, 2)  # compiles kernels, fills caches
    decoder = Decoder(
        weights,
        kernels,
        max_batch=options.max_batch,
        max_context=room,
        num_sequences=sequences,
        settings=settings,
        schedule=options.schedule,
        tokens_per_launch=options.tokens_per_launch,
    )
    try:
        with progress_bar("capturing") as progress:
            decoder.cache.fill_random(options.seed)
            decoder.manager.capture(progress)
            decoder.cache.clear()
        with progress_bar("decoding eagerly and by replay in turn") as progress:
            decoder.decode(prompts, 2)
            by_eager, by_replay = [], []
            for turn in range(_TURNS):  # in turn: a machine's pace changes, and both share it
                progress(turn, _TURNS, "")
                by_eager.append(eager.decode(prompts, options.tokens))
                by_replay.append(decoder.decode(prompts, options.tokens))
        served = decoder.manager.stats()
        with without_checks(decoder.manager):
            replay_figures = _replay_figures(decoder, prompts, by_replay)
            eager_figures = _eager_figures(eager, prompts, by_eager)
            timeline = timelines(eager, decoder, prompts) if options.timeline else None
        if replay_figures["launches_per_token"] is None:  # a fallback runs the eager step
            replay_figures["launches_per_token"] = eager_figures["launches_per_token"]
        result = {
            "shape": weights.shape.name,
            "layers": weights.shape.num_layers,
            "left_out": dict(weights.left_out),
            "dtype": str(weights.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "recorder": decoder.manager.recorder.name,
            "schedule": options.schedule,
            "kernels": {
                "backend": backend.name,
                "why": backend.why,
                "operations": [asdict(choice) for choice in decoder.step.kernel_choices],
            },
            "batch": len(prompts),
            "max_batch": options.max_batch,
            "bucket": decoder.manager.ladder.bucket_for(len(prompts)),
            "tokens": options.tokens,
            "tokens_per_launch": options.tokens_per_launch,
            "notes": list(decoder.manager.report.notes),
            "prompt_ids": prompts,
            "eager": eager_figures,
            "replay": replay_figures,
            "outputs_equal": all(
                decoded.token_ids == by_eager[0].token_ids for decoded in (*by_eager, *by_replay)
            ),
            "token_ids": by_replay[0].token_ids,
            "buckets": _buckets(decoder, served),
            "pool_mib": decoder.pool.nbytes / 2**20,
            "pool_lower_bound_mib": decoder.pool.plan.lower_bound / 2**20,
            "pool_layout": asdict(decoder.pool.layout),
            "capture_seconds": decoder.manager.report.seconds,
            "census": _census(decoder, len(prompts)),
            "fallbacks": dict(served.fallbacks),
            "served": served.served(),
            "failures": {str(k): v for k, v in served.failures.items()},
            "timeline": timeline,
            "versions": versions(),
        }
    finally:
        decoder.close()
    if options.json:
        print_json(result)
    else:
        from graphcap.cli.tables import print_decode

        print_decode(result)
    return 0 if result["outputs_equal"] else 1


def _prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    if options.prompt_ids is None:
        draw = random.Random(options.seed)
        return [
            [draw.randrange(vocab_size) for _ in range(draw.randint(3, 8))]
            for _ in range(options.batch or 3)
        ]
    if options.batch not in (None, len(options.prompt_ids)):
        raise SettingsError(
            f"--batch {options.batch} and {len(options.prompt_ids)} --prompt-ids do not go together; "
            f"leave --batch out or give one --prompt-ids per sequence"
        )
    prompts = []
    for text in options.prompt_ids:
        words = [word.strip() for word in text.split(",")]
        if not all(word.isascii() and word.isdigit() for word in words):
            raise InputError(
                f"--prompt-ids {text!r}: expected token ids separated by commas, such as 1,2,3"
            )
        prompts.append([int(word) for word in words])
        if max(prompts[-1]) >= vocab_size:
            raise InputError(
                f"--prompt-ids {text!r}: token id {max(prompts[-1])} is outside the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
    return prompts


def _weights(options: argparse.Namespace, device: torch.device) -> ModelWeights:
    from graphcap.decode.checkpoint import load_checkpoint
    from graphcap.decode.random_weights import random_weights

    if options.checkpoint:
        dtype = None if options.dtype == "auto" else chosen_dtype(options.dtype, device)
        with progress_bar("loading weights") as progress:
            return load_checkpoint(
                options.checkpoint,
                device=device,
                dtype=dtype,
                layers=options.layers,
                progress=lambda done, total: progress(done, total, ""),
            )
    with progress_bar("drawing weights") as progress:
        return random_weights(
            chosen_shape(options),
            device=device,
            dtype=chosen_dtype(options.dtype, device),
            seed=options.seed,
            progress=lambda done, total: progress(done, total, ""),
        )


def _share_cores(weights: ModelWeights) -> None:
    """One thread for a model whose operations are too small to be shared among cores: waiting for
    each other costs more than the work, many times more on a busy machine."""
    import torch

    small = weights.nbytes < _SMALL_BYTES
    if weights.device.type == "cpu" and small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _eager_figures(
    eager: EagerDecoder, prompts: list[list[int]], decoded: list[Decoded]
) -> dict[str, Any]:
    from graphcap.decode.decoder import Prompts
    from graphcap.decode.measure import activity
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


def _replay_figures(
    decoder: Decoder, prompts: list[list[int]], decoded: list[Decoded]
) -> dict[str, Any]:
    from graphcap.decode.decoder import Prompts
    from graphcap.decode.measure import activity, host_times

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


def _buckets(decoder: Decoder, served: ManagerStats) -> list[dict[str, Any]]:
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

    choice = decoder.step.bucket_choice(size)
    return {"source": choice.source, "why": choice.why, "plan": plan_to_json(choice.plan)}


def _census(decoder: Decoder, batch: int) -> dict[str, Any] | None:
    """What one replay launches for this batch; None where no recording serves it."""
    bucket = decoder.manager.ladder.bucket_for(batch)
    if bucket is None or not decoder.manager.serves(bucket):
        return None
    return decoder.manager.recording(bucket).census().to_json()


def _ms(runs: list[Decoded]) -> float | None:
    """Milliseconds a token: the median of the runs; None where none had a second token."""
    times = [run.seconds_per_token for run in runs if run.seconds_per_token is not None]
    return statistics.median(times) * 1e3 if times else None
