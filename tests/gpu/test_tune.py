"""Tuning on a real device: what it finds is what schedule auto then runs, and tokens stay the same."""

from dataclasses import replace

import pytest
import torch

from graphcap.buckets import BucketLadder
from graphcap.cli import main
from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.plan_files import read_plans
from graphcap.decode.prompts import Prompts
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import choose_backend
from graphcap.settings import Settings

pytest.importorskip("triton", minversion="3.2")

DTYPE = torch.float16  # of which fewer roundings turn a choice of experts than of bfloat16
CONTEXT = 64
PROMPTS = [[5, 7, 9, 11], [3, 450]]
NEAR_TIE = 0.1  # of the largest logit: what the tuner itself takes for another order of sums
SHAPE = replace(preset("tiny"), mlp_only_layers=()).with_layers(2)


def decoder_of(weights, kernels, schedule, tune_cache):
    decoder = Decoder(
        weights,
        kernels,
        max_batch=2,
        max_context=CONTEXT,
        ladder=BucketLadder([2]),
        settings=Settings(recorder="cuda", strict=True, tune_cache=tune_cache),
        schedule=schedule,
    )
    decoder.cache.fill_random(1)
    assert not decoder.manager.capture().failures
    decoder.cache.clear()
    return decoder


def plain_logits(weights, kernels, tokens):
    """Of the token after `tokens`, by the plain schedule."""
    cache = PagedCache(
        weights.shape, num_sequences=1, max_context=CONTEXT, device=weights.device, dtype=DTYPE
    )
    eager = EagerDecoder(weights, cache, kernels, schedule="plain")
    for batch in Prompts([tokens], 1, cache, weights.shape.vocab_size).batches():
        eager.load(batch)
        logits = eager.run()["logits"]
    return logits[0].float()


@pytest.mark.parametrize("candidate", ["fused", "apart"])
def test_auto_runs_what_was_tuned_and_decodes_the_same_tokens(device, tmp_path, candidate):
    from graphcap.decode.layer_plan import LayerPlan
    from graphcap.tuning.search import best_of
    from graphcap.tuning.tune import plan_file, tune

    weights = random_weights(SHAPE, device=device, dtype=DTYPE, seed=3)
    kernels = decode_kernels(choose_backend("triton", device))
    plan = LayerPlan(candidate, block=16, without_pdl=frozenset({"attend"}))

    def find(trials, deadline, show):
        best = best_of(trials, [LayerPlan("plain"), plan], show, turns=1)
        assert best is not None
        return plan, best[1]

    (seen,) = tune(weights, kernels, [(2, CONTEXT)], 60, find=find)
    failed = [row for row in seen.candidates if "failed" in row]
    assert not failed
    assert seen.bucket is not None
    assert {each["plan"].layers for each in seen.candidates} >= {"plain", candidate}
    assert 0 < seen.bucket.ms <= seen.bucket.plain_ms

    # Whichever is the faster on so small a model: it is this plan that the cache shall hold.
    file = plan_file(tmp_path / "none", SHAPE, DTYPE, device, None)
    path = tmp_path / file.key.file_name
    file.with_buckets([replace(seen.bucket, plan=plan)]).write(path)
    tokens = {}
    for schedule in ("auto", "plain"):
        decoder = decoder_of(weights, kernels, schedule, tmp_path)
        if schedule == "auto":
            choice = decoder.step.bucket_choice(2)
            assert (choice.source, choice.plan) == ("cache", plan)
            (bucket,) = decoder.manager.report.buckets
            assert bucket.choice == f"{candidate} (cache: {path}: tuned for 2 rows at context 64)"
            names = {row.operation for row in decoder.manager.recording(2).census().rows}
            assert "attend" in names
        tokens[schedule] = decoder.decode(PROMPTS, 24).token_ids
        decoder.close()
    for prompt, ours, theirs in zip(PROMPTS, tokens["auto"], tokens["plain"], strict=True):
        assert len(ours) == len(theirs) == 24
        differ = [at for at in range(24) if ours[at] != theirs[at]]
        if not differ:
            continue
        at = differ[0]  # from there on they are other sequences
        logits = plain_logits(weights, kernels, prompt + theirs[:at])
        lead = (logits.max() - logits[ours[at]]) / logits.abs().max()
        assert lead < NEAR_TIE, f"token {at}: {ours[at]} and not {theirs[at]}"


def test_the_command_writes_what_auto_reads(device, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path))
    # Compiling beforehand starts processes, which pays for more than this.
    monkeypatch.setattr("graphcap.cli.tune._compile", lambda *of: (0.0, ""))
    words = ["--shape", "tiny", "--batches", "1", "--contexts", "64", "--seconds", "5"]
    assert main(["tune", *words, "--dtype", "float16"]) == 0
    assert "plans tried" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    (bucket,) = read_plans(path).buckets
    assert bucket.rows == 1
    weights = random_weights(preset("tiny"), device=device, dtype=DTYPE, seed=0)
    kernels = decode_kernels(choose_backend("triton", device))
    decoder = decoder_of(weights, kernels, "auto", None)
    assert decoder.step.bucket_choice(1).source == "cache"
    assert decoder.step.bucket_choice(2).source == "default"
    decoder.close()
