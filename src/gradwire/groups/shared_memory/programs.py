"""Collectives over shared memory, as programs: generators that yield a number of signals and go on once all ranks have given it.

A rank *announces* a collective (a table of what it is and where its parts lie), *signals*, and waits for the others'
signals; then it *pulls* what it needs straight from where the others have it. A part lies in one of three places:

- up to SMALL bytes: copied into the rank's small slot together with the announcement, so that one signal is enough;
- in the rank's heap: where it is; nothing is copied, and all ranks signal once more when they have read it;
- elsewhere: copied window by window through the rank's staging buffers.

Each rank chooses for itself, and writes it into its table. This module picks the program: `agreement.py` has the announcement,
`all_reduce.py` and `exchange.py` what follows it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.aliasing import apart, is_native
from gradwire.collectives.lower import lower
from gradwire.collectives.reference import store, writes
from gradwire.errors import CollectiveMismatch, GroupError
from gradwire.groups.shared_memory.agreement import Steps
from gradwire.groups.shared_memory.all_reduce import AllReduce
from gradwire.groups.shared_memory.board import Board
from gradwire.groups.shared_memory.exchange import ExchangePrograms

_NATIVE = frozenset({
    OpKind.ALL_REDUCE, OpKind.BROADCAST, OpKind.ALL_GATHER, OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER,
    OpKind.REDUCE_SCATTER_TENSOR, OpKind.ALL_TO_ALL, OpKind.ALL_TO_ALL_SINGLE, OpKind.GATHER, OpKind.SCATTER, OpKind.BARRIER,
})  # fmt: skip
takes = partial(is_native, kinds=_NATIVE)
"""There is a program for these; the rest is made of them."""


class Programs:
    """The programs of one rank of one group."""

    def __init__(self, name: str, board: Board) -> None:
        self.board = board
        self.all_reduce = AllReduce(name, board)
        self.exchange = ExchangePrograms(name, board)

    def carry_out(self, op: Collective) -> Steps:
        """The program for any collective."""
        if op.device.type != "cpu":
            yield from self._on_host(op)
            return
        plain = self.all_reduce.plain_sum(op)
        if plain is not None:
            yield from plain
            return
        digest = self.exchange.digest(op)
        yield from writes(op.outputs, self._by_parts(apart(op, self.board.rank), digest))

    def _by_parts(self, op: Collective, digest: bytes) -> Steps:
        try:
            for step in [op] if takes(op) else lower(op, rank=self.board.rank, size=self.board.size, takes=takes):
                steps = self.all_reduce.general if step.kind is OpKind.ALL_REDUCE else self.exchange.steps
                yield from self.exchange.counted(steps(step, op, digest))
        except CollectiveMismatch as error:
            if takes(op) or error.ops or op.kind is not OpKind.ALL_REDUCE:
                raise
            # Sparse tensors of different sparse dimensions: not all ranks notice, and those that did not go on to the next step.
            raise GroupError(f"{error} It is part of {op}.") from error

    def _on_host(self, op: Collective) -> Steps:
        """Tensors of another device go through copies in ordinary memory."""
        copies = {id(t): t.detach().cpu() for t in op.inputs + op.outputs}
        inputs = tuple(copies[id(t)] for t in op.inputs)
        outputs = inputs if op.outputs is op.inputs else tuple(copies[id(t)] for t in op.outputs)
        factor = op.factor.cpu() if isinstance(op.factor, Tensor) else op.factor
        yield from self.carry_out(replace(op, inputs=inputs, outputs=outputs, factor=factor))
        for t, copy in zip(op.outputs, outputs, strict=True):
            store(t if t.is_sparse else t.detach(), copy.to(t.device))
        if op.device.type == "cuda":  # the caller may go on in another stream than that of the thread that drives
            torch.cuda.current_stream(op.device).synchronize()
