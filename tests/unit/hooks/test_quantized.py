"""quantize and sign: codes against a naive reference, all implementations to the same bit, laws on simulated ranks, refusals."""

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from gradwire.errors import UsageError
from gradwire.groups import ThreadGroup
from gradwire.hooks import BucketSpec, CommHook, chain, diloco, error_feedback, mean, quantize, sign
from gradwire.hooks.compressors.quantized import codec, eager, loops
from gradwire.hooks.compressors.quantized.layout import Part, lay_out, part_of
from gradwire.parallel import replicate
from gradwire.testing import simulate
from gradwire.testing.laws import Gathered
from gradwire.testing.simulate import one_parameter
from helpers.buckets import bucket

needs_numba = pytest.mark.skipif(not loops.available(), reason="needs numba")
BITS = [8, 4, 2, 1]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["loops", "eager"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once compiled, once as if numba were missing."""
    if request.param == "eager":
        monkeypatch.setattr(loops, "available", lambda: False)
    elif not loops.available():
        pytest.skip("needs numba")
    return str(request.param)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encoded(module: Any, x: Tensor, part: Part, rows: int, key: int | None = None) -> Tensor:
    message = torch.zeros(rows, part.stride, dtype=torch.uint8)
    module.quantize(x, message, part, key)
    return message


def decoded(module: Any, message: Tensor, part: Part) -> Tensor:
    out = torch.empty(part.numel)
    module.decode(message, out, part)
    return out


def naive(x: Tensor, bits: int, block: int = 256) -> Tensor:
    """The decoded values, in float64 and without packing."""
    pieces = []
    for piece in x.double().split(block):
        if bits == 1:
            pieces.append((2 * (piece >= 0).double() - 1) * piece.abs().mean())
        else:
            scale = piece.abs().max() / (2 ** (bits - 1) - 1)
            pieces.append((piece / scale).round() * scale if scale > 0 else torch.zeros_like(piece))
    return torch.cat(pieces)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 3])
def test_codes_are_the_nearest_level(bits: int, rows: int, way: str) -> None:
    x = normal(1000)
    part = part_of(1000, bits, rows=rows)
    back = decoded(codec, encoded(codec, x, part, rows), part)
    torch.testing.assert_close(back.double(), naive(x, bits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block", [32, 64, 256])
def test_every_byte_of_a_message_is_written(bits: int, block: int, way: str) -> None:
    part, messages = part_of(37 * block, bits, block=block, rows=3), []
    for before in (0, 255):
        messages.append(message := torch.full((3, part.stride), before, dtype=torch.uint8))
        codec.quantize(normal(37 * block), message, part, None)
    assert torch.equal(*messages)


def test_a_tie_goes_to_the_even_level(way: str) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.0] + [0.0] * 26)
    back = decoded(codec, encoded(codec, x, part_of(32, 8, block=32), 1), part_of(32, 8, block=32))
    assert back[:6].tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 127.0]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_zero_is_a_level_and_levels_are_symmetric(bits: int, way: str) -> None:
    x = normal(256)
    x[7] = 0.0
    part = part_of(256, bits)
    back = decoded(codec, encoded(codec, x, part, 1), part)
    assert back[7] == 0.0
    assert torch.equal(decoded(codec, encoded(codec, -x, part, 1), part), -back)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_values_affect_only_their_block(bits: int, bad: float, way: str) -> None:
    x = normal(600)
    x[300] = bad
    part = part_of(600, bits, rows=2)
    back = decoded(codec, encoded(codec, x, part, 2), part)
    assert back[256:512].isnan().all()
    assert back[:256].isfinite().all()
    assert back[512:].isfinite().all()


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_tiny_numbers_become_zeros(bits: int, way: str) -> None:
    for x in (torch.zeros(300), torch.full((300,), 1e-40), torch.full((300,), -1e-35)):
        part = part_of(300, bits)
        assert decoded(codec, encoded(codec, x, part, 1), part).abs().max() == 0.0


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_stochastic_rounding_keeps_levels_and_is_unbiased(bits: int, way: str) -> None:
    part = part_of(512, bits)
    x = normal(512).clamp_(-1, 1)
    x[0] = x[256] = 1.0
    total = torch.zeros(512)
    for key in range(400):
        back = decoded(codec, encoded(codec, x, part, 1, key * 7919), part)
        total += back
        torch.testing.assert_close(back[0].item(), 1.0)
        assert ((back - x).abs() <= 1.001 / part.top).all()
    step = 1 / part.top
    assert (total / 400 - x).abs().max() < 6 * step / 2 / 20
    exact = torch.arange(-part.top, part.top + 1).float()
    level = part_of(len(exact), bits)
    torch.testing.assert_close(decoded(codec, encoded(codec, exact, level, 1, 5), level), exact)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_summed_in_one_pass(bits: int, rows: int, way: str) -> None:
    part = part_of(300, bits)
    message = torch.cat([encoded(codec, normal(300, seed=r), part, 1) for r in range(rows)])
    out = torch.empty(300)
    codec.decode(message, out, part, 1 / rows)
    expected = torch.stack([naive(normal(300, seed=r), bits) for r in range(rows)]).mean(0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@needs_numba
@given(
    bits=st.sampled_from(BITS),
    block=st.sampled_from([32, 256, 8192]),
    rows=st.integers(1, 4),
    numel=st.integers(1, 3000),
    key=st.one_of(st.none(), st.integers(0, 2**31 - 1)),
    size=st.sampled_from([1.0, 1e-30, 1e30]),
    bad=st.sampled_from([0.0, NAN, INF]),
)
@settings(max_examples=150)
def test_compiled_loops_give_the_bits_of_torch(
    bits: int, block: int, rows: int, numel: int, key: int | None, size: float, bad: float
) -> None:
    key = None if bits == 1 else key
    x = normal(numel, seed=numel) * torch.exp(3 * normal(numel, seed=numel + 1)) * size
    x[: numel // 3] = (x[: numel // 3] / size).round() / 2  # ties
    x[numel // 2] = bad
    part = part_of(numel, bits, block=block, rows=rows)
    messages = [encoded(module, x, part, rows, key) for module in (eager, loops)]
    assert torch.equal(*messages)
    one, two = (decoded(module, messages[0], part) for module in (eager, loops))
    assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    own = replace(part, numel=min(numel, part.row))
    sums = [torch.empty(own.numel) for _ in range(2)]
    eager.decode(messages[0], sums[0], own, 1 / 3)
    loops.decode(messages[0], sums[1], own, 1 / 3)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))


@needs_numba
@pytest.mark.parametrize("hook", [*map(quantize, BITS), quantize(4, rounding="stochastic")], ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("scattered", "numel"), [(False, 1000), (True, 1200), (True, 1536)])
def test_compiled_feedback_gives_the_bits_of_torch(
    hook: CommHook, ranks: int, scattered: bool, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1200 elements each rank's row is padded to a whole block, of 1536 none is."""
    hook, results = chain(error_feedback(), hook), []
    hook = Gathered(hook) if scattered else hook
    for available in (True, False):
        monkeypatch.setattr(loops, "available", lambda available=available: available)
        assert codec.has_feedback(torch.ones(1), torch.zeros(1)) == available
        states: Any = None
        for step in range(4):
            brought = [normal(numel, seed=9 * step + r) * torch.exp(3 * normal(numel, seed=r)) for r in range(ranks)]
            brought[0][300] = (1.0, NAN, -INF, 0.0)[step]
            brought[-1][512:] *= step != 2  # a block of zeros
            divisor = max(1, ranks - 1) if step == 3 else None
            done = simulate(hook, brought, states=states, step=step, donated=True, divisor=divisor)
            states = done.states
            results += [t.view(torch.int32).clone() for s in states for t in (done.reduced[0].value, s["residual"])]
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:]))


