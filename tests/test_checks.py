"""A rebound, moved or resized tensor is found and named; a copy in place is not a change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphcap.checks import Fingerprint, compare
from graphcap.errors import StaleRecordingError, VerificationError
from graphcap.reachable import reachable

GLOBAL_WEIGHT = torch.ones(3)


@pytest.fixture
def watch() -> Iterator[Callable[..., Fingerprint]]:
    made: list[Fingerprint] = []

    def make(step: Callable[..., Any], **extra: torch.Tensor) -> Fingerprint:
        made.append(Fingerprint(step, extra, reachable(step)))
        return made[-1]

    yield make
    for fingerprint in made:
        fingerprint.close()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self._table = torch.ones(3)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale * self._table


class Base:
    __slots__ = ("weights",)


class Owner(Base):
    __slots__ = ("named",)

    def __init__(self) -> None:
        self.weights = [torch.ones(3), torch.ones(3)]
        self.named = {"w": torch.ones(3)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weights[0] * self.named["w"] * GLOBAL_WEIGHT


def assign(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)


def check(fingerprint: Fingerprint, times: int) -> None:
    for _ in range(times):
        fingerprint.check()


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "parameter rebound": (
        Layer,
        lambda m: assign(m.linear, "weight", torch.nn.Parameter(torch.zeros(3, 3))),
        "linear.weight is another tensor",
    ),
    "parameter data swapped": (
        Layer,
        lambda m: assign(m.linear.weight, "data", torch.zeros(3, 3)),
        "linear.weight has moved",
    ),
    "parameter resized": (
        Layer,
        lambda m: m.scale.resize_(1000),
        "scale has moved",
    ),
    "parameter deleted": (Layer, lambda m: delattr(m.linear, "bias"), "linear.bias is another"),
    "buffer rebound": (Layer, lambda m: assign(m, "scale", torch.ones(3)), "scale is another"),
    "private tensor rebound": (Layer, lambda m: assign(m, "_table", torch.ones(3)), "_table is"),
    "module replaced": (
        Layer,
        lambda m: assign(m, "linear", torch.nn.Linear(3, 3)),
        "linear is another object",
    ),
    "module in a list replaced": (
        Layer,
        lambda m: m.blocks.__setitem__(0, torch.nn.Linear(3, 3)),
        "blocks.0 is another object",
    ),
    "list entry": (Owner, lambda o: o.weights.__setitem__(1, torch.ones(3)), "weights[1] is"),
    "list shortened": (Owner, lambda o: o.weights.pop(), "weights[1] is"),
    "list replaced": (Owner, lambda o: assign(o, "weights", list(o.weights)), "weights is another"),
    "dict entry": (Owner, lambda o: o.named.pop("w"), "named['w'] is"),
    "dict replaced": (Owner, lambda o: assign(o, "named", {}), "named is another object"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_change_is_named(what: str, watch: Callable[..., Fingerprint]):
    make, change, words = CHANGES[what]
    step = make()
    fingerprint = watch(step)
    fingerprint.check()
    change(step)
    for _ in range(2):  # it stays wrong
        with pytest.raises(StaleRecordingError) as caught:
            fingerprint.check()
        assert words in str(caught.value)
        assert "copy_" in str(caught.value)


def test_global_is_watched_from_functions_objects_and_inner_functions(
    watch: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch
):
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * GLOBAL_WEIGHT

    def inner(x: torch.Tensor) -> list[torch.Tensor]:
        return [(lambda y: y * GLOBAL_WEIGHT)(x) for _ in range(2)]

    def calls_another(x: torch.Tensor) -> torch.Tensor:
        return plain(x)

    fingerprints = [watch(step) for step in (plain, inner, calls_another, Owner())]
    monkeypatch.setitem(globals(), "GLOBAL_WEIGHT", torch.ones(3))
    for fingerprint in fingerprints:
        with pytest.raises(StaleRecordingError, match="GLOBAL_WEIGHT is another tensor"):
            fingerprint.check()


def test_closure_defaults_partial_and_bound_method(watch: Callable[..., Fingerprint]):
    weight = torch.ones(3)
    default = torch.ones(3)
    given = torch.ones(3)
    module = Layer()
    sequence = torch.nn.Sequential(torch.nn.Linear(3, 3))

    def closure(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    def defaults(x: torch.Tensor, w: torch.Tensor = default) -> torch.Tensor:
        return x * w

    def takes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    cases = [
        (watch(closure), weight, "weight"),
        (watch(defaults), default, "defaults"),
        (watch(functools.partial(takes, w=given)), given, "'w'"),
        (watch(module.forward), module.linear.bias, "bias"),
        (watch(sequence.forward), sequence[0].bias, "bias"),
    ]
    for fingerprint, tensor, words in cases:
        fingerprint.check()
        tensor.data = torch.zeros(3)
        with pytest.raises(StaleRecordingError, match=words):
            fingerprint.check()
    weight = torch.ones(3)
    with pytest.raises(StaleRecordingError, match="weight is another tensor"):
        cases[0][0].check()


def test_copies_in_place_are_accepted(watch: Callable[..., Fingerprint]):
    module = Layer()
    fingerprint = watch(module)
    with torch.no_grad():
        module.linear.weight.copy_(torch.zeros(3, 3))
    module.load_state_dict(Layer().state_dict())
    module.scale.mul_(2)
    fingerprint.check()


def test_extra_tensors_are_watched(watch: Callable[..., Fingerprint]):
    arena = torch.zeros(4)
    fingerprint = watch(lambda x: x, arena=arena)
    fingerprint.check()
    arena.resize_(1000)
    with pytest.raises(StaleRecordingError, match="arena has moved"):
        fingerprint.check()


def test_what_the_step_rebinds_itself_is_not_watched():
    class Keeps:
        def __init__(self) -> None:
            self.weight = torch.ones(3)
            self.last: Any = None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.last = [x * self.weight]
            return self.last[0]

    step = Keeps()
    step(torch.ones(3))
    before = reachable(step)
    step(torch.ones(3))
    fingerprint = Fingerprint(step, {}, before)
    try:
        step(torch.ones(3))
        fingerprint.check()
        step.weight = torch.ones(3)
        with pytest.raises(StaleRecordingError, match="weight"):
            fingerprint.check()
    finally:
        fingerprint.close()


def test_many_tensors_are_all_checked_in_turns(watch: Callable[..., Fingerprint]):
    weights = [torch.ones(1) for _ in range(200)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * weights[0]

    fingerprint = watch(step)
    for _ in range(50):
        fingerprint.check()
    weights[133].data = torch.zeros(1)
    found = 0
    for _ in range(2 * (len(fingerprint.watched) // 16 + 1)):
        try:
            fingerprint.check()
        except StaleRecordingError as error:
            assert "weights[133]" in str(error)  # noqa: PT017 (when it is raised is open)
            found += 1
        else:
            assert found == 0  # found once, it is named at every check
    assert found > 0


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "resize_": lambda t: t.resize_(2, 3),
    "set_": lambda t: t.set_(t.untyped_storage(), 0, (2, 3), (3, 1)),
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "data of another dtype": lambda t: assign(t, "data", t.view(torch.int32)),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("count", [1, 300])
def test_a_tensor_that_changes_where_it_lies_is_found(
    change: str, count: int, watch: Callable[..., Fingerprint]
):
    """Its identity and its address stay; a recording would go on reading what it was."""
    weights = [torch.ones(4, 3) for _ in range(count)]
    fingerprint = watch(lambda x: x @ weights[0])
    fingerprint.check()
    address = weights[count // 2].data_ptr()
    IN_PLACE[change](weights[count // 2])
    assert weights[count // 2].data_ptr() == address
    if change == "data of another dtype":  # of which a version does not tell
        fingerprint.expect_change()
    with pytest.raises(StaleRecordingError, match=r"weights\[\d+\] has shape.*copy_"):
        check(fingerprint, 4 * (count // 8 + 2))
    with pytest.raises(StaleRecordingError, match=r"weights\[\d+\] has shape"):
        fingerprint.check()


@pytest.mark.parametrize("count", [3, 300])
def test_new_values_in_place_are_looked_at_once(count: int, watch: Callable[..., Fingerprint]):
    weights = [torch.ones(2) for _ in range(count)]
    fingerprint = watch(lambda x: x * weights[0])
    looks = 0
    real = fingerprint._look_closer

    def counted(due: int) -> None:
        nonlocal looks
        looks += 1
        real(due)

    fingerprint._look_closer = counted  # type: ignore[method-assign]
    rounds = len(fingerprint._windows)
    weights[count // 2].mul_(2)
    for _ in range(3 * rounds):
        fingerprint.check()
    assert looks == 1
    for _ in range(20):  # a cache, which every step writes
        weights[0].add_(1)
        check(fingerprint, rounds)
    assert looks == 3  # twice, then its version is not asked any more
    weights[0].data = torch.zeros(2)
    with pytest.raises(StaleRecordingError, match=r"weights\[0\] has moved"):
        check(fingerprint, rounds)


def test_assigning_what_is_there_already_is_not_looked_at(watch: Callable[..., Fingerprint]):
    """As rotary tables are in every eager step: ``self.table = self.table.to(device)``."""
    module = Layer()
    fingerprint = watch(module)
    looks = []
    fingerprint._check_all = lambda: looks.append(1)  # type: ignore[method-assign]
    Layer()  # another one's are its own affair, but they are not told apart
    assert fingerprint._all_due
    fingerprint._all_due = False
    module.scale = module.scale.to("cpu")
    module.linear.weight = module.linear.weight
    module.linear = module.linear
    assert not fingerprint._all_due
    check(fingerprint, 5)
    assert looks == []
    module.scale = module.scale.clone()
    assert fingerprint._all_due


def test_the_same_parameter_that_has_moved_is_found_when_it_is_assigned(
    watch: Callable[..., Fingerprint],
):
    module = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(40)])
    fingerprint = watch(module)
    check(fingerprint, 3)
    kept = module[39].weight
    kept.data = torch.ones(3, 3)
    module[39].weight = kept
    with pytest.raises(StaleRecordingError, match=r"\[?39\]?\.weight.* has moved"):
        fingerprint.check()


def test_inference_tensors_are_watched(watch: Callable[..., Fingerprint]):
    with torch.inference_mode():
        weights = [torch.ones(4, 3) for _ in range(40)]
    fingerprint = watch(lambda x: x @ weights[0])
    for _ in range(100):
        fingerprint.check()
    with torch.inference_mode():
        weights[7].t_()
    fingerprint.expect_change()
    with pytest.raises(StaleRecordingError, match=r"weights\[7\] has shape \(3, 4\)"):
        fingerprint.check()


@pytest.mark.parametrize("convert", ["half", "double"])
def test_a_module_that_is_converted_is_found_by_the_next_check(
    convert: str, watch: Callable[..., Fingerprint]
):
    """``module.half()`` swaps the data of every parameter and announces nothing."""
    module = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(100)])
    fingerprint = watch(module)
    for _ in range(17):
        fingerprint.check()
    getattr(module, convert)()
    with pytest.raises(StaleRecordingError, match="has moved"):
        check(fingerprint, 2)  # a window may hold nothing but modules


def test_assigned_parameter_is_found_at_once_among_many(watch: Callable[..., Fingerprint]):
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(100)])
    fingerprint = watch(module)
    for _ in range(3):
        fingerprint.check()
    module[1].weight = torch.nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(StaleRecordingError, match=r"1\.weight"):
        fingerprint.check()


def test_replaced_module_is_found_at_once_among_many(watch: Callable[..., Fingerprint]):
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(100)])
    other = torch.nn.Linear(1, 1)
    fingerprint = watch(module)
    for _ in range(3):
        fingerprint.check()
    module[1] = other
    with pytest.raises(StaleRecordingError, match="is another"):
        fingerprint.check()


def test_recorded_memory_outlives_the_tensor(watch: Callable[..., Fingerprint]):
    owner = Owner()
    fingerprint = watch(owner)
    address = owner.weights[0].data_ptr()
    owner.weights[0].data = torch.zeros(3)
    storages = [item.storage.data_ptr() for item in fingerprint.watched if item.storage is not None]
    assert address in storages


def test_cycles_end(watch: Callable[..., Fingerprint]):
    owner = Owner()
    owner.named["self"] = owner  # type: ignore[assignment]
    watch(owner).check()


def test_closed_fingerprint_listens_no_more():
    module = Layer()
    fingerprint = Fingerprint(module, {})
    fingerprint.close()
    module.scale = torch.zeros(3)
    fingerprint.check()


# -- compare -------------------------------------------------------------------------------------


def one(*values: float) -> dict[str, torch.Tensor]:
    return {"y": torch.tensor(values)}


def test_equal_outputs_differ_by_nothing():
    odd = one(1.0, float("nan"), float("inf"))
    assert compare(odd, one(1.0, float("nan"), float("inf")), "x") == 0
    assert 0 < compare(one(1.0, 1e-7), one(1.0, 0.0), "x") < 1e-6


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (one(1.0, 2.0, 3.1), one(1.0, 2.0, 3.0)),
        (one(1.0, 2.0, float("nan")), one(1.0, 2.0, 3.0)),
        (one(1.0, 2.0, 3.0), one(1.0, 2.0, float("nan"))),
        (one(1.0, 2.0, float("inf")), one(1.0, 2.0, float("-inf"))),
        ({"y": torch.tensor([1, 2, 3])}, {"y": torch.tensor([1, 2, 4])}),
        ({"y": torch.zeros(3, 2, 2)}, {"y": torch.eye(3)[2][:, None, None].expand(3, 2, 2)}),
    ],
)
def test_difference_names_output_and_row(ours: dict, theirs: dict):
    with pytest.raises(VerificationError, match=r"bucket 4: output 'y' differs.*row 2 "):
        compare(ours, theirs, "bucket 4")


def test_other_names_are_a_difference():
    with pytest.raises(VerificationError, match=r"\['y'\].*\['z'\]"):
        compare(one(1.0), {"z": torch.ones(1)}, "x")
