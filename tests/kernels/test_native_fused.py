"""Native elementwise kernels and sampling against float64 and against the torch sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional

from helpers import isas
from tokenmill import _native
from tokenmill.kernels.fused import (
    activation,
    add_layer_norm,
    add_residual,
    add_rms_norm,
    add_rows,
    copy,
    empty_quantized,
    gated_activation,
    head_rms_norm,
    sample,
    score_tokens,
)
from tokenmill.kernels.gemm import quantize_rows
from tokenmill.sampling.choosers import TorchChooser
from tokenmill.sampling.metadata import RandomColumns, SamplingMetadata
from tokenmill.sampling.sampler import Sampler

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-6}


@pytest.fixture(params=isas.OF_ROWS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with isas.active(request.param):
        yield


def same_bits_by_row(
    compute: Callable[[slice], torch.Tensor], num_rows: int, whole: torch.Tensor
) -> None:
    """Rows alone and in parts, with one thread and several, give the bits of the whole."""
    for num_threads in (1, 2, 3):
        _native.set_num_threads(num_threads)
        for step in (1, 3, num_rows):
            for start in range(0, num_rows, step):
                rows = slice(start, min(start + step, num_rows))
                assert torch.equal(compute(rows), whole[rows])


@pytest.mark.parametrize("starts_stream", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "size"), [(0, 64), (1, 1), (5, 33), (37, 576), (3, 4100)])
def test_add_rms_norm(
    n: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype, starts_stream: bool
) -> None:
    x, weight = torch.randn(n, size).to(dtype), torch.randn(size)
    before = torch.full((n, size), torch.nan) if starts_stream else 3 * torch.randn(n, size)

    def compute(rows: slice, residual: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(residual), size), torch.nan, dtype=out_dtype)
        add_rms_norm(x[rows], residual, weight, 1e-5, out, starts_stream=starts_stream)
        return out

    residual = before.clone()
    out = compute(slice(None), residual)
    total = x.float() if starts_stream else before + x
    assert torch.equal(residual, total)
    expected = functional.rms_norm(total.double(), (size,), weight.double(), 1e-5)
    tolerance = TOLERANCE[out_dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-6)
    same_bits_by_row(lambda rows: compute(rows, before[rows].clone()), n, out) if n else None


@pytest.mark.parametrize("starts_stream", [False, True])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "size"), [(0, 64), (1, 1), (5, 33), (37, 576), (3, 4100)])
def test_add_layer_norm(
    n: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype, starts_stream: bool
) -> None:
    x, weight, bias = torch.randn(n, size).to(dtype) + 5, torch.randn(size), torch.randn(size)
    before = torch.full((n, size), torch.nan) if starts_stream else 3 * torch.randn(n, size)

    def compute(rows: slice, residual: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(residual), size), torch.nan, dtype=out_dtype)
        add_layer_norm(x[rows], residual, weight, bias, 1e-5, out, starts_stream=starts_stream)
        return out

    residual = before.clone()
    out = compute(slice(None), residual)
    total = x.float() if starts_stream else before + x
    assert torch.equal(residual, total)
    expected = functional.layer_norm(total.double(), (size,), weight.double(), bias.double(), 1e-5)
    tolerance = TOLERANCE[out_dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=2 * tolerance + 1e-5)
    same_bits_by_row(lambda rows: compute(rows, before[rows].clone()), n, out) if n else None


@pytest.mark.parametrize("starts_stream", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_residual(dtype: torch.dtype, starts_stream: bool) -> None:
    x, before = torch.randn(9, 100).to(dtype), torch.randn(9, 100)
    total = x.float() if starts_stream else before + x
    for out_dtype in DTYPES:
        residual, out = before.clone(), torch.full((9, 100), torch.nan, dtype=out_dtype)
        add_residual(x, residual, out, starts_stream=starts_stream)
        assert torch.equal(residual, total)
        assert torch.equal(out, total.to(out_dtype))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "size"), [(0, 4), (1, 1), (5, 33), (20, 768)])
def test_rows_of_a_table_are_added(
    n: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    x, table = torch.randn(n, size + 3).to(dtype)[:, 3:], torch.randn(11, size)
    rows = torch.randint(0, 11, (n,))
    out = torch.full((n, size), torch.nan, dtype=out_dtype)
    add_rows(x, table, rows, out)
    assert torch.equal(out, (x.float() + table[rows]).to(out_dtype))


def test_rows_that_a_table_does_not_have_are_refused() -> None:
    x, table = torch.randn(1, 8), torch.randn(11, 8)
    for wrong in (-1, 11):
        with pytest.raises(ValueError, match="rows of the table"):
            add_rows(x, table, torch.tensor([wrong]), torch.empty(1, 8))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "parts", "size"), [(0, 1, 4), (1, 1, 1), (7, 3, 24), (40, 16, 64)])
def test_copies_of_parts(
    n: int, parts: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    x = torch.randn(n, parts, size + 5).to(dtype)
    wide = torch.full((n, parts + 1, size + 9), torch.nan, dtype=out_dtype)
    copy(x[..., 5:], wide[:, 1:, 2 : 2 + size])
    assert torch.equal(wide[:, 1:, 2 : 2 + size], x[..., 5:].to(out_dtype))
    wide[:, 1:, 2 : 2 + size] = torch.nan
    assert wide.isnan().all()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "heads", "size"), [(0, 2, 64), (1, 1, 5), (19, 3, 80), (6, 9, 64)])
def test_head_rms_norm(
    n: int, heads: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Rows lie apart, as queries do among keys and values."""
    x = torch.randn(n, 7 + heads * size).to(dtype)[:, 7:]
    weight = torch.randn(size)

    def compute(rows: slice) -> torch.Tensor:
        part = x[rows]
        out = torch.full((len(part), heads * size), torch.nan, dtype=out_dtype)
        head_rms_norm(part, weight, 1e-5, out)
        return out

    out = compute(slice(None))
    by_head = x.double().unflatten(-1, (heads, size))
    expected = functional.rms_norm(by_head, (size,), weight.double(), 1e-5).flatten(1)
    tolerance = TOLERANCE[out_dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-6)
    same_bits_by_row(compute, n, out) if n else None


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "size"), [(0, 64), (1, 1), (5, 33), (20, 1536)])
def test_gated_activation(
    n: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype, gate: str
) -> None:
    gate_up = (4 * torch.randn(n, 2 * size)).to(dtype)
    gate_up[:, : size // 4] *= 100  # far tails

    def compute(rows: slice) -> torch.Tensor:
        part = gate_up[rows]
        out = torch.full((len(part), size), torch.nan, dtype=out_dtype)
        gated_activation(part, gate, out)
        return out

    out = compute(slice(None))
    x, up = gate_up.double().chunk(2, -1)
    activated = functional.silu(x) if gate == "silu" else functional.gelu(x, approximate="tanh")
    tolerance = TOLERANCE[out_dtype]
    torch.testing.assert_close(out.double(), activated * up, rtol=tolerance, atol=1e-5)
    same_bits_by_row(compute, n, out) if n else None


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "size"), [(0, 64), (1, 1), (5, 33), (20, 1536)])
def test_activation(
    n: int, size: int, dtype: torch.dtype, out_dtype: torch.dtype, gate: str
) -> None:
    x = (4 * torch.randn(n, size)).to(dtype)
    x[:, : size // 4] *= 100  # far tails

    def compute(rows: slice) -> torch.Tensor:
        out = torch.full(x[rows].shape, torch.nan, dtype=out_dtype)
        activation(x[rows], gate, out)
        return out

    out = compute(slice(None))
    exact = x.double()
    expected = (
        functional.silu(exact) if gate == "silu" else functional.gelu(exact, approximate="tanh")
    )
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[out_dtype], atol=1e-5)
    same_bits_by_row(compute, n, out) if n else None