def test_the_device_kernels_can_be_imported_anywhere() -> None:
    assert callable(importlib.import_module("gradwire.hooks.compressors.quantized.kernels").quantize)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mean_of_codes_quantized_again(bits: int, ranks: int, way: str) -> None:
    brought = [normal(2000, seed=r) for r in range(ranks)]
    done = simulate(quantize(bits), brought)
    slice_ = math.ceil(math.ceil(2000 / 256) / ranks) * 256
    means = torch.stack([naive(g, bits) for g in brought]).mean(0)
    expected = torch.cat([naive(piece, bits) for piece in means.split(slice_)])
    value = done.reduced[0].value.double()
    # A mean that falls between two levels may round either way; hardly any does.
    assert ((value - expected).abs() > 1e-5).double().mean() < 0.01
    assert [(e.op.kind.value, e.op.dtypes) for e in done.exchanges] == [
        ("all_to_all_single", ("uint8",)),
        ("all_gather_into_tensor", ("uint8",)),
    ]


@pytest.mark.parametrize(
    ("hook", "bits"), [*((quantize(bits), bits + 32 / 256) for bits in BITS), (sign("majority"), 1)]
)
def test_the_wire_carries_bits_not_floats(hook: CommHook, bits: float) -> None:
    brought = [normal(1 << 20)] * 4
    ratio = simulate(hook, brought).wire_bytes / simulate(mean(), brought).wire_bytes
    assert ratio == pytest.approx(bits / 32, rel=1e-3)


