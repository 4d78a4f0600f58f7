"""What a check of GRAPHCAP_VERIFY=N runs twice for a host, and how often ranks vote: see docs/tuning.md."""

from __future__ import annotations

import pytest
import torch
from walks import Walk, batch_of, walker, walks

from graphcap.settings import Settings

STEPS = 6
EVERY = 3


class Host:
    """Replays a manager's bucket of 4 as an engine does, with its own eager step."""

    def __init__(self, **options):
        self.votes, self.eager_runs, step = [], 0, Walk()
        self.manager = walker(step=step, settings=Settings(verify_every=EVERY), **options)
        self.manager.capture()
        self._step = step
        self.batch = batch_of(3)
        self.manager.inputs.load(self.batch, 3)

    def eagerly(self):
        self.eager_runs += 1
        return self._step(self.manager.inputs.views(4))

    def step(self):
        """(sampled tokens of the real rows, eager runs that it took)"""
        before = self.eager_runs
        serves = self.manager.serves(4)
        outputs = self.manager.replay(4, 3, self.eagerly) if serves else self.eagerly()
        return outputs["token"][:3].tolist(), self.eager_runs - before


def expected(batch):
    return torch.tensor(walks(batch, STEPS)).t().tolist()


def test_an_equal_replay_takes_one_eager_run_and_serves():
    host = Host()
    with host.manager:
        tokens, runs = zip(*(host.step() for _ in range(STEPS)), strict=True)
        assert list(tokens) == expected(host.batch)
        assert runs == (0, 0, 1, 0, 0, 1)
        assert host.manager.stats().verified == 2


def test_a_wrong_replay_takes_two_and_the_host_goes_on(caplog):
    host = Host()
    with host.manager:
        recording = host.manager.recording(4)
        replay, turns = recording.replay, []

        def wrong():
            replay()
            turns.append(1)
            if len(turns) == EVERY:
                recording.outputs["token"].add_(1)

        recording.replay = wrong
        tokens, runs = zip(*(host.step() for _ in range(STEPS)), strict=True)
        assert list(tokens) == expected(host.batch)
        assert runs == (0, 0, 2, 1, 1, 1)
        assert host.manager.stats().fallbacks == {"verification": 1}
        assert "while serving, bucket 4 with 3 rows" in caplog.text


@pytest.mark.parametrize("other", [True, False])
def test_ranks_vote_three_times_a_check_and_not_between(other):
    """`other`: what the rank beside this one says of the outcome."""
    votes: list[bool] = []

    def agree(mine):
        votes.append(mine)
        return mine and (other or len(votes) < 3)

    host = Host(agree=lambda mine: mine)
    with host.manager:
        for part in (host.manager._verifier, host.manager._verifier._both, host.manager):
            for name in ("agree", "_agree"):
                if hasattr(part, name):
                    setattr(part, name, agree)
        counts = []
        for _ in range(EVERY):
            before = len(votes)
            host.step()
            counts.append(len(votes) - before)
        assert counts == [0, 0, 3]
        assert votes == [True] * 3
        assert host.manager.serves(4) == other
