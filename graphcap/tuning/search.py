"""Finds the plan of a bucket: knob by knob, the whole step decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from graphcap.decode.layer_plan import LayerPlan
from graphcap.tuning.space import knobs, starts
from graphcap.tuning.trials import Trial, Trials

GAIN = 0.998
"""A plan is better if it takes less than this share of the best time: less is noise."""

ROUNDS = 2
"""Over all knobs of a schedule."""

LARGEST_DIFFERENCE = 0.3
"""A plan whose logits differ by more from the plain schedule's is broken; orders of sums give 0.1."""

Show = Callable[[dict[str, Any]], None]


def attempt(trials: Trials, plan: LayerPlan, **how: int) -> Trial | str:
    """The trial, or why it failed: one bad configuration must not end the search."""
    try:
        trial = trials.run(plan, **how)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not trial.difference < LARGEST_DIFFERENCE:
        return f"WRONG: its logits differ by {trial.difference:.3g} of the largest"
    return trial


def search(trials: Trials, deadline: float, show: Show) -> tuple[LayerPlan, float]:
    """The best plan and its milliseconds; of what was tried before `deadline` (`time.monotonic`).

    Of the schedules that could serve, each is measured as it starts; the best two are tuned if they are
    within a tenth of one another.
    """
    best, best_ms = LayerPlan("plain"), float("inf")
    measured: list[tuple[float, LayerPlan]] = []
    ours = starts(trials.rows, trials.cuda)
    for plan in (best, *ours, *(plan for plan in trials.known if plan not in ours)):
        trial = attempt(trials, plan)
        _tell(show, trials, "start", plan, trial)
        if isinstance(trial, str):
            continue
        if plan.layers != "plain":
            measured.append((trial.ms, plan))
        if trial.ms < best_ms:
            best, best_ms = plan, trial.ms
    measured.sort(key=lambda pair: pair[0])
    for ms, plan in _worth_tuning(measured):
        tuned, tuned_ms = _descend(trials, plan, ms, deadline, show)
        if tuned_ms < best_ms:
            best, best_ms = tuned, tuned_ms
    return best, best_ms


def best_of(
    trials: Trials, plans: Sequence[LayerPlan], show: Show, **how: int
) -> tuple[LayerPlan, float] | None:
    """The fastest of `plans` and its milliseconds; a later one only where it is faster beyond noise.
    None: all failed."""
    best: tuple[LayerPlan, float] | None = None
    for plan in plans:
        trial = attempt(trials, plan, **how)
        _tell(show, trials, "final", plan, trial)
        if not isinstance(trial, str) and (best is None or trial.ms < GAIN * best[1]):
            best = (plan, trial.ms)
    return best


def _worth_tuning(
    measured: Sequence[tuple[float, LayerPlan]],
) -> list[tuple[float, LayerPlan]]:
    """The fastest start of each schedule, without those that are far behind."""
    found: list[tuple[float, LayerPlan]] = []
    for ms, plan in measured:
        if all(plan.layers != other.layers for _, other in found) and ms < 1.1 * measured[0][0]:
            found.append((ms, plan))
    return found


def _descend(
    trials: Trials, plan: LayerPlan, ms: float, deadline: float, show: Show
) -> tuple[LayerPlan, float]:
    """Knob by knob; and once more if that gained anything, since a knob was set while others were not."""
    seen: list[LayerPlan] = []
    for _ in range(ROUNDS):
        before = ms
        for name, changes in knobs(
            plan, trials.weights.shape, trials.rows, trials.context, trials.cuda
        ):
            for change in changes:
                if time.monotonic() > deadline:
                    return plan, ms
                tried = change(plan)
                if tried in seen:
                    continue
                seen.append(tried)
                trial = attempt(trials, tried)
                _tell(show, trials, name, tried, trial)
                if not isinstance(trial, str) and trial.ms < GAIN * ms:
                    plan, ms = tried, trial.ms
        if ms == before:
            break
    return plan, ms


def _tell(show: Show, trials: Trials, knob: str, plan: LayerPlan, trial: Trial | str) -> None:
    row: dict[str, Any] = {"rows": trials.rows, "context": trials.context, "knob": knob}
    row |= {"failed": trial} if isinstance(trial, str) else trial._asdict()
    show({**row, "plan": plan})
