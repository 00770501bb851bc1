"""Sample and match: every verify row samples as plain decoding would at its place."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chi_square import p_value
from sampler_rows import VOCAB, Row, naive_law, sampling_info
from sglang.kernels.ops.attention.clamp_position import clamp_position
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang_dlite.speculative.inputs import DLiteVerifyInput
from sglang_dlite.speculative.target_tokens import expand_sampling_info, likeliest, target_tokens
from sglang_dlite.speculative.verify_batch import verify_batch

WIDTH = 3
# No two requests share a parameter: a row that took its neighbour's would have another law.
ROWS: list[Row] = [
    (0.4, TOP_K_ALL, 0.95, 0.0),
    (1.0, 7, 0.9, 0.02),
    (1.7, 11, 0.8, 0.05),
    (3.0, 23, 0.6, 0.3),
]
SEEDLESS = 42  # what upstream gives a request that states no seed


@pytest.fixture(autouse=True)
def one_eager_rank() -> Iterator[None]:
    """Upstream compiles its seeded draw, which would take a C++ compiler a minute."""
    one = SimpleNamespace(world_size=1)
    with get_parallel().override(tp_group=one), torch.compiler.set_stance("force_eager"):
        yield


def logits_of(rows: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def batch_of(info: Any, seq_lens: list[int]) -> Any:
    """What the code reads of upstream's ScheduleBatch."""
    lengths = torch.tensor(seq_lens)
    return SimpleNamespace(
        sampling_info=info,
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=int(lengths.sum()),
        req_pool_indices=torch.arange(len(seq_lens)),
        return_logprob=False,
    )


# -- each row's parameters ----------------------------------------------------------------------


def test_a_row_has_the_parameters_of_its_request() -> None:
    seeds = [3, 9, 3, SEEDLESS]
    info = sampling_info(ROWS, seeds)
    info.logit_bias = torch.ones(len(ROWS), VOCAB)
    info.grammars = [None, object(), None, None]
    expanded = expand_sampling_info(info, WIDTH)
    columns = [expanded.temperatures[:, 0], expanded.top_ks, expanded.top_ps, expanded.min_ps]
    expected = [parameter for row in ROWS for parameter in [row] * WIDTH]
    for column, values in zip(columns, zip(*expected, strict=True), strict=True):
        assert column.tolist() == pytest.approx(values)
    assert expanded.temperatures.shape == (len(ROWS) * WIDTH, 1)
    assert expanded.sampling_seed.tolist() == [seed for seed in seeds for _ in range(WIDTH)]
    assert expanded.need_min_p_sampling and expanded.need_top_p_sampling
    assert expanded.need_top_k_sampling and not expanded.is_all_greedy
    assert expanded.logit_bias is None and expanded.grammars is None
    assert len(info) == len(ROWS) and info.logit_bias is not None  # the batch's own stays
    assert expand_sampling_info(sampling_info(ROWS), WIDTH).sampling_seed is None


def test_each_request_samples_its_own_law(sampler: Any) -> None:
    """Unequal filters and temperatures in one batch; many rows of equal logits are many draws."""
    draws = 4000
    logits = logits_of(len(ROWS))
    output = LogitsProcessorOutput(next_token_logits=logits.repeat_interleave(draws, dim=0))
    torch.manual_seed(0)
    batch = batch_of(sampling_info(ROWS), [5] * len(ROWS))
    tokens = target_tokens(sampler, batch, output, torch.zeros(len(ROWS) * draws))
    for drawn, row, params in zip(tokens, logits.tolist(), ROWS, strict=True):
        law = torch.tensor(naive_law(row, params))
        assert p_value(drawn.bincount(minlength=VOCAB), law) > 1e-4


# -- seeds --------------------------------------------------------------------------------------


class Recorder:
    """A sampler that writes down (seed, position) of its rows."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.seen: list[list[tuple[int, int]]] = []

    def __call__(self, output: Any, info: Any, *rest: Any) -> torch.Tensor:
        *_, positions = rest
        self.seen.append(list(zip(info.sampling_seed.tolist(), positions.tolist(), strict=True)))
        return self.sampler(output, info, *rest)


def plain_step(recorder: Recorder, info: Any, logits: torch.Tensor, lengths: list[int]) -> Any:
    """Upstream's decoding step of requests that are `lengths` tokens long, the newest included."""
    runner: Any = SimpleNamespace(
        sampler=recorder,
        sampling_observer=None,
        watermark_state=None,
        _preprocess_logits=lambda *_: None,
        ngram_embedding_manager=SimpleNamespace(update_after_decode=lambda **_: None),
    )
    forward_batch: Any = SimpleNamespace(
        sampling_info=info,
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        forward_mode=ForwardMode.DECODE,
        positions=clamp_position(torch.tensor(lengths)),
    )
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    return ModelRunner.sample(runner, output, forward_batch)


def test_a_seeded_row_draws_what_plain_decoding_draws_there(
    sampler: Any, hashing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row j is the step at which the anchor and j drafts are the newest output."""
    monkeypatch.setattr(
        DLiteVerifyInput,
        "prepare_for_verify",
        lambda self, *_, **__: (SimpleNamespace(positions=self.positions), False),
    )
    # Seeded, upstream refuses min_p. Two requests share a seed, and two a length.
    rows: list[Row] = [(temperature, k, p, 0.0) for temperature, k, p, _ in ROWS]
    seeds, committed = [7, 7, SEEDLESS, 2**40 + 1], [9, 4, 30, 9]
    n = len(rows)
    info, logits = sampling_info(rows, seeds), logits_of(n * WIDTH)
    recorder = Recorder(sampler)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(
            device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(n, 64))
        )
    )
    batch = batch_of(info, committed)
    candidates = torch.zeros(n, WIDTH, dtype=torch.int64)
    positions = verify_batch(batch, candidates, torch.arange(8), worker).positions
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    tokens = target_tokens(recorder, batch, output, positions)
    (verified,) = recorder.seen
    for j in range(WIDTH):
        lengths = [length + 1 + j for length in committed]
        plain = plain_step(recorder, info, logits[j::WIDTH], lengths)
        assert verified[j::WIDTH] == recorder.seen[-1]
        assert tokens[:, j].tolist() == plain.tolist()
    assert len(set(verified)) == n * WIDTH  # else a shifted row might look the same


@pytest.mark.parametrize("vocab", [5, 49_152, 151_936])
def test_ties_are_decided_as_by_plain_decoding(vocab: int) -> None:
    """A bf16 target's logits tie often; upstream's greedy sampler takes torch.argmax of them."""
    torch.manual_seed(0)
    logits = torch.randn(16, vocab).to(torch.bfloat16).float().clamp(max=1)  # a tie at the top
    logits[0] = -torch.inf
    logits[0, vocab // 2] = 0  # what a grammar may leave
    assert torch.equal(likeliest(logits), torch.argmax(logits, dim=-1))
