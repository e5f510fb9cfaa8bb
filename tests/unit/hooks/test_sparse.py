"""top_k, chunked_top_k, threshold, random_k: values against arithmetic, laws, what is on the wire, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.errors import UsageError
from gradwire.hooks import (
    BucketSpec,
    CommHook,
    chain,
    chunked_top_k,
    dgc,
    error_feedback,
    mean,
    power_sgd,
    random_k,
    threshold,
    top_k,
)
from gradwire.hooks.compressors.chunked import pack, unpack
from gradwire.hooks.compressors.sparse import Format, Pairs
from gradwire.hooks.state import split_flat
from gradwire.testing import simulate
from gradwire.testing.laws import Gathered
from helpers.buckets import bucket, gradients


def keep_largest(grad: Tensor, k: int) -> Tensor:
    places = grad.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(grad).index_copy(0, places, grad[places])


def test_top_k_is_the_mean_of_each_ranks_largest() -> None:
    brought = gradients(3, 101)
    done = simulate(top_k(ratio=0.1), brought)
    kept = [keep_largest(g, 11) for g in brought]
    for (value, sent), own in zip(done.reduced, kept, strict=True):
        torch.testing.assert_close(value, torch.stack(kept).mean(0))
        assert torch.equal(sent, own)
    assert done.wire_bytes == 2 * 11 * 8


def test_scattered_top_k_chooses_in_each_row() -> None:
    brought = gradients(3, 102)
    done = simulate(Gathered(top_k(ratio=0.1)), brought)  # 11 of all, that is 4 of each row
    kept = [torch.cat([keep_largest(row, 4) for row in g.chunk(3)]) for g in brought]
    for (value, sent), own in zip(done.reduced, kept, strict=True):
        torch.testing.assert_close(value, torch.stack(kept).mean(0))
        assert torch.equal(sent, own)
    assert top_k(ratio=0.1).scatter_wire_bytes(bucket((102,)), 3) == 2 * 4 * 8


@pytest.mark.parametrize("number", [0, 3, 100, 4096, 5000])
@pytest.mark.parametrize("bits", [None, 2])
def test_chunked_top_k_sends_the_largest_of_each_chunk(number: int, bits: int | None) -> None:
    brought = gradients(3, number)
    done = simulate(chunked_top_k(5, chunk=100, bits=bits), brought)
    kept = []
    for (_, sent), grad in zip(done.reduced, brought, strict=True):
        for part, own in zip(grad.split(100), sent.split(100), strict=True):
            largest = keep_largest(part, 5)
            if bits:  # the sign, and the mean magnitude of those above or below the mean one
                chosen = largest[largest != 0].abs()
                split = chosen.mean() if len(chosen) == 5 else chosen.sum() / 5  # padding counts
                levels = [
                    chosen[chosen <= split].sum() / max(1, 5 - int((chosen > split).sum())),
                    chosen[chosen > split].mean(),
                ]
                level = torch.where(largest.abs() > split, *(levels[i].nan_to_num().bfloat16().float() for i in (1, 0)))
                largest = largest.sign() * level
            assert torch.equal(own, largest)
        kept.append(sent)
    torch.testing.assert_close(done.reduced[0].value, torch.stack(kept).mean(0))
    # Five indices of 7 bits, with two bits of value and two levels, or with float32.
    assert done.wire_bytes == 2 * -(-number // 100) * (6 + 4 if bits else 5 + 20)


def test_a_chunk_of_4096_with_64_elements_of_two_bits_is_116_bytes() -> None:
    hook, spec = chunked_top_k(64, bits=2), bucket((512, 1024))
    assert hook.wire_bytes(spec, 8) == 7 * 128 * (64 * 14 // 8 + 4)
    assert spec.nbytes / (hook.wire_bytes(spec, 2) or 0) > 141


@pytest.mark.parametrize(("width", "number"), [(1, 9), (3, 8), (7, 5), (12, 3), (14, 64), (31, 2)])
def test_packed_integers_take_their_bits_and_come_back(width: int, number: int) -> None:
    codes = torch.randint(2**width, (4, number))
    codes[0] = 2**width - 1
    packed = pack(codes, width)
    assert (packed.dtype, packed.shape[1]) == (torch.uint8, -(-width * number // 8))
    assert torch.equal(unpack(packed, width, number), codes)


def test_narrow_values_are_rounded_in_sent_too() -> None:
    brought = gradients(2, 50)
    done = simulate(top_k(k=5, values=torch.bfloat16), brought)
    for (_, sent), grad in zip(done.reduced, brought, strict=True):
        assert torch.equal(sent, keep_largest(grad, 5).bfloat16().float())
    assert done.wire_bytes == 5 * 6
    # A gradient that is as narrow already is not made wider.
    done = simulate(top_k(k=5, values=torch.float32), [g.bfloat16() for g in brought])
    assert done.wire_bytes == 5 * 6


def test_both_parts_of_complex_gradients_are_candidates() -> None:
    done = simulate(top_k(k=2), [torch.tensor([1 + 9j, 5 + 2j]), torch.tensor([1 + 9j, 5 + 2j])])
    assert done.reduced[0].value.tolist() == [9j, 5]
    assert done.wire_bytes == 2 * 8


def test_threshold_sends_lists_of_different_lengths() -> None:
    brought = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.1, 0.2, 0.3])]
    done = simulate(threshold(value=1.0), brought)
    assert done.reduced[1].value.tolist() == [0.5, -1.0, 0.0]
    assert done.reduced[1].sent.tolist() == [0.0, 0.0, 0.0]
    assert [e.nbytes for e in done.exchanges] == [(8, 8), (16, 0)]
    done = simulate(threshold(relative=0.5), brought)
    assert [e.nbytes for e in done.exchanges] == [(8, 8), (16, 16)]
    assert done.exchanges[1].op.kind.value == "all_gather"


def test_threshold_sends_no_zeros() -> None:
    done = simulate(threshold(relative=0.5), [torch.zeros(5), torch.zeros(5)])
    assert done.exchanges[1].nbytes == (0, 0)


def test_random_k_selects_the_same_elements_on_all_ranks_and_others_in_every_step() -> None:
    hook = chain(random_k(0.1, seed=3), mean())
    brought = gradients(3, 100)
    seen = torch.zeros(100)
    for step in range(100):
        done = simulate(hook, brought, step=step)
        places = done.reduced[0].sent != 0
        assert int(places.sum()) == 10
        assert all(torch.equal(sent != 0, places) for _, sent in done.reduced)
        torch.testing.assert_close(done.reduced[0].value, torch.stack(brought).mean(0) * places)
        seen += places
    assert done.wire_bytes == 2 * 2 / 3 * 10 * 4
    assert 2 <= seen.min() <= 10 <= seen.max() <= 22


def test_random_k_does_not_draw_from_a_devices_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs of different models differ, so that ranks would take different elements."""
    monkeypatch.delattr(torch, "Generator")
    done = simulate(chain(random_k(0.1), mean()), [torch.ones(20)])
    assert int(done.reduced[0].value.sum()) == 2
    simulate(power_sgd(1, warm_start=False), [torch.ones(1024)], spec=bucket((32, 32)))