@pytest.mark.parametrize(("n", "size"), [(1, 32), (16, 576), (39, 1536)])
def test_quantised_outputs_are_the_quantised_values(n: int, size: int) -> None:
    for num_threads in (1, 2):
        _native.set_num_threads(num_threads)
        x, residual, weight = torch.randn(n, size), torch.randn(n, size), torch.randn(size)
        values, codes = torch.empty(n, size), empty_quantized(n, size)
        add_rms_norm(x, residual.clone(), weight, 1e-6, values)
        add_rms_norm(x, residual.clone(), weight, 1e-6, codes)
        expected = quantize_rows(values)
        for part in ("codes", "scales", "scaled_sums", "sums"):
            assert torch.equal(getattr(codes, part), getattr(expected, part))
        add_layer_norm(x, residual.clone(), weight, weight, 1e-6, values)
        add_layer_norm(x, residual.clone(), weight, weight, 1e-6, codes)
        assert torch.equal(codes.codes, quantize_rows(values).codes)
        activation(x, "gelu_tanh", values)
        activation(x, "gelu_tanh", codes)
        assert torch.equal(codes.codes, quantize_rows(values).codes)
        gate_up = torch.randn(n, 2 * size)
        gated_activation(gate_up, "silu", values)
        gated_activation(gate_up, "silu", codes)
        assert torch.equal(codes.codes, quantize_rows(values).codes)
        assert torch.equal(codes.scales, quantize_rows(values).scales)


