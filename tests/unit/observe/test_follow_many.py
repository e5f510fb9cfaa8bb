"""Following ranks that write much: few records become objects, and nothing that is under way is lost."""

import random
import sys
import time

import pytest

from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.run_follower import RingFollower, RunFollower
from gradwire.recorder.format import RecordKind as K
from gradwire.recorder.writer import FlightRecorder
from gradwire.runtime.host import clock_identity
from helpers.made_rings import header, write_steps
from helpers.recorder_put import put

RANKS, A_LOOK, LOOKS = 8, 3333, 3


@pytest.fixture
def recorder(tmp_path):
    made = []

    def make(rank=0, size=1):
        facts = {**header(rank, size), "clock": clock_identity(), "started": time.monotonic_ns()}
        made.append(FlightRecorder(tmp_path / f"rank-{rank}.ring", header=facts))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_record_costs_the_launcher_at_most_2_calls(recorder, tmp_path):
    """8 ranks that write much. Calls, which load does not change; `python -m detection.follow` measures time."""
    recorders = [recorder(rank, RANKS) for rank in range(RANKS)]
    run, step, costs, calls = RunFollower(tmp_path), 0, [], 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(LOOKS):
        ends = {write_steps(one, rank, step, A_LOOK) for rank, one in enumerate(recorders)}
        step, calls = ends.pop(), 0
        sys.setprofile(count)
        run.look()
        sys.setprofile(None)
        costs.append(calls / (RANKS * A_LOOK))
    run.close()
    assert max(costs[1:]) <= 2  # the first look imports and opens
    assert all(rank.step == step - 1 and len(rank.folder.steps) > 20 for rank in run.ranks.values())


@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_out_does_not_matter(recorder, seed):
    """Groups, operations and messages in any order, some of which never finish: the same is known of those under way."""
    rng, ring = random.Random(seed), recorder()
    short, whole = RingFollower(ring.path), RingFollower(ring.path)
    thinned, complete = RankProgress(0, {}), RankProgress(0, {})
    ordinals, pending = dict.fromkeys("abc", 0), []
    for portion in (100, 3000, 40, 5000, 1200):
        for seq in range(portion):
            if pending and rng.random() < 0.5:
                facts = pending.pop(rng.randrange(len(pending)))
                if rng.random() < 0.995:  # else it hangs
                    put(ring, K.COLLECTIVE_FAILED if rng.random() < 0.001 else K.COLLECTIVE_FINISHED, **facts)
                continue
            group = rng.choice("aaabbc" if seq > portion // 2 else "aab")
            ordinals[group] += 1
            facts = {"group": group, "rank": 0, "seq": ordinals[group], "ordinal": ordinals[group]}
            put(ring, K.COLLECTIVE_SUBMITTED, **facts)
            if rng.random() < 0.3:
                put(ring, K.COLLECTIVE_WAITED, **facts)
            put(ring, K.BUCKET_FULL, group=group, step=seq, bucket=rng.randrange(3), model=1)
            pending.append(facts)
        before, records = short.poll_split(thinned.pending)
        thinned.update(records, before)
        complete.update(whole.poll())
        assert (len(before) + len(records) < portion) is (portion > 1000)
        for known in ("pending", "waited", "groups", "full", "step"):
            assert getattr(thinned, known) == getattr(complete, known), known
        assert {k: s[-1].ordinal for k, s in thinned.submitted.items()} == {
            k: s[-1].ordinal for k, s in complete.submitted.items()
        }
    assert complete.pending
    short.close()
    whole.close()
