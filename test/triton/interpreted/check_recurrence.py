"""The head's state step under Triton's interpreter (run by test_triton_interpreter.py)."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, SIZES, filled, recurrence_weights
from sglang_dlite.kernels import recurrence

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(
    "size,dtype,n",
    [
        *((size, dtype, n) for size in ("odd", "one-head") for dtype in DTYPES for n in (0, 1, 3)),
        *((size, "bf16", 1) for size in ("4b", "8b")),
        *(
            pytest.param(size, dtype, 3, marks=pytest.mark.slow)
            for size in ("4b", "8b")
            for dtype in DTYPES
        ),
    ],
)
def test_advance_and_combine(size: str, dtype: str, n: int) -> None:
    shape, kind = SIZES[size], DTYPES[dtype]
    weights = recurrence_weights(shape, kind)
    arguments = (weights["embedding"], weights["state"], weights["bias"])
    generator = torch.Generator().manual_seed(n)
    group = torch.randint(shape.vocab, (n, 2), generator=generator)
    values = filled(n, 37, dtype=torch.float32)
    ids = torch.randint(shape.vocab, (n, 37), generator=generator)
    state = None
    # The anchor, which is a column of a wider tensor; then a token from among candidates.
    for candidates in ((None, group[:, -1:]), (values, ids)):
        launch, (token, following) = recurrence.plan_advance(*candidates, state, *arguments)
        launch.run()
        expected_token, expected = recurrence.advance_reference(*candidates, state, *arguments)
        assert torch.equal(token, expected_token)
        torch.testing.assert_close(following, expected, **CLOSE)
        state = following
    projected = filled(n, 3, shape.rank, dtype=kind)[:, 1]  # rows with a stride
    launch, vectors = recurrence.plan_combine(state, weights["mix"], projected)
    launch.run()
    exact = recurrence.combine_reference(state, weights["mix"], projected.float())
    rounding = {"rtol": 2**-8, "atol": 1e-5} if dtype == "bf16" else CLOSE
    torch.testing.assert_close(vectors.float(), exact, **rounding)


def test_the_lowest_id_of_equal_candidates() -> None:
    values = torch.tensor([[1.0, 2.0, 2.0], [float("-inf")] * 3, [3.0, 2.0, 3.0]])
    ids = torch.tensor([[5, 9, 7], [300, 200, 100], [4, 1, 2]])
    launch, tokens = recurrence.plan_pick(values, ids)
    launch.run()
    assert tokens.tolist() == [7, 100, 2]
    assert torch.equal(tokens, recurrence.pick_reference(values, ids))


@pytest.mark.parametrize("token", [-1, 131, 2**40])
def test_an_id_outside_the_vocabulary_embeds_as_zero(token: int) -> None:
    weights = recurrence_weights(SIZES["odd"], torch.float32)
    arguments = (weights["embedding"], weights["state"], weights["bias"])
    launch, (_, state) = recurrence.plan_advance(None, torch.tensor([[token]]), None, *arguments)
    launch.run()
    gate, candidate = weights["bias"].chunk(2)
    expected = (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
    torch.testing.assert_close(state[0], expected, **CLOSE)