@pytest.mark.parametrize("vocab_size", [1, 17, 49152, 20011])
def test_scores(vocab_size: int) -> None:
    logits = 5 * torch.randn(6, vocab_size)
    logits[1] += 1000
    logits[2, 1:] = -torch.inf
    logits[3] -= 1000
    logits[4] = 0.125 * logits[4].round()  # many ties
    chosen = torch.randint(0, vocab_size, (6,)).numpy()
    chosen[2] = 0
    num_best = np.minimum([0, 3, 1, vocab_size, 20, 5], vocab_size)
    scores = score_tokens(logits, chosen, num_best)
    exact = logits.double().log_softmax(-1).numpy()
    assert scores.is_finite.all()
    for row, n in enumerate(num_best):
        order = np.argsort(-logits[row].numpy(), kind="stable")[:n]
        token_ids = scores.token_ids[row, : n + 1]
        np.testing.assert_array_equal(token_ids, [chosen[row], *order])
        np.testing.assert_allclose(
            scores.logprobs[row, : n + 1], exact[row, token_ids], rtol=1e-6, atol=1e-6
        )
    logit = logits.gather(-1, torch.from_numpy(chosen)[:, None])
    assert (scores.ranks == (logits >= logit).sum(-1).numpy()).all()

    def compute(rows: slice) -> torch.Tensor:
        return torch.from_numpy(score_tokens(logits[rows], chosen[rows], num_best[rows]).logprobs)

    alone = np.zeros(6, np.int64)
    num_best = alone
    same_bits_by_row(compute, 6, compute(slice(None)))


def test_scores_of_what_is_not_there_are_refused() -> None:
    logits, one = torch.randn(1, 9), np.ones(1, np.int64)
    for chosen, num_best in ((9 * one, one), (-one, one), (one, 10 * one), (one, -one)):
        with pytest.raises(ValueError, match=r"chosen|num_best"):
            score_tokens(logits, chosen, num_best)


def random_columns(generator: np.random.Generator, n: int, vocab_size: int) -> RandomColumns:
    def mix(off: float, values: object) -> np.ndarray:
        return np.where(generator.random(n) < 0.4, off, values)

    return RandomColumns(
        temperature=generator.uniform(0.2, 2.0, n).astype(np.float32),
        top_k=mix(0, generator.integers(1, 200, n) % vocab_size).astype(np.int64),
        top_p=mix(1.0, generator.uniform(0.05, 0.999, n)),
        min_p=mix(0.0, generator.uniform(0.001, 0.3, n)).astype(np.float32),
        seed=generator.integers(0, 2**64, n, dtype=np.uint64),
        position=generator.integers(0, 5000, n),
    )