def test_the_inner_hook_of_random_k_sees_a_short_bucket() -> None:
    spec = bucket((10, 3), (11,), index=4)
    inside: Any = chain(random_k(0.2), mean())
    assert inside.inside(spec) == bucket((9,), names=("random_k",), index=4)
    assert inside.save(inside.init(spec), spec) == {}
    assert inside.load({}, spec) is None


class Stateful(CommHook):
    """Has state."""

    def init(self, spec: BucketSpec) -> Any:
        return torch.zeros(spec.numel)

    def reduce(self, grad: Tensor, state: Any, turn: Any) -> Any:
        raise NotImplementedError

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return split_flat(state, spec)

    def __repr__(self) -> str:
        return "stateful()"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: top_k(), "how many elements"),
        (lambda: top_k(ratio=0.1, k=3), "Pass one of ratio and k"),
        (lambda: top_k(k=1, values=torch.int8), "`values` must be None or torch.float32 or torch.bfloat16"),
        (lambda: threshold(), "which elements"),
        (lambda: threshold(value=1.0, relative=0.1), "Pass one of them"),
        (
            lambda: threshold(value=1.0, values=torch.float16),
            "`values` must be None or torch.float32 or torch.bfloat16",
        ),
        (
            lambda: chain(top_k(k=1), mean()),
            "communicates by itself: it gathers lists.*an all-reduce needs every element",
        ),
        (lambda: chain(threshold(value=1.0), mean()), "an all-reduce needs every element"),
        (lambda: chain(dgc(0.1), mean()), "an all-reduce needs every element"),
        (lambda: dgc(0.1, values=torch.int8), "`values` must be None or torch.float32 or torch.bfloat16"),
        (lambda: chain(random_k(0.1), error_feedback(), mean()), "keeps state from step to step"),
        (lambda: chain(random_k(0.1), Stateful()), "keeps state from step to step"),
        (lambda: chain(random_k(0.1), power_sgd(1, batched=True)), "keeps state from step to step"),
        (lambda: chain(random_k(0.1), hooks.after(9, power_sgd(1))), "keeps state from step to step"),
        (lambda: chain(random_k(0.1), hooks.diloco(every=2)), "keeps state from step to step"),
    ],
)
def test_refused_when_built(build: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()


@pytest.mark.parametrize("hook", [top_k(k=1), threshold(value=1.0), chain(error_feedback(), top_k(k=1))], ids=repr)
def test_unsupported_parameters_are_refused_before_any_step(hook: CommHook) -> None:
    hook.check(bucket((2**31 - 1,)))
    for numel, dtype in ((2**31, torch.float32), (2**30, torch.complex64)):
        with pytest.raises(UsageError, match=r"a bucket of 2147483648 elements.*Buckets\(from_start=True\)"):
            hook.check(bucket((numel,), dtype=dtype))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pairs_survive_their_bytes(count: int) -> None:
    form = Format(torch.bfloat16)
    pairs = Pairs(torch.arange(count, dtype=torch.int32), torch.randn(count).bfloat16())
    row = torch.cat([torch.zeros(1, dtype=torch.uint8), form.pack(pairs)])[1:]
    indices, values = form.unpack(row)
    assert torch.equal(indices, pairs.indices)
    assert torch.equal(values, pairs.values)
    assert row.numel() == count * form.nbytes
