"""bench/speed.py on a CPU: what it writes, and that wrong tokens do not pass."""

from __future__ import annotations

import json
import time

import pytest
import torch
from bench_modules import plain_torch, speed, speed_check, speed_ways

from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import choose_backend
from graphcap.settings import Settings

SMALL = ["--device", "cpu", "--batches", "1,3", "--context", "20", "--check-rows", "3"]
SHORT = ["--long", "40", "--turns", "1", "--check-tokens", "6"]
QUICK = [*SMALL, *SHORT, "--many-batches", "3", "--compile-batches", "3"]
FEWER = [*SMALL, *SHORT, "--many-batches", "", "--compile-batches", ""]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
def test_the_whole_script(tmp_path, shape):
    out = tmp_path / "new" / "speed.json"
    # A hybrid is compiled by the tests of the ways below; several tokens by one call are as for tiny.
    quick = QUICK if shape == "tiny" else FEWER
    assert speed.main(["--shape", shape, *quick, "--commit", "abc", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["shape"], result["context"], result["machine"]["commit"]) == (shape, 20, "abc")
    assert [(row["batch"], row["context"]) for row in result["rows"]] == [(1, 20), (3, 20), (1, 40)]
    ways = [list(row["ways"]) for row in result["rows"]]
    three = ["eager", "torch graph", "graphcap"]
    compiled = ["torch.compile"] if shape == "tiny" else []
    assert ways == [three, [*three, *compiled], three]
    for row in result["rows"]:
        assert [way["timed"] for way in row["ways"].values()][:3] == [2, 5, 5]
        assert row["ways"]["graphcap"]["nodes"] > 50
    tokens = result["tokens"]
    assert tokens["ok"]
    assert (tokens["equal"], tokens["compared"]) == (18, 18)
    assert len(result["many"]) == (shape == "tiny")
    for many in result["many"]:
        assert (many["batch"], many["tokens"], many["loop"]) == (3, 32, False)
        assert many["notes"], "why there is no loop"
    assert result["left_out"] == [
        "CUDA graph of plain torch: no CUDA device, it runs eagerly",
    ]


def test_without_time_everything_left_out_is_named(tmp_path):
    out = tmp_path / "speed.json"
    assert speed.main(["--shape", "tiny", *QUICK, "--seconds", "0", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["rows"], result["many"]) == ([], [])
    assert result["left_out"][1:] == [
        "batch 1: no time left",
        "batch 3: no time left",
        "context 40: no time left",
        "run_many, batch 3: no time left",
    ]


def captured(weights, max_batch=2, context=48):
    kernels = decode_kernels(choose_backend("reference", torch.device("cpu")))
    settings = Settings(recorder="tape", verify="off")
    decoder = Decoder(weights, kernels, max_batch=max_batch, max_context=context, settings=settings)
    decoder.manager.capture()
    return decoder


@pytest.mark.parametrize("fault", ["none", "a weight", "NaN"])
def test_a_wrong_step_fails_the_check(fault):
    weights = random_weights(preset("tiny"), device="cpu", dtype=torch.float32, seed=0)
    decoder = captured(weights)
    if fault != "none":
        wrong = random_weights(preset("tiny"), device="cpu", dtype=torch.float32, seed=0)
        wrong.layers[2].mlp.down.mul_(1.01 if fault == "a weight" else float("nan"))
        decoder.weights = wrong  # of what it is held against
    with torch.no_grad():
        seen = speed_check.check_tokens(decoder, 2, 12)
    assert seen["ok"] == (fault == "none")


def test_a_token_that_is_not_nearly_tied_fails_the_check(monkeypatch):
    """Logits may be right and the token wrong."""
    decoder = captured(random_weights(preset("tiny"), device="cpu", dtype=torch.float32, seed=0))
    run = decoder.manager.run

    def another(batch=None):
        outputs = run(batch)
        return {**outputs, "token_ids": outputs["logits"].topk(2).indices[:, 1].int()}

    monkeypatch.setattr(decoder.manager, "run", another)
    with torch.no_grad():
        seen = speed_check.check_tokens(decoder, 2, 1)
    assert not seen["ok"]
    assert seen["error"] <= 2 * seen["plain_error"]
    assert seen["largest_lead"] > seen["lead_allowed"]


def test_a_wrong_step_is_the_exit_code(monkeypatch):
    monkeypatch.setattr(speed, "check_tokens", lambda *_: {"ok": False})
    few = ["--shape", "tiny", *QUICK, "--seconds", "0"]
    assert speed.main(few) == 1


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
@pytest.mark.parametrize("unit", [None, "step", "layer"])
def test_all_ways_do_the_same_work(shape, unit):
    """From one load, recorded and plain torch go through the same tokens, compiled torch too."""
    weights = random_weights(preset(shape), device="cpu", dtype=torch.float32, seed=0)
    decoder = captured(weights, max_batch=3, context=20 + speed_ways.HEADROOM)
    decoder.cache.fill_random(4)
    with torch.no_grad():
        load = speed_ways.Load(decoder.cache, weights.shape.vocab_size, 3, 20)
        if unit is None:
            way, plain = speed_ways.plain_way(weights, load, "gathered", torch.device("cpu"))
        else:
            plain = plain_torch.PlainStep(weights, 3, 20 + speed_ways.HEADROOM, experts="gathered")
            load.copy_to(plain)
            way = speed_ways.compiled_way(plain, load, unit, 60)
            load.copy_to(plain)  # compiling it ran it
        recorded = speed_ways.graphcap_way("graphcap", decoder, load, "plain")
        recorded.start()
        way.start()
        tokens = []
        for _ in range(recorded.timed):
            tokens.append(recorded.step()["token_ids"].tolist())
            way.step()
            assert plain.token_ids.tolist() == tokens[-1]
    assert len({token for row in tokens for token in row}) > 5


@pytest.mark.parametrize("unit", ["step", "layer"])
def test_compiling_ends_when_its_time_is_over(unit):
    weights = random_weights(preset("tiny"), device="cpu", dtype=torch.float32, seed=0)
    decoder = captured(weights, context=20 + speed_ways.HEADROOM)
    load = speed_ways.Load(decoder.cache, weights.shape.vocab_size, 2, 20)
    plain = plain_torch.PlainStep(weights, 2, 20 + speed_ways.HEADROOM, experts="gathered")
    with torch.no_grad(), pytest.raises(speed_ways.OutOfTimeError, match="not done after"):
        speed_ways.compiled_way(plain, load, unit, 0.05)
    assert all(isinstance(layer, plain_torch.PlainLayer) for layer in plain.layers)
    time.sleep(0.1)  # no alarm is left


def test_ways_are_timed_by_turns():
    order = []
    ways = [
        speed_ways.Way(
            name, lambda n=name: order.append(f"{n} start"), lambda n=name: order.append(n), 2
        )
        for name in ("a", "b")
    ]
    times = speed_ways.in_turn(ways, torch.device("cpu"), 3)
    assert order == ["a start", "a", "a", "b start", "b", "b"] * 3
    assert {name: len(found) for name, found in times.items()} == {"a": 6, "b": 6}
