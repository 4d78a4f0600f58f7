"""The census counts calls, allocations and graph nodes."""

from __future__ import annotations

import json

from graphcap.census import Call, Census, CensusRow, GraphNode, KernelRow


def test_calls_are_grouped_by_operation_and_implementation():
    calls = [Call("norm", "torch"), Call("norm", "triton"), Call("mm", "torch", allocates=True)]
    census = Census.of([*calls, Call("norm", "triton")], allocations=2)
    assert census.rows[0] == CensusRow("norm", "triton", 2)
    assert set(census.rows[1:]) == {
        CensusRow("norm", "torch", 1),
        CensusRow("mm", "torch", 1, allocations=1),
    }
    assert census.total == 4
    assert census.allocations == 3
    assert census.nodes is None


def test_a_graph_counts_nodes_not_calls():
    kernel = GraphNode("kernel", "k", (1, 2, 3), (32, 1, 1))
    other = GraphNode("kernel", "k", (9, 1, 1), (32, 1, 1))
    census = Census.of(
        [Call("a", "x", nodes=2), Call("a", "x", nodes=2)],
        graph=iter([kernel, kernel, other, GraphNode("memcpy")]),
    )
    assert census.total == 4
    assert census.nodes == {"kernel": 3, "memcpy": 1}
    assert census.rows == (CensusRow("a", "x", 2, 4),)
    assert census.kernels == (
        KernelRow("k", (1, 2, 3), (32, 1, 1), 2),
        KernelRow("k", (9, 1, 1), (32, 1, 1), 1),
    )


def test_an_empty_graph_is_not_the_same_as_no_graph():
    assert Census.of([Call("a", "x", nodes=0)], graph=[]).total == 0
    assert Census.of([Call("a", "x")]).total == 1


def test_json_holds_everything():
    census = Census.of([Call("a", "x", True, 1)], graph=[GraphNode("kernel", "k", (1, 1, 1))])
    read = json.loads(json.dumps(census.to_json()))
    assert read["total"] == 1
    assert read["allocations"] == 1
    (row,) = read["rows"]
    assert row == {
        "operation": "a", "implementation": "x", "count": 1, "nodes": 1, "allocations": 1
    }  # fmt: skip
    assert read["kernels"][0]["name"] == "k"
