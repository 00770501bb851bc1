"""Request options at each verify row, against upstream's own code run one token at a time."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_dlite.speculative.target_tokens import target_tokens
from sglang_dlite.speculative.verify_logits import VerifyLogits

VOCAB = 37
WIDTH = 4
EOS = 36
POOL = torch.tensor([5, 2, 7, 0, 3])

# One request each; together a batch of every kind, one of them without any option.
PARAMS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.7, "repetition_penalty": 1.4},
    {"presence_penalty": 1.1, "frequency_penalty": -0.3},
    {},
    {"min_new_tokens": 7, "stop_token_ids": [3, 9], "max_new_tokens": 50},
    {"repetition_penalty": 0.8, "min_new_tokens": 200, "max_new_tokens": 300},
)


class Batch:
    """What the code reads of upstream's ScheduleBatch; the penalisers hold it weakly."""

    device = "cpu"

    def __init__(self, reqs: list[Any], pool: torch.Tensor, seq_lens: list[int], info: Any) -> None:
        self.reqs = reqs
        self.req_pool_indices = pool
        self.seq_lens = torch.tensor(seq_lens)
        self.sampling_info = info
        self.has_grammar = False
        self.return_logprob = False
        self.forward_mode = ForwardMode.DECODE


def request(params: dict[str, Any], output: list[int], prompt: int = 3, **fields: Any) -> Any:
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS)
    plain = {"eos_token_ids": {EOS}, "tokenizer": tokenizer, "grammar": None}
    return SimpleNamespace(
        sampling_params=SamplingParams(**params),
        origin_input_ids=array("q", range(1, prompt + 1)),
        output_ids=array("q", output),
        **(plain | fields),
    )


def sampling_info(n: int, penalised: bool = True, **fields: Any) -> SamplingBatchInfo:
    """The forward-only copy; upstream's stale sums are poison, so that a use of them shows."""
    poison = torch.full((n, VOCAB), float("nan")) if penalised else None
    return SamplingBatchInfo(
        temperatures=torch.ones(n, 1),
        top_ps=torch.ones(n),
        top_ks=torch.ones(n, dtype=torch.int32),
        min_ps=torch.zeros(n),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB,
        acc_additive_penalties=poison,
        acc_scaling_penalties=poison,
        device="cpu",
        **fields,
    )


def upstream_penalised(
    params: dict[str, Any], output: list[int], row: torch.Tensor
) -> torch.Tensor:
    """A row of logits after upstream's penalisers have been fed `output` token by token."""
    batch = Batch([request(params, [])], POOL[:1], [0], None)
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    penalisers: Any = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, kinds)
    for token in output:
        penalisers.cumulate_output_tokens(torch.tensor([token]))
    info = sampling_info(1, penalised=False, penalizer_orchestrator=penalisers)
    row = row[None].clone()
    info.copy_for_forward().apply_logits_bias(row)
    return row[0]


def make_options(width: int = WIDTH) -> VerifyLogits:
    return VerifyLogits(width, lambda: torch.zeros(9, 64, dtype=torch.int32))