def draw(
    logits: torch.Tensor, columns: RandomColumns, is_greedy: np.ndarray, rows: slice = slice(None)
) -> tuple[np.ndarray, np.ndarray]:
    return sample(
        logits[rows],
        is_greedy=is_greedy[rows],
        temperature=columns.temperature[rows],
        min_p=columns.min_p[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        seed=columns.seed[rows],
        position=columns.position[rows],
    )


@pytest.mark.parametrize("vocab_size", [1, 13, 500, 20011])
@pytest.mark.parametrize("seed", range(3))
def test_samples_are_those_of_the_torch_sampler(vocab_size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    n = 40
    logits = torch.from_numpy(generator.normal(0, [[3.0], [1.0]] * (n // 2), (n, vocab_size)))
    logits = logits.float()
    logits[: n // 4] = logits[: n // 4].round()  # many ties
    logits[n // 2 :, 1::3] = -torch.inf  # a grammar's mask
    columns = random_columns(generator, n, vocab_size)
    is_greedy = generator.random(n) < 0.2
    ids, is_valid = draw(logits, columns, is_greedy)
    expected = Sampler(chooser=TorchChooser()).forward(
        logits.clone(),
        SamplingMetadata(
            is_greedy=is_greedy,
            random=columns,
            wants_logprobs=np.zeros(n, np.bool_),
            num_logprobs=np.zeros(n, np.int64),
        ),
    )
    assert is_valid.all()
    np.testing.assert_array_equal(ids, expected.token_ids)
    for num_threads in (1, 2, 3):
        _native.set_num_threads(num_threads)
        for row in range(n):
            alone, _ = draw(logits, columns, is_greedy, slice(row, row + 1))
            assert alone[0] == ids[row]


@pytest.mark.parametrize("kind", ["equal", "flat", "two values", "steps", "one mass"])
@pytest.mark.parametrize("vocab_size", [1, 64, 49152])
def test_filters_of_many_like_logits(vocab_size: int, kind: str) -> None:
    """As many tokens are kept as the torch sampler keeps, of equal ones those with small ids."""
    generator = np.random.default_rng(0)
    row = {
        "equal": np.zeros(vocab_size),
        "flat": generator.normal(0, 0.01, vocab_size),
        "two values": np.where(np.arange(vocab_size) % 3 == 0, 1.0, 0.0),
        "steps": np.arange(vocab_size) // 7 * -0.05,
        "one mass": np.where(np.arange(vocab_size) == vocab_size // 2, 12.0, 0.0),
    }[kind]
    n = 20 if vocab_size > 1000 else 100
    logits = torch.from_numpy(row).float().repeat(n, 1)
    few = min(40, vocab_size)
    for top_k, top_p in ((0, 0.5), (0, 0.999), (0, 1e-9), (vocab_size // 2, 1.0), (few, 0.25)):
        columns = RandomColumns(
            temperature=np.full(n, 0.7, np.float32),
            top_k=np.full(n, top_k),
            top_p=np.full(n, top_p),
            min_p=np.zeros(n, np.float32),
            seed=generator.integers(0, 2**64, n, dtype=np.uint64),
            position=np.zeros(n, np.int64),
        )
        greedy = np.zeros(n, np.bool_)
        ids, _ = draw(logits, columns, greedy)
        expected, _ = TorchChooser().choose(
            logits.clone(),
            SamplingMetadata(
                is_greedy=greedy,
                random=columns,
                wants_logprobs=greedy,
                num_logprobs=np.zeros(n, np.int64),
            ),
        )
        np.testing.assert_array_equal(ids, expected)


def test_rows_without_a_best_token_are_invalid() -> None:
    logits = torch.randn(4, 300)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 299] = torch.inf
    columns = random_columns(np.random.default_rng(0), 4, 300)
    for greedy in (False, True):
        _, is_valid = draw(logits, columns, np.full(4, greedy))
        assert is_valid.tolist() == [False, False, False, True]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]]).repeat(20000, 1)
    n = len(logits)
    columns = RandomColumns(
        temperature=np.full(n, 0.7, np.float32),
        top_k=np.zeros(n, np.int64),
        top_p=np.ones(n),
        min_p=np.zeros(n, np.float32),
        seed=np.full(n, 99, np.uint64),
        position=np.arange(n),
    )
    ids, _ = draw(logits, columns, np.zeros(n, np.bool_))
    shares = np.bincount(ids, minlength=5) / n
    expected = (logits[0].double() / np.float32(0.7)).softmax(-1).numpy()
    np.testing.assert_allclose(shares, expected, atol=0.012)
