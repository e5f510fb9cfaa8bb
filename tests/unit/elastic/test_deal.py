"""The data of an elastic run: each sample once, for any set of members, and few slots move when they change."""

from __future__ import annotations

import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import IterableDataset

from gradwire.elasticity.deal import Deal, seed_generators, share_slots
from gradwire.errors import UsageError, UsageTypeError


@given(samples=st.integers(1, 60), slot=st.integers(1, 5), slots=st.integers(1, 6), seed=st.integers(0, 3))
def test_every_sample_is_dealt_once_in_each_epoch(samples: int, slot: int, slots: int, seed: int) -> None:
    deal = Deal(range(samples), global_batch=slot * slots, slots=slots, seed=seed)
    stream = [i for step in range(deal.steps(2)) for s in range(slots) for i in deal.samples(step, s)]
    for epoch in (stream[:samples], stream[samples : 2 * samples]):
        assert sorted(epoch) == list(range(samples))
    assert len(stream) - 2 * samples < slot * slots


def test_epochs_and_seeds_have_orders_of_their_own_and_steps_can_be_repeated() -> None:
    deal, again, other = (Deal(range(64), global_batch=64, slots=4, seed=seed) for seed in (1, 1, 2))
    first = [deal.samples(0, s) for s in range(4)]
    assert first == [again.samples(0, s) for s in range(4)]
    assert first != [deal.samples(1, s) for s in range(4)]
    assert first != [other.samples(0, s) for s in range(4)]
    assert [deal.samples(0, s) for s in range(4)] == first
    elsewhere = pickle.loads(pickle.dumps(Deal(range(64), global_batch=64, slots=4, seed=np.int64(1))))  # in a worker
    assert [elsewhere.samples(0, s) for s in range(4)] == first


def test_a_batch_is_collated() -> None:
    data = [(torch.full((2,), float(i)), i) for i in range(8)]
    inputs, labels = Deal(data, global_batch=4, slots=2).batch(1, 0)
    assert inputs.shape == (2, 2)
    assert torch.equal(inputs[:, 0], labels.float())
    assert Deal(data, global_batch=4, slots=2, collate_fn=len).batch(0, 0) == 2


def test_what_cannot_be_dealt_is_refused() -> None:
    for iterable in (iter([1, 2]), type("Sized", (IterableDataset,), {"__len__": lambda _: 2, "__iter__": iter})()):
        with pytest.raises(UsageTypeError, match="of an iterable data set"):
            Deal(iterable, global_batch=2, slots=1)
    for batch, slots in ((6, 4), (2, 4), (4, 0)):
        with pytest.raises(UsageError, match="equally many samples"):
            Deal([1, 2], global_batch=batch, slots=slots)
    with pytest.raises(UsageError, match="no samples"):
        Deal([], global_batch=2, slots=1)
    with pytest.raises(UsageError, match="slot 2 of step 5"):
        Deal([1, 2], global_batch=2, slots=2).samples(5, 2)
    for members in ((), ("a", "b", "c")):
        with pytest.raises(UsageError, match=f"{len(members)} members for 2 slots"):
            share_slots(2, members)


@given(data=st.data(), slots=st.integers(1, 40))
def test_slots_are_shared_equally_and_few_move(data: st.DataObject, slots: int) -> None:
    members = [f"m{i}" for i in range(data.draw(st.integers(1, slots)))]
    owners = share_slots(slots, members)
    for number in range(6):
        before, had = owners, list(members)
        if len(members) > 1 and data.draw(st.booleans()):
            members.remove(data.draw(st.sampled_from(members)))
        elif len(members) < slots:
            members.append(f"j{number}")
        owners = share_slots(slots, members, before)
        loads = Counter(owners)
        assert set(loads) == set(members)
        assert max(loads.values()) - min(loads.values()) <= 1
        moved = sum(a != b for a, b in zip(before, owners, strict=True))
        assert moved <= (-(-slots // len(had)) if len(members) < len(had) else slots // len(members))
        assert owners == share_slots(slots, members, before)


def test_many_members_change_at_once() -> None:
    before = share_slots(32, [f"m{i}" for i in range(8)])
    after = share_slots(32, ["m0", "m5", "new", "more"], before)
    assert Counter(after) == {"m0": 8, "m5": 8, "new": 8, "more": 8}
    assert all(b == a for b, a in zip(before, after, strict=True) if b in ("m0", "m5"))


def test_generators_are_seeded_as_by_torch_and_python() -> None:
    seed_generators(2**62 + 5)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(2**62 + 5)
    random.seed(2**62 + 5)
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1] == random.random()
