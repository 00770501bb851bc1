"""Projection, argmax and noise under Triton's interpreter (run by test_triton_interpreter.py)."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, SIZES, filled
from sglang_dlite.kernels.projection import (
    VOCAB_BLOCK,
    Sampling,
    plan_project,
    project_reference,
)
from sglang_dlite.kernels.recurrence import pick_reference
from torch import Tensor


def project(
    vectors: Tensor, weight: Tensor, sampling: Sampling | None = None
) -> tuple[Tensor, Tensor]:
    launch, outputs = plan_project(vectors, weight, sampling)
    launch.run()
    return outputs


@pytest.mark.parametrize(
    "size,dtype,n",
    [
        *(("odd", dtype, n) for dtype in DTYPES for n in (0, 1, 64, 70)),
        *(("4b", "bf16", n) for n in (1, 64)),
        ("8b", "bf16", 1),
        *(
            pytest.param(size, dtype, n, marks=pytest.mark.slow)
            for size in ("4b", "8b")
            for dtype in DTYPES
            for n in (0, 1, 64, 70)
        ),
    ],
)
def test_candidates(size: str, dtype: str, n: int) -> None:
    shape, kind = SIZES[size], DTYPES[dtype]
    vectors = filled(n, shape.rank, dtype=kind)
    weight = filled(shape.vocab, shape.rank, dtype=kind, seed=1)
    values, ids = project(vectors, weight)
    expected, _ = project_reference(vectors, weight, None)
    assert values.shape == ids.shape == (n, -(-shape.vocab // VOCAB_BLOCK))
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-4)
    # The id is that of the value, up to a tie in the last bits.
    logits = vectors.float() @ weight.float().t()
    torch.testing.assert_close(logits.gather(1, ids), values, rtol=1e-5, atol=1e-4)
    assert (ids // VOCAB_BLOCK == torch.arange(ids.shape[1])).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, 1, 127, 128, 255, 299])
def test_ties_go_to_the_lowest_id(dtype: str, first: int) -> None:
    weight = torch.zeros(300, 16, dtype=DTYPES[dtype])
    weight[first:] = 1
    values, ids = project(torch.ones(2, 16, dtype=DTYPES[dtype]), weight)
    assert pick_reference(values, ids).tolist() == [first, first]


def test_nan_still_gives_tokens_of_the_vocabulary() -> None:
    weight = filled(131, 16, dtype=torch.float32)
    weight[40] = float("nan")
    vectors = filled(3, 16, dtype=torch.float32)
    vectors[1] = float("nan")
    values, ids = project(vectors, weight)
    tokens = pick_reference(values, ids)
    logits = vectors @ weight.t()
    assert tokens.tolist() == torch.where(logits.isnan(), -torch.inf, logits).argmax(-1).tolist()
    assert tokens[1] == 0


def _sampling(n: int) -> Sampling:
    return Sampling(
        torch.tensor([0.0, 0.7, 1.5])[torch.arange(n) % 3],
        torch.rand(n, 3, generator=torch.Generator().manual_seed(1))
        .double()
        .view(torch.int64)[:, 1],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_scores(dtype: str) -> None:
    n = 18
    vectors = filled(n, 40, dtype=DTYPES[dtype])
    weight = filled(300, 40, dtype=DTYPES[dtype], seed=1)
    sampling = _sampling(n)
    values, ids = project(vectors, weight, sampling)
    expected, expected_ids = project_reference(vectors, weight, sampling)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(ids, expected_ids)
    greedy, _ = project(vectors, weight)
    assert torch.equal(values[::3], greedy[::3])  # temperature 0


def test_a_draw_does_not_depend_on_the_batch() -> None:
    vectors, weight = filled(20, 16, dtype=torch.float32), filled(200, 16, dtype=torch.float32)
    sampling = _sampling(20)
    values, ids = project(vectors, weight, sampling)
    for i in (1, 19):
        one = Sampling(*(part[i : i + 1] for part in sampling))
        alone_values, alone_ids = project(vectors[i : i + 1], weight, one)
        assert torch.equal(alone_values[0], values[i])
        assert torch.equal(alone_ids[0], ids[i])
