"""Pivot states of each supported target class against transformers' hidden_states.

The Llama class is covered in every configuration of test_lossless.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import oracle
import pytest
import tiny_models
import torch
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from workloads import CHUNK, Request, random_prompts

pytestmark = [pytest.mark.server, pytest.mark.slow]

LENGTHS = [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 75]
NEW_TOKENS = 20


def greedy(target: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


Recorded = tuple[OracleEngine, list[Request], list[list[int]]]


@pytest.fixture(
    scope="module", params=["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3"]
)
def recorded(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    launch_oracle: LaunchOracle,
) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp(request.param)
    target = tiny_models.make_target(folder / "target", request.param)
    prompts = random_prompts(20, LENGTHS)
    outputs = [greedy(target, prompt, NEW_TOKENS + oracle.RECORDED) for prompt in prompts]
    sequences = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    table = oracle.record(folder / "table.safetensors", target, sequences, LENGTHS)
    layers = tiny_models.NUM_LAYERS
    ids = (layers - 1, *range(layers - 1))  # all of them, the last one first
    with launch_oracle(
        target, table, {"target_layer_ids": ids}, chunked_prefill_size=CHUNK
    ) as running:
        requests = [Request(prompt, i, NEW_TOKENS) for i, prompt in enumerate(prompts)]
        yield running, requests, [output[:NEW_TOKENS] for output in outputs]


def assert_known(running: OracleEngine, unrecorded: int) -> None:
    """All states but those of middle chunks are the recorded ones, each in its place."""
    errors = [error for entry in running.log() for error in entry["errors"]]
    assert sum(error >= oracle.TOLERANCE for error in errors) == unrecorded
    assert len(errors) > unrecorded


def test_batched(recorded: Recorded) -> None:
    running, requests, expected = recorded
    answers = running.play(requests, "cycle")
    assert output_ids(answers) == expected
    assert histograms(answers) == running.predicted(requests, "cycle")


def test_single_chunked_then_from_the_prefix_cache(recorded: Recorded) -> None:
    running, requests, expected = recorded
    for request, output in zip(requests, expected, strict=True):
        for flush in (True, False):
            (answer,) = running.play([request], "cycle", flush=flush)
            assert answer["output_ids"] == output
            assert_known(running, (len(request.prompt) - 1) // CHUNK if flush else 0)