def random_case(seed: int) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Outputs that end in the anchor, candidates [n, D] that begin with it, logits [n, D, V].

    Few distinct tokens, so that drafts repeat each other, the output and the anchor.
    """
    rng = random.Random(seed)
    outputs = [[rng.randrange(8) for _ in range(rng.randrange(1, 9))] for _ in PARAMS]
    drafts = [[rng.randrange(8) for _ in range(WIDTH - 1)] for _ in PARAMS]
    candidates = [[o[-1], *d] for o, d in zip(outputs, drafts, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(PARAMS), WIDTH, VOCAB, generator=generator) * 3
    return outputs, torch.tensor(candidates), logits


def expected_rows(
    outputs: list[list[int]], candidates: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    rows = [
        [
            upstream_penalised(params, [*output, *chain[1 : j + 1]], logits[i, j])
            for j in range(logits.shape[1])
        ]
        for i, (params, output, chain) in enumerate(
            zip(PARAMS, outputs, candidates.tolist(), strict=True)
        )
    ]
    return torch.stack([torch.stack(request_rows) for request_rows in rows])


def verify_batch(outputs: list[list[int]], lacking: list[int], info: Any = None) -> Batch:
    """A verify batch whose host knows all but the last `lacking` tokens of each output."""
    reqs = [
        request(params, output[: len(output) - lack])
        for params, output, lack in zip(PARAMS, outputs, lacking, strict=True)
    ]
    # Committed: the prompt and the output without the anchor.
    lens = [3 + len(output) - 1 for output in outputs]
    return Batch(reqs, POOL, lens, info or sampling_info(len(reqs)))


def apply(options: VerifyLogits, batch: Any, candidates: torch.Tensor, logits: torch.Tensor) -> Any:
    flat = logits.clone().flatten(0, 1)
    tree = options.before_verify(batch, candidates)
    options.apply(batch, candidates, flat, tree, None)
    return flat.view_as(logits)


@pytest.mark.parametrize("seed", range(6))
def test_penalties_of_every_row(seed: int) -> None:
    outputs, candidates, logits = random_case(seed)
    batch = verify_batch(outputs, [0] * len(PARAMS))
    got = apply(make_options(), batch, candidates, logits)
    torch.testing.assert_close(got, expected_rows(outputs, candidates, logits))
    assert (got[3, 0, 9] == float("-inf")) == (len(outputs[3]) < 7)


@pytest.mark.parametrize("seed", range(6))
def test_output_that_the_host_does_not_know_yet_counts(seed: int) -> None:
    """Under overlap; the pool row's older content, and a neighbour's, must not."""
    outputs, candidates, logits = random_case(seed)
    rng = random.Random(seed)
    options = make_options()
    lacking = [rng.randrange(min(len(output), WIDTH) + 1) for output in outputs]
    batch = verify_batch(outputs, lacking)
    options.after_step(batch, torch.full((len(PARAMS), WIDTH), 11))
    newest = [
        (output[len(output) - lack :] + [12] * WIDTH)[:WIDTH]
        for output, lack in zip(outputs, lacking, strict=True)
    ]
    order = torch.tensor([3, 0, 4, 1, 2])  # the batch was in another order a step ago
    before = Batch([], POOL[order], [], sampling_info(len(PARAMS)))
    options.after_step(before, torch.tensor(newest)[order])
    got = apply(options, batch, candidates, logits)
    torch.testing.assert_close(got, expected_rows(outputs, candidates, logits))


@pytest.mark.parametrize("mixed", [False, True])
def test_prefill_of_requests_that_have_output(mixed: bool) -> None:
    """Retracted requests, and decoding rows of a mixed batch, whose anchor may be pending."""
    outputs, _, logits = random_case(3)
    outputs[2] = []  # a fresh prompt among them
    options = make_options()
    batch = verify_batch(outputs, [int(mixed and bool(output)) for output in outputs])
    batch.seq_lens += 1  # a prefill's length has the anchor in it
    batch.seq_lens[2] = 2  # and a chunk of a prompt is shorter than it
    batch.forward_mode = ForwardMode.MIXED if mixed else ForwardMode.EXTEND
    newest = torch.tensor([[output[-1] if output else 30] for output in outputs])
    options.after_step(batch, newest)
    options.before_extend(batch, None)
    got = logits[:, 0].clone()
    batch.sampling_info.apply_logits_bias(got)
    rows = [
        upstream_penalised(params, output, logits[i, 0])
        for i, (params, output) in enumerate(zip(PARAMS, outputs, strict=True))
    ]
    torch.testing.assert_close(got, torch.stack(rows))


def test_fresh_prompts_keep_upstreams_penalties() -> None:
    batch = verify_batch([[] for _ in PARAMS], [0] * len(PARAMS))
    before = batch.sampling_info.acc_additive_penalties
    batch.forward_mode = ForwardMode.EXTEND
    make_options().before_extend(batch, None)
    assert batch.sampling_info.acc_additive_penalties is before


def test_a_batch_without_options_is_untouched_and_costs_no_memory() -> None:
    outputs, candidates, logits = random_case(0)
    options = VerifyLogits(WIDTH, lambda: pytest.fail("no history is needed"))
    info = sampling_info(len(PARAMS), penalised=False)
    batch = verify_batch(outputs, [0] * len(PARAMS), info)
    assert torch.equal(apply(options, batch, candidates, logits), logits)
    options.after_step(batch, candidates)
    batch.forward_mode = ForwardMode.EXTEND
    options.before_extend(batch, None)


def test_logit_bias_comes_after_penalties() -> None:
    outputs, candidates, logits = random_case(4)
    bias = torch.randn(len(PARAMS), VOCAB)
    info = sampling_info(len(PARAMS), logit_bias=bias)
    batch = verify_batch(outputs, [0] * len(PARAMS), info)
    got = apply(make_options(), batch, candidates, logits)
    torch.testing.assert_close(got, expected_rows(outputs, candidates, logits) + bias[:, None])


class WritesItsPrefix(CustomLogitProcessor):
    """Puts what it sees of its request where a test can read it."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        assert logits.shape[0] == len(custom_param_list)
        for row, params in zip(logits, custom_param_list, strict=True):
            req = params["__req__"]
            seen = [*req.origin_input_ids, *req.output_ids]
            row.zero_()
            row[: len(seen)] = torch.tensor(seen, dtype=row.dtype)
            row[-1] = params["mark"]
        return logits


