"""``graphcap decode``: record a decode step, decode eagerly and by replay, compare, print a table."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from graphcap.cli.decode_figures import (
    buckets,
    census,
    figures_of_eager,
    figures_of_replay,
)
from graphcap.cli.decode_inputs import chosen_prompts, chosen_weights, share_cores
from graphcap.cli.options import (
    add_model,
    chosen_shape,
    default_device,
    positive,
    print_json,
    progress_bar,
    seed,
    settings_with,
)
from graphcap.errors import InputError, SettingsError

_TURNS = 3
_COUNTED = (
    3  # tokens for which there is room at least: what counts and times single steps needs them
)


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
        help="how layers run: plain, operation by operation; fused, by fused Triton kernels; auto, each "
        "bucket as was measured by graphcap tune or for a packaged table, else by rule (default: "
        "GRAPHCAP_SCHEDULE, which is auto)",
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
    options.schedule = options.schedule or settings.schedule
    device = default_device()
    backend = choose_backend(settings.kernels, device)
    kernels = decode_kernels(backend)
    check_schedule(options.schedule, kernels)
    shape = chosen_shape(options)
    prompts = chosen_prompts(options, shape.vocab_size)
    longest = max(map(len, prompts)) + options.tokens
    if longest > shape.max_position_embeddings:
        raise InputError(
            f"{options.tokens} new tokens after a prompt of {max(map(len, prompts))} make {longest}, "
            f"and {shape.name} was made for {shape.max_position_embeddings} positions; "
            f"ask for fewer tokens"
        )
    room = longest + max(0, _COUNTED - options.tokens)
    weights = chosen_weights(options, device)
    share_cores(weights)
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
            replay_figures = figures_of_replay(decoder, prompts, by_replay)
            eager_figures = figures_of_eager(eager, prompts, by_eager)
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
            "buckets": buckets(decoder, served),
            "pool_mib": decoder.pool.nbytes / 2**20,
            "pool_lower_bound_mib": decoder.pool.plan.lower_bound / 2**20,
            "pool_layout": asdict(decoder.pool.layout),
            "capture_seconds": decoder.manager.report.seconds,
            "census": census(decoder, len(prompts)),
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
