"""Descriptions of operations between ranks: they survive the way, and reading one never runs code."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire.collectives import OpKind, ReduceOp, Scope, Signature, all_gather, all_gather_into_tensor, build
from gradwire.collectives.matching import decode, encode
from gradwire.errors import GroupError
from gradwire.groups import Group, HierarchicalGroup, Verified
from gradwire.testing import run_ranks


@pytest.mark.parametrize(
    "signature",
    [
        Signature(OpKind.BARRIER),
        Signature(
            OpKind.ALL_REDUCE, ((2, 3), (), (0,)), ("float32", "bool", "complex64"), ReduceOp.AVG, label="a \udc80 ü\n"
        ),
        Signature(OpKind.RECV, ((1,),), ("int8",), peer=None, tag=2**40),
        Signature(OpKind.REDUCE, ((1,),), ("int8",), ReduceOp.PREMUL_SUM, root=3, scope=Scope.INSIDE),
    ],
)
def test_signatures_survive(signature: Signature) -> None:
    assert decode(encode(signature), rank=0) == signature


def test_many_tensors_are_described_by_their_number() -> None:
    signature = Signature(OpKind.ALL_REDUCE, ((3,),) * 1000, ("float32",) * 1000, ReduceOp.SUM)
    data = encode(signature, limit=200)
    assert len(data) <= 200
    assert decode(data, rank=0).label == "1000 tensors"
    assert len(encode(Signature(OpKind.BARRIER, label="long" * 100), limit=200)) <= 200


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("data", [b"", b"[", b"{}", b"[1,2,3,4,5,6,7,8,9]", b"[" * 100_000, b"\xff\x00", b"null"])
def test_what_is_no_description_is_refused(data: bytes) -> None:
    with pytest.raises(GroupError, match="reading which operation rank 7 has submitted"):
        decode(data, rank=7)


def test_a_peer_that_writes_the_protocol_by_hand_runs_nothing_in_a_verified_rank(tmp_path: Path) -> None:
    """Rank 1 follows Verified's own protocol, with a pickle where the description belongs."""
    path = str(tmp_path / "made-by-a-pickle")

    def rank_main(group: Group) -> str | None:
        if group.rank == 0:
            with pytest.raises(GroupError) as caught:
                Verified(group).all_reduce(torch.ones(3))
            return str(caught.value)
        bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb(path))), dtype=torch.uint8)
        header = torch.frombuffer(bytearray(bytes(24) + bomb.numel().to_bytes(8, "little")), dtype=torch.uint8)
        both = torch.empty(64, dtype=torch.uint8)
        group.run(all_gather_into_tensor(both, header, label="verify all_reduce"))
        length = int.from_bytes(bytes(both[24:32].tolist()), "little")
        places = [torch.empty(n, dtype=torch.uint8) for n in (length, bomb.numel())]
        group.run(all_gather(places, bomb, label="compare signatures"))
        return None

    message, _ = run_ranks(rank_main, 2)
    assert message is not None
    assert "reading which operation rank 1 has submitted" in message
    assert not os.path.exists(path)


def test_a_peer_that_writes_the_protocol_by_hand_runs_nothing_where_hosts_meet(tmp_path: Path) -> None:
    path = str(tmp_path / "made-by-a-pickle")

    def rank_main(group: Group) -> str | None:
        if group.rank == 0:
            with pytest.raises(GroupError) as caught:
                HierarchicalGroup(group, None)
            return str(caught.value)
        bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb(path))), dtype=torch.uint8)
        lengths = torch.empty(2, dtype=torch.int64)
        group.run(build.all_gather_into_tensor(lengths, torch.tensor([bomb.numel()]), label="exchange host reports"))
        places = [torch.empty(n, dtype=torch.uint8) for n in lengths.tolist()]
        group.run(build.all_gather(places, bomb, label="exchange host reports"))
        return None

    message, _ = run_ranks(rank_main, 2)
    assert message is not None
    assert "a rank's report of its host cannot be read" in message
    assert not os.path.exists(path)


def test_pickles_are_read_only_where_the_other_end_is_this_user() -> None:
    """If you add one, say here who can write to it. See SECURITY.md."""
    allowed = {
        "testing/pool/protocol.py": "a socket pair, or a private socket that checks the user",
        "testing/pool/worker.py": "what came over the same",
    }
    root = Path(gradwire.__file__).parent
    reads = re.compile(
        r"pickle\.(load|loads|Unpickler)\b|\.recv\(\)|weights_only\s*=\s*False|torch\.load\((?!.*weights_only=True)"
    )
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if reads.search(file.read_text())}
    assert found == set(allowed)