def test_stochastic_rounding_differs_by_rank_step_and_seed_and_repeats() -> None:
    brought = [normal(500)] * 2
    hook = quantize(4, rounding="stochastic")
    first = simulate(hook, brought)
    assert not torch.equal(first.reduced[0].sent[:256], first.reduced[1].sent[:256])
    assert torch.equal(simulate(hook, brought).reduced[0].value, first.reduced[0].value)
    assert not torch.equal(simulate(hook, brought, step=1).reduced[0].value, first.reduced[0].value)
    other = simulate(quantize(4, rounding="stochastic", seed=1), brought)
    assert not torch.equal(other.reduced[0].value, first.reduced[0].value)


def test_complex_gradients_are_pairs_of_real_ones() -> None:
    brought = [torch.complex(normal(300, seed=r), normal(300, seed=r + 9)) for r in range(2)]
    true = torch.stack(brought).mean(0)
    done = simulate(quantize(8), brought)
    assert (done.reduced[0].value - true).abs().max() < 0.1
    expected = torch.stack([sent for _, sent in done.reduced]).mean(0)
    torch.testing.assert_close(done.reduced[1].value, expected)
    assert simulate(sign(), brought).reduced[0].value.dtype == torch.complex64


def test_it_averages_by_itself() -> None:
    assert chain(error_feedback(), quantize(8), mean()) == chain(error_feedback(), quantize(8))


def test_bits_by_parameter() -> None:
    spec = bucket((1000,), (10,), (500,), (6,), names=["a.weight", "a.bias", "b.weight", "b.bias"])
    hook = quantize({"*.bias": 8, "*": 2})
    brought = [normal(1516, seed=r) for r in range(2)]
    done = simulate(hook, brought, spec=spec)
    plain = {bits: simulate(quantize(bits), [_chosen(g, bits) for g in brought]).reduced for bits in (8, 2)}
    for rank in range(2):
        for field in (0, 1):
            assert torch.equal(_chosen(done.reduced[rank][field], 8), plain[8][rank][field])
            assert torch.equal(_chosen(done.reduced[rank][field], 2), plain[2][rank][field])
    assert done.wire_bytes == hook.wire_bytes(spec, 2)


def _chosen(flat: Tensor, bits: int) -> Tensor:
    a, a_bias, b, b_bias = flat.split([1000, 10, 500, 6])
    return torch.cat([a_bias, b_bias] if bits == 8 else [a, b])


def test_adjacent_parameters_of_the_same_width_are_one_slice() -> None:
    spec = bucket((5,), (6,), (7,), (8,), names=["a", "b", "c.bias", "d"])
    layout = lay_out(spec, (("*.bias", 8), ("*", 4)), 256)
    assert [(s.bits, s.slices.ranges) for s in layout.sections] == [(8, ((11, 7),)), (4, ((0, 11), (18, 8)))]
    assert lay_out(spec, (("*", 4),), 256).sections[0].slices.ranges == ((0, 26),)
    double = lay_out(replace(spec, dtype=torch.complex64), (("*", 4),), 256)
    assert double.sections[0].slices.ranges == ((0, 52),)


