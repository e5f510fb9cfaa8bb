"""The Triton codec against torch operations, bit for bit, and its speed. Skipped where there is no CUDA device."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire.hooks import CommHook, quantize, sign
from gradwire.hooks.compressors.quantized import eager
from gradwire.hooks.compressors.quantized.layout import part_of
from gradwire.testing import check_hook, simulate

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    pytest.importorskip("triton")
    from gradwire.hooks.compressors.quantized import kernels

    return kernels


def awkward(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of all sizes, ties, zeros, blocks of tiny numbers, NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    x[: numel // 4] = torch.randint(-254, 255, (numel // 4,), generator=generator) / 2  # ties
    if numel > 5000:
        x[1024:2048] *= 1e-36
        x[2100], x[2700], x[3000:3600] = float("nan"), float("-inf"), 0.0
    return x.to(dtype).cuda()


CASES = [
    (bits, block, rows, rounding)
    for bits in (8, 4, 2, 1)
    for block in (32, 256, 8192)
    for rows in (1, 3)
    for rounding in ("nearest", "stochastic")
    if not (bits == 1 and rounding == "stochastic")
]


def _key(bits: int, rows: int, rounding: str) -> Tensor | int | None:
    if rounding == "stochastic":
        return torch.tensor([(12345 << 31) + 1234567], device="cuda")
    return rows % 2 if bits == 1 else None


@pytest.mark.parametrize(("bits", "block", "rows", "rounding"), CASES)
def test_triton_gives_the_bits_of_eager(kernels, bits: int, block: int, rows: int, rounding: str) -> None:  # type: ignore[no-untyped-def]
    key = _key(bits, rows, rounding)
    for numel in (1, 31, 257, 4096, 100_003):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            part = part_of(numel, bits, block=block, rows=rows)
            x = awkward(numel, dtype)
            messages = [torch.zeros(rows, part.stride, dtype=torch.uint8, device="cuda") for _ in range(2)]
            for way, message in zip((kernels, eager), messages, strict=True):
                way.quantize(x, message, part, key)
            assert torch.equal(*messages), (numel, dtype, (messages[0] != messages[1]).nonzero()[:4].tolist())
            outs = [torch.empty_like(x) for _ in range(2)]
            for way, out in zip((kernels, eager), outs, strict=True):
                way.decode(messages[0], out, part)
            torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)
            own = replace(part, numel=min(numel, part.row))
            sums = [torch.empty(own.numel, device="cuda") for _ in range(2)]
            for way, out in zip((kernels, eager), sums, strict=True):
                way.decode(messages[0], out, own, 1 / 3)
            torch.testing.assert_close(*sums, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("bits", "block", "rows", "rounding"), [case for case in CASES if case[1] == 256])
def test_fused_feedback_gives_the_bits_of_eager(kernels, bits: int, block: int, rows: int, rounding: str) -> None:  # type: ignore[no-untyped-def]
    key = _key(bits, rows, rounding)
    for numel, dtype in itertools.product((1, 257, 100_003), (torch.float32, torch.bfloat16, torch.float16)):
        part, x = part_of(numel, bits, block=block, rows=rows), awkward(numel, dtype)
        residual = awkward(numel, torch.float32, seed=1).nan_to_num_(0, 0, 0)
        messages, answers = (torch.zeros(2, n, part.stride, dtype=torch.uint8, device="cuda") for n in (rows, 1))
        wanted, decoded = residual + x, torch.empty(numel, device="cuda")
        kernels.quantize_sum(x, residual, messages[0], part, key)
        eager.quantize(wanted.to(dtype), messages[1], part, key)
        assert torch.equal(*messages), (numel, dtype)
        eager.decode(messages[1], decoded, part)
        assert torch.equal(residual, (wanted - decoded).nan_to_num_(0, 0, 0)), (numel, dtype)
        for own in filter(lambda own: own.numel, map(part.owned_by, range(rows))):
            mine, mean, rounded = residual[: own.numel].clone(), *torch.empty(2, own.numel, device="cuda")
            kernels.quantize_mean(messages[0], mine, answers[0], own, key, rows)
            eager.decode(messages[0], mean, own, 1 / rows)
            eager.quantize(mean, answers[1], own, key)
            assert torch.equal(*answers), (numel, dtype)
            eager.decode(answers[1], rounded, own)
            assert torch.equal(mine, (residual[: own.numel] - (rounded - mean) * rows).nan_to_num_(0, 0, 0)), (
                numel,
                dtype,
            )


def test_rows_of_more_bytes_than_32_bits_count(kernels) -> None:  # type: ignore[no-untyped-def]
    """Two rows of 2 ** 31 bytes of codes and a little more. The end of each survives the round trip, and so does their sum."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    row = 2**31 + 8192
    part = part_of(2 * row, 8, block=256, rows=2)
    assert part.row == row
    x = torch.zeros(2 * row, dtype=torch.bfloat16, device="cuda")
    x[row - 256 : row], x[-256:], x[:256] = 3.0, 5.0, 7.0
    message = torch.zeros(2, part.stride, dtype=torch.uint8, device="cuda")
    kernels.quantize(x, message, part, None)
    out = torch.ones_like(x)
    kernels.decode(message, out, part)
    assert torch.equal(out, x)
    del x, out
    total = torch.empty(row, device="cuda")
    kernels.decode(message, total, replace(part, numel=row), 0.5)
    assert total[-256:].unique().tolist() == [4.0]
    assert total[:256].unique().tolist() == [3.5]
    assert int(total.count_nonzero()) == 512


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_the_device_gives_the_bits_of_the_host(bits: int) -> None:
    brought = [torch.randn(5000, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    here = simulate(quantize(bits), brought)
    there = simulate(quantize(bits), [g.cuda() for g in brought])
    assert torch.equal(here.reduced[0].value, there.reduced[0].value.cpu())
    assert torch.equal(here.reduced[1].sent, there.reduced[1].sent.cpu())


@pytest.mark.parametrize(
    "hook",
    [quantize(8), quantize(4, rounding="stochastic"), quantize({"layer0*": 4, "layer2*": 1, "*": 8}), sign()],
    ids=repr,
)
def test_hooks_keep_the_laws_on_cuda(hook: CommHook) -> None:
    check_hook(hook, device="cuda", world_sizes=(1, 2))


def milliseconds(work, repeats: int = 9, together: int = 20) -> float:  # type: ignore[no-untyped-def]
    """Of one piece of work among others: to launch a kernel takes the host longer than a kernel that long runs."""
    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(together):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / together)
    return sorted(times)[len(times) // 2]


def test_eight_bits_of_a_large_bucket_move_at_the_speed_of_memory(kernels) -> None:  # type: ignore[no-untyped-def]
    """Bytes read and written per second, against those of a copy of the bucket."""
    numel, rows = 100_000_000, 2
    part = part_of(numel, 8, block=256, rows=rows)
    x = torch.randn(numel, device="cuda")
    message = torch.zeros(rows, part.stride, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(x)
    copied = 2 * x.nbytes / milliseconds(lambda: out.copy_(x))
    moved = x.nbytes + message.nbytes
    rates = {
        "quantize": moved / milliseconds(lambda: kernels.quantize(x, message, part, None)) / copied,
        "dequantize": moved / milliseconds(lambda: kernels.decode(message, out, part)) / copied,
    }
    print({"copy GB/s": copied / 1e6, **rates})
    assert min(rates.values()) >= 0.8, rates
