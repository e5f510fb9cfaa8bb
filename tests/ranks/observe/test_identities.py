"""Identities in records: the same on all ranks of a group, and no other group's, whatever its name."""

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import observe
from gradwire.groups.base import Group
from gradwire.recorder.format import RecordKind as K
from gradwire.testing import run_ranks

KINDS = ["threads", "shared_memory", "gloo", "hierarchical"]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_their_parts_are_told_apart(kind):
    def rank_main(group):
        again = group.split(0)
        half = group.split(group.rank // 2)
        wrapped = gw.groups.Verified(group)
        found = [one.ledger.events.group_id for one in (group, again, half, wrapped)]
        for one in (half, again):
            one.close()
        return found

    ranks = run_ranks(rank_main, 4, kind=kind)
    world, again, half, _ = zip(*ranks, strict=True)
    assert len(set(world)) == len(set(again)) == 1
    assert half[0] == half[1] != half[2] == half[3]
    assert len({world[0], again[0], half[0], half[2]}) == 4
    assert 0 not in {*world, *again, *half}


@pytest.mark.parametrize("kind", KINDS)
def test_two_worlds_with_the_same_name_are_two_groups(kind):
    first, second = (run_ranks(lambda group: group.ledger.events.group_id, 2, kind=kind) for _ in range(2))
    assert len({*first}) == len({*second}) == 1
    assert first != second


def test_a_group_of_a_user_is_identified_by_order():
    class Own(Group):
        def submit(self, op):
            raise NotImplementedError

    made = [[Own(rank, 2), Own(rank, 2)] for rank in range(2)]
    ids = [[group.ledger.events.group_id for group in groups] for groups in made]
    assert ids[0] == ids[1]
    assert ids[0][0] != ids[0][1]


def test_two_models_over_one_group_are_told_apart(tmp_path):
    """As in a GAN: each has records, buckets and parameters of its own."""

    def rank_main(group):
        observe.start(tmp_path, rank=group.rank, size=group.size)
        try:
            one, two = nn.Linear(3, 3), nn.Linear(3, 3)
            replicas = [gw.replicate(model, group=group) for model in (one, two)]
            for _ in range(2):
                two(one(torch.ones(2, 3))).sum().backward()
            del replicas
        finally:
            observe.stop()

    run_ranks(rank_main, 2, kind="shared_memory")
    rings = observe.read_rings(tmp_path)
    for ring in rings:
        models = {record.model for record in ring.of_kind(K.BUCKET_FULL)}
        assert models == {1, 2}
        described = {(facts["group_id"], facts["model"]) for facts in ring.descriptions["buckets"]}
        assert described == {(record.group_id, record.model) for record in ring.of_kind(K.BUCKET_FULL)}
        submitted = {record.model for record in ring.of_kind(K.COLLECTIVE_FINISHED) if record.bucket >= 0}
        assert submitted <= {1, 2}
    assert len({record.group_id for ring in rings for record in ring.of_kind(K.BUCKET_FULL)}) == 1


def test_control_characters_of_labels_are_not_shown(tmp_path, capsys):
    observe.start(tmp_path, rank=0, size=1)
    observe.mark("a\x1b[2J\x07b\r\u202ec")
    observe.stop()
    [ring] = observe.read_rings(tmp_path)
    assert [record.label for record in ring.of_kind(K.MARK)] == [r"a\x1b[2J\x07b\x0d\u202ec"]
    from gradwire.cli import main

    for command in (["inspect", str(tmp_path)], ["report", str(tmp_path), "--text"]):
        assert main(command) == 0
        assert "\x1b" not in capsys.readouterr().out