def test_the_first_pattern_wins_and_one_must_match() -> None:
    spec = bucket((5,), (6,), names=["a.weight", "a.bias"])
    first = lay_out(spec, (("a.*", 2), ("*.bias", 8)), 256)
    assert [s.bits for s in first.sections] == [2]
    with pytest.raises(UsageError, match=r"no pattern matches the parameter 'a\.weight'. Add a last one"):
        quantize({"*.bias": 8}).init(spec)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("ranks", "numel"), [(1, 1000), (2, 1000), (2, 1024), (3, 999)])
def test_each_rank_has_the_mean_of_the_codes_of_its_row(bits: int, ranks: int, numel: int, way: str) -> None:
    brought = [normal(numel, seed=r) for r in range(ranks)]
    done = simulate(Gathered(quantize(bits)), brought)
    sent = [torch.cat([naive(row, bits) for row in g.chunk(ranks)]) for g in brought]
    torch.testing.assert_close(done.reduced[0].value.double(), torch.stack(sent).mean(0), rtol=1e-5, atol=1e-5)
    blocks = math.ceil(numel / ranks / 256)
    message = blocks * 32 * bits + 16 * math.ceil(blocks / 4)
    assert quantize(bits).scatter_wire_bytes(one_parameter(brought[0]), ranks) == (ranks - 1) * message


def two_parameters(ranks: int) -> tuple[BucketSpec, list[Tensor]]:
    brought = [torch.cat([normal(300, seed=r), 100 * normal(42, seed=r + 50)]) for r in range(ranks)]
    return bucket((300,), (42,)), brought


def signs(g: Tensor) -> Tensor:
    return torch.where(g >= 0, 1.0, -1.0)


@pytest.mark.parametrize("per", ["parameter", "bucket"])
@pytest.mark.parametrize("divisor", [None, 2])
def test_the_mean_of_scaled_signs(per: Any, divisor: int | None, way: str) -> None:
    spec, brought = two_parameters(3)
    if divisor:
        brought[-1].zero_()
    scaled = [signs(g) * scales(g, per) for g in brought]
    for hook in (sign("mean", per=per), Gathered(sign("mean", per=per))):
        done = simulate(hook, brought, spec=spec, divisor=divisor)
        for rank, (value, sent) in enumerate(done.reduced):
            torch.testing.assert_close(value, torch.stack(scaled).sum(0) / (divisor or 3))
            torch.testing.assert_close(sent, scaled[rank])
    # The second parameter shares a row with the first, so each message has two scales.
    assert sign("mean", per=per).scatter_wire_bytes(spec, 3) == 2 * (32 + (8 if per == "parameter" else 4))


def scales(g: Tensor, per: str) -> Tensor:
    pieces = g.split([300, 42]) if per == "parameter" else [g]
    return torch.cat([p.abs().mean().expand(p.numel()) for p in pieces])


@pytest.mark.parametrize("per", ["parameter", "bucket"])
def test_the_majority_decides_and_the_scale_is_the_mean(per: Any, way: str) -> None:
    spec, brought = two_parameters(3)
    votes = torch.stack([signs(g) for g in brought]).sum(0).sign()
    scale = torch.stack([scales(g, per) for g in brought]).mean(0)
    for hook in (sign("majority", per=per), Gathered(sign("majority", per=per))):
        for value, _ in simulate(hook, brought, spec=spec).reduced:
            torch.testing.assert_close(value, votes * scale)


def test_the_owner_breaks_ties() -> None:
    brought = [torch.ones(512), -torch.ones(512)]
    value = simulate(sign("majority"), brought).reduced[0].value
    assert value[:256].eq(1).all()
    assert value[256:].eq(-1).all()