def with_processor(info: Any, reqs: list[Any], rows: list[int]) -> None:
    info.has_custom_logit_processor = True
    entry = ProcessorEntry(WritesItsPrefix(), rows, torch.tensor(rows))
    info.custom_logit_processor = {0: entry}
    info.custom_params = [
        {"mark": 100.0 + i, "__req__": req} if i in rows else None for i, req in enumerate(reqs)
    ]


def test_drafts_beyond_the_vocabulary() -> None:
    """A padded head may draft them: no penalty, and no processor of a user's, meets such an id."""
    outputs, candidates, logits = random_case(2)
    candidates[:, 2] = VOCAB + 5
    batch = verify_batch(outputs, [0] * len(PARAMS))
    with_processor(batch.sampling_info, batch.reqs, [4])
    got = apply(make_options(), batch, candidates, logits)
    expected = expected_rows(outputs, candidates[:, :2], logits[:, :2])
    torch.testing.assert_close(got[:4, :2], expected[:4])  # rows behind it are thrown away
    assert got[4].max(dim=-1).values.tolist() == [104.0] * WIDTH
    assert (got[4, :, :-1] < VOCAB).all()


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_processor_sees_each_rows_own_request(lacking: int) -> None:
    outputs, candidates, logits = random_case(5)
    options = make_options()
    batch = verify_batch(outputs, [lacking] * len(PARAMS), sampling_info(len(PARAMS), False))
    with_processor(batch.sampling_info, batch.reqs, [1, 4])
    options.after_step(batch, torch.tensor([[output[-1]] for output in outputs]))
    got = apply(options, batch, candidates, logits)
    for i, output in enumerate(outputs):
        for j in range(WIDTH):
            if i not in (1, 4):
                assert torch.equal(got[i, j], logits[i, j])
                continue
            seen = [1, 2, 3, *output, *candidates[i, 1 : j + 1].tolist()]
            assert got[i, j, : len(seen)].tolist() == seen
            assert not got[i, j, len(seen) : -1].any()
            assert got[i, j, -1] == 100 + i
    assert "__req__" in batch.sampling_info.custom_params[1]
    assert len(batch.reqs[1].output_ids) == len(outputs[1]) - lacking  # not written to


def test_a_processor_in_a_mixed_batch_sees_pending_output() -> None:
    outputs, _, _ = random_case(6)
    options = make_options()
    batch = verify_batch(outputs, [1] * len(PARAMS), sampling_info(len(PARAMS), False))
    batch.seq_lens += 1
    batch.forward_mode = ForwardMode.MIXED
    with_processor(batch.sampling_info, batch.reqs, [0, 2])
    options.after_step(batch, torch.tensor([[output[-1]] for output in outputs]))
    options.before_extend(batch, None)
    params = batch.sampling_info.custom_params
    assert [params[i]["__req__"].output_ids.tolist() for i in (0, 2)] == [outputs[0], outputs[2]]
    assert params[1] is None


def test_the_sampler_gets_the_changed_logits_and_applies_nothing_again() -> None:
    outputs, candidates, logits = random_case(1)
    info = sampling_info(len(PARAMS), logit_bias=torch.ones(len(PARAMS), VOCAB))
    info.is_all_greedy = False
    batch = verify_batch(outputs, [0] * len(PARAMS), info)
    with_processor(info, batch.reqs, [0])
    changed = apply(make_options(), batch, candidates, logits).flatten(0, 1)
    calls: list[Any] = []

    def sampler(output: Any, rows: Any, *rest: Any) -> torch.Tensor:
        calls.append((output.next_token_logits.clone(), rows))
        return output.next_token_logits.argmax(dim=1)

    output = LogitsProcessorOutput(next_token_logits=changed)
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        target_tokens(sampler, batch, output, torch.arange(len(changed)))
    ((seen, rows),) = calls
    assert torch.equal(seen, changed)
    assert rows.logit_bias is None and not rows.has_custom_logit_processor
    assert len(rows) == len(changed)


def test_a_cpu_compiles_no_penalty() -> None:
    """Upstream compiles its repetition penalty: with inductor it would need a C++ compiler."""
    from sglang_dlite.platforms.cpu import DLiteCpuPlatform

    assert DLiteCpuPlatform.get_compile_backend(DLiteCpuPlatform.__new__(DLiteCpuPlatform)) == (
        "eager"
    )
