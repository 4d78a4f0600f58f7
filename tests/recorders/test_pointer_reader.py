"""PointerReader on parameter blocks in memory: which words of which nodes are taken, and what is not read."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pointer_fakes import CUmemorytype, GraphDriver, ints, words

from graphcap.errors import BackendError
from graphcap.live_memory import Range
from graphcap.pointer_check import DriverRange
from graphcap.recorders.graph_pointers import PointerReader

A, B, C = 0x7F0000000000, 0x7F0000010000, 0x7F0000020008


def read(driver, *nodes):
    return PointerReader(driver).read(list(nodes))


def taken(found):
    return [(w.node, w.argument, w.offset, w.size, w.address) for w in found.words]


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("kept", [{}, {"packed": True}, {"scattered": True}], ids=str)
def test_each_parameter_is_read_where_the_driver_says_it_lies(library, kept):
    driver = GraphDriver()
    node = driver.kernel(
        "add", words(A), ints(7), words(B), words(3, C, A), library=library, **kept
    )
    found = read(driver, node)
    assert taken(found) == [(0, 0, 0, 8, A), (0, 2, 0, 8, B), (0, 3, 8, 24, C), (0, 3, 16, 24, A)]
    assert [(n.path, n.what) for n in found.nodes] == [("0", "kernel add")]
    assert (found.total, dict(found.unread)) == (1, {})


def test_words_are_taken_where_an_address_may_lie_and_nowhere_else():
    driver = GraphDriver()
    # A structure of 4-byte fields at offset 4: its bytes 4 to 12 are at a multiple of eight.
    data = ints(1) + words(A) + ints(2)
    node = driver.kernel("odd", ints(9), data, offsets=[0, 4])
    assert taken(read(driver, node)) == [(0, 1, 4, 16, A)]
    node = driver.kernel("odd", ints(9), data, offsets=[0, 4], scattered=True)
    assert taken(read(driver, node)) == [(0, 1, 4, 16, A)]
    # At offset 8 the same address is across two words, where no compiler puts one.
    node = driver.kernel("packed", data, offsets=[8])
    assert A not in [w.address for w in read(driver, node).words]
    small = driver.kernel("small", words(0), words(4096), words(2**60), words(2**64 - 1), ints(-1))
    assert taken(read(driver, small)) == []


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), max_size=6), st.data())
def test_no_address_of_any_parameter_is_missed(values, data):
    driver = GraphDriver()
    scattered = data.draw(st.booleans())
    node = driver.kernel("any", *(words(*parameter) for parameter in values), scattered=scattered)
    expected = [
        (0, index, turn * 8, 8 * len(parameter), value)
        for index, parameter in enumerate(values)
        for turn, value in enumerate(parameter)
        if 2**20 <= value < 2**57
    ]
    assert taken(read(driver, node)) == expected


def test_copies_and_memsets_give_their_first_byte_and_their_last():
    driver = GraphDriver()
    flat = driver.copy(A, B, 100)
    deep = driver.copy(
        A,
        B,
        10,
        Height=3,
        Depth=2,
        srcPitch=64,
        srcHeight=4,
        srcXInBytes=5,
        srcY=1,
        dstPitch=10,
        dstHeight=3,
    )
    found = read(
        driver, flat, deep, driver.memset(A, 4, element=2, height=3, pitch=32), driver.memset(B, 1)
    )
    assert taken(found) == [
        (0, "source", 0, 8, A),
        (0, "end of the source", 99, 8, A + 99),
        (0, "target", 0, 8, B),
        (0, "end of the target", 99, 8, B + 99),
        (1, "source", 0, 8, A + 5 + 64),
        (1, "end of the source", 256 + 2 * 64 + 9, 8, A + 5 + 64 + 256 + 2 * 64 + 9),
        (1, "target", 0, 8, B),
        (1, "end of the target", 59, 8, B + 30 + 20 + 9),
        (2, "target", 0, 8, A),
        (2, "end of the target", 71, 8, A + 64 + 7),
        (3, "target", 0, 8, B),
    ]
    assert [n.what for n in found.nodes] == ["memcpy", "memcpy", "memset", "memset"]


def test_the_host_side_of_a_copy_is_its_host_address():
    found = read(GraphDriver(), GraphDriver.copy(A, B, 1, host=True))
    assert [w.address for w in found.words] == [A, B]


def test_nodes_of_child_graphs_are_read_and_memory_that_the_graph_allocates_is_its_own():
    driver = GraphDriver()
    inner = driver.child(driver.memset(A, 1), driver.child(driver.kernel("deep", words(B))))
    found = read(driver, driver.other("EMPTY"), inner, driver.alloc(C, 64), driver.other("HOST"))
    assert [(n.path, n.what) for n in found.nodes] == [("1.0", "memset"), ("1.1.0", "kernel deep")]
    assert found.own == [Range(C, C + 64)]
    assert (found.total, dict(found.unread)) == (3, {})


def test_a_graph_of_nothing():
    found = read(GraphDriver())
    assert (found.total, found.words) == (0, [])


def test_what_cannot_be_read_is_counted_with_the_reason():
    driver = GraphDriver()
    good = driver.memset(A, 1)
    bad = driver.kernel("bad", words(A))
    driver.fails = {"cuFuncGetParamInfo"}
    found = read(driver, bad, good, driver.other("CONDITIONAL"), bad)
    assert found.total == 4
    assert [w.address for w in found.words] == [A]
    assert dict(found.unread) == {
        "cuFuncGetParamInfo failed: CUresult.CUDA_ERROR_NOT_SUPPORTED": 2,
        "nodes of kind conditional are not read": 1,
    }


def test_older_bindings_and_drivers_are_named():
    class Older(GraphDriver):
        cuFuncGetParamInfo = None  # type: ignore[assignment]

    driver = Older()
    (why,) = read(driver, driver.kernel("k", words(A))).unread
    assert why == "this cuda-bindings has no cuFuncGetParamInfo; install 12.4 or later"

    class OlderDriver(GraphDriver):
        def cuFuncGetParamInfo(self, *_):
            raise RuntimeError('Function "cuFuncGetParamInfo" not found')

    driver = OlderDriver()
    (why,) = read(driver, driver.kernel("k", words(A))).unread
    assert "this driver has no cuFuncGetParamInfo: Function" in why


def test_a_kernel_whose_parameters_are_nowhere_is_not_read():
    driver = GraphDriver()
    node = driver.kernel("lost", words(A))
    node.params.kernelParams = 0
    silent = driver.kernel("silent", words(A))
    driver._kernels[silent.params.func] = (b"silent", [])
    found = read(driver, node, silent, driver.kernel("none"))
    assert found.words == []
    assert list(found.unread) == [
        "a kernel node has no parameters, its kernel has",
        "the driver names no parameters of a kernel that was given some",
    ]


def test_a_graph_whose_nodes_cannot_be_listed_is_an_error():
    driver = GraphDriver()
    driver.fails = {"cuGraphGetNodes"}
    with pytest.raises(BackendError, match="cuGraphGetNodes failed"):
        read(driver, driver.memset(A, 1))


def test_a_kernel_is_described_once_per_graph():
    driver = GraphDriver()
    node = driver.kernel("k", words(A), words(B))
    reader = PointerReader(driver)
    reader.read([node] * 50)
    assert (driver.calls["cuFuncGetName"], driver.calls["cuFuncGetParamInfo"]) == (1, 2)
    reader.read([node])  # a later graph may have another kernel under the handle
    assert driver.calls["cuFuncGetName"] == 2


def test_the_driver_says_whose_an_address_is():
    driver = GraphDriver()
    driver.known = [
        (A, A + 100, CUmemorytype.CU_MEMORYTYPE_DEVICE),
        (B, B + 10, CUmemorytype.CU_MEMORYTYPE_HOST),
    ]
    reader = PointerReader(driver)
    assert reader.range_of(A + 99) == DriverRange(A, A + 100, False)
    assert reader.range_of(B) == DriverRange(B, B + 10, True)
    assert reader.range_of(A + 100) is None


def test_long_names_are_cut():
    driver = GraphDriver()
    (node,) = read(driver, driver.kernel("x" * 500, words(A))).nodes
    assert len(node.what) < 200


def test_the_bindings_have_every_name_that_is_used():
    driver = pytest.importorskip("cuda.bindings.driver")
    for call in (
        "cuGraphGetNodes",
        "cuGraphNodeGetType",
        "cuGraphChildGraphNodeGetGraph",
        "cuGraphKernelNodeGetParams",
        "cuGraphMemcpyNodeGetParams",
        "cuGraphMemsetNodeGetParams",
        "cuGraphMemAllocNodeGetParams",
        "cuFuncGetName",
        "cuKernelGetName",
        "cuFuncGetParamInfo",
        "cuKernelGetParamInfo",
        "cuPointerGetAttributes",
    ):
        assert callable(getattr(driver, call)), call
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    assert int(params.func) == int(params.kern) == 0
    assert int(params.kernelParams or 0) == int(params.extra or 0) == 0
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice = driver.CUdeviceptr(A)
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.dstHost = B
    copy.WidthInBytes, copy.Height, copy.Depth = 4, 1, 1
    memset = driver.CUDA_MEMSET_NODE_PARAMS()
    memset.dst, memset.width, memset.elementSize, memset.height = driver.CUdeviceptr(A), 3, 2, 1
    fake = GraphDriver()
    copied, cleared = fake.copy(0, 0, 0), fake.memset(0, 0)
    copied.params, cleared.params = copy, memset
    fake.CUmemorytype = driver.CUmemorytype  # type: ignore[misc,assignment]
    found = PointerReader(fake).read([copied, cleared])
    assert [w.address for w in found.words] == [A, A + 3, B, B + 3, A, A + 5]
    assert struct.calcsize("Q") == 8
    # What PointerReader reads the kinds of nodes and of memory from.
    real = PointerReader(driver)
    kinds = set(real._kind_names.values())
    assert {"kernel", "memcpy", "memset", "host", "graph", "empty", "mem_alloc"} <= kinds
    attributes = driver.CUpointer_attribute
    assert attributes.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    assert attributes.CU_POINTER_ATTRIBUTE_RANGE_SIZE
    assert attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert driver.CUresult.CUDA_ERROR_INVALID_VALUE
