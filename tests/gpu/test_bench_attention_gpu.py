"""bench/attention.py on a device: graphs, their operations, and that graphcap's way is right in them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))


@pytest.mark.parametrize(("shape", "contexts"), [("tiny", [17, 300]), ("seed-64", [4096])])
def test_attention_is_right_in_graphs_and_two_operations_a_layer(tmp_path, shape, contexts):
    import attention

    out = tmp_path / "attention.json"
    arguments = ["--shape", shape, "--contexts", ",".join(map(str, contexts)), "--batches", "1,3"]
    short = ["--layers", "4", "--rounds", "2", "--replays", "3", "--out", str(out)]
    assert attention.main([*arguments, *short]) == 0
    result = json.loads(out.read_text())
    assert result["wrong"] == result["left_out"] == []
    assert "graphcap" not in result["unavailable"], result["unavailable"]
    assert result["evicted_by_mib"] == 4 * result["l2_mib"] > 0
    loads = [(row["batch"], row["context"]) for row in result["rows"]]
    assert loads == [(rows, context) for rows in (1, 3) for context in contexts]
    for row in result["rows"]:
        assert {"graphcap", "sdpa"} <= set(row["ways"])
        assert row["ways"]["graphcap"]["operations"] == 2
        for way in row["ways"].values():
            assert 0 < way["off_by"] <= result["tolerance"]
            assert 0 < way["low_us"] <= way["us"] <= way["high_us"]
            assert way["projection_us"] > 0