def test_a_rank_with_zeros_only_does_not_vote() -> None:
    brought = [-torch.ones(8), torch.zeros(8), torch.zeros(8)]
    value = simulate(sign("majority"), brought, divisor=1).reduced[0].value
    assert value.tolist() == [-1.0] * 8


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("hook", [sign("mean"), sign("majority"), sign("mean", per="bucket"), quantize(1)], ids=repr)
def test_what_is_zero_on_all_ranks_does_not_drift(hook: CommHook, ranks: int, way: str) -> None:
    """Unused rows of an embedding, dead units: of 1000 elements 900, whole blocks of them."""
    brought = [torch.cat([normal(100, seed=r), torch.zeros(450), -torch.zeros(450)]) for r in range(ranks)]
    total, moved = torch.zeros(1000), torch.zeros(1000)
    for step in range(10):
        value = simulate(hook, brought, step=step).reduced[0].value
        total += value
        moved += value.abs()
    assert total[100:].abs().max() <= 1e-5 * moved.max()
    assert total[:100].abs().max() >= 0.99 * moved.max()  # the others move


@pytest.mark.parametrize("key", [None, 0, 1, 7])
def test_zeros_of_one_bit_alternate_in_every_implementation(key: int | None) -> None:
    if not loops.available():
        pytest.skip("needs numba")
    x = normal(1000)
    x[::3], x[500:] = 0.0, -0.0
    part = part_of(1000, 1, block=32, rows=3)
    messages = [encoded(module, x, part, 3, key) for module in (eager, loops)]
    assert torch.equal(*messages)
    part = part_of(64, 1, block=64)
    codes = encoded(eager, torch.zeros(64), part, 1, key)[0, :8]
    assert codes.tolist() == [255 if (j + (key or 0)) % 2 == 0 else 0 for j in range(8)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quantize(3), r"quantize\(bits=3, .*: 3 bits for '\*'. Bits are 8, 4, 2 or 1"),
        (lambda: quantize(True), "True bits"),
        (lambda: quantize({"*": 16}), "16 bits for"),
        (lambda: quantize({}), "no pattern in bits"),
        (lambda: quantize(8, block=100), "a block is a power of two from 32 to 8192"),
        (lambda: quantize(8, block=16), "a block is a power of two"),
        (lambda: quantize(8, block=0), "a block is a power of two"),
        (lambda: quantize(8, rounding="up"), "`rounding` must be 'nearest' or 'stochastic'"),  # type: ignore[arg-type]
        (lambda: quantize(1, rounding="stochastic"), "one bit is the sign and is not rounded"),
        (lambda: sign("median"), r"`scale` must be 'mean' or 'majority'"),  # type: ignore[arg-type]
        (lambda: sign(per="layer"), "`per` must be 'parameter' or 'bucket'"),  # type: ignore[arg-type]
        (lambda: chain(error_feedback(), sign("majority")), "the error of a vote cannot be fed back"),
    ],
)
def test_refused_when_built(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_set_hook_raises_for_unsupported_parameters() -> None:
    (group,) = ThreadGroup.world(1, timeout=20)
    replica = replicate(nn.Linear(3, 2), group=group)
    for hook in (quantize({"*.weight": 8}), diloco(every=2, hook=quantize({"*.weight": 8}))):
        with pytest.raises(UsageError, match=r"no pattern matches the parameter"):
            replica.set_hook(hook)
    replica.detach()
    replica = replicate(nn.Embedding(3, 2, sparse=True), group=group)
    replica.set_hook(diloco(every=2, hook=quantize(8)))  # it sends parameters, which are dense
    replica.detach()
    group.close()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "hook", [quantize(8), quantize(4, rounding="stochastic"), quantize(1), sign(), sign("majority")], ids=repr
)
def test_torchs_default_dtype_does_not_matter(
    hook: CommHook, dtype: torch.dtype, default: torch.dtype, way: str
) -> None:
    grads = [torch.randn(700, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(2)]
    expected = simulate(hook, grads).reduced
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        done = simulate(hook, grads).reduced
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(done, expected, strict=True):
        assert torch.equal(one.value, other.value)
        assert torch.equal(one.sent, other.sent)


def test_hooks_are_values() -> None:
    assert quantize(8) == quantize(8) != quantize(4)
    assert hash(quantize({"*": 4})) == hash(quantize(4))
