"""The served target in bf16, on compiled kernels and on torch operators, against fp32.

Both must be as close to the fp32 value of the same bf16 weights as bf16 activations allow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engines import engine
from sglang_dlite.platforms.kernels import SWITCH
from workloads import CHUNK, random_prompts

pytestmark = pytest.mark.server

LENGTHS = [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 75, 300]
NEW_TOKENS = 12
# Of log-probabilities, over six layers with activations rounded to 8 bits. Seen on qwen3: mean
# 0.025 and worst 0.08 with the kernels, 0.026 and 0.13 without.
ALLOWED = {"mean": 0.05, "worst": 0.3}
# Where rounding sends a token to another expert. Seen: mean 0.054, worst 0.65; transformers' own
# bf16, on other replies to the same prompts: 0.057 and 0.40.
ALLOWED_OF_EXPERTS = {"mean": 0.1, "worst": 0.8}


@pytest.mark.parametrize(
    "kind,switch",
    [
        ("qwen3", "1"),
        pytest.param("qwen3", "0", marks=pytest.mark.slow),
        *(
            pytest.param(kind, switch, marks=pytest.mark.slow)
            for kind in ("llama", "mistral", "qwen2", "qwen3_moe", "gemma3")
            for switch in ("1", "0")
        ),
    ],
)
def test_log_probabilities(kind: str, switch: str, tmp_path: Path) -> None:
    if switch == "1":
        pytest.importorskip("sglang_dlite_kernel", reason="the compiled kernels are not built")
    target = tiny_models.make_target(tmp_path / "target", kind)
    prompts = [list(prompt) for prompt in random_prompts(len(LENGTHS), LENGTHS)]
    with engine(target, dtype="bfloat16", chunked_prefill_size=CHUNK, env={SWITCH: switch}) as run:
        answers = run.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
    error = log_probability_errors(target, prompts, answers)
    print(f"{kind}, kernels {switch}: mean {error.mean():.4f}, worst {error.max():.4f}")
    allowed = ALLOWED_OF_EXPERTS if kind == "qwen3_moe" else ALLOWED
    assert error.mean() < allowed["mean"]
    assert error.max() < allowed["worst"]


def log_probability_errors(
    target: Path, prompts: list[list[int]], answers: list[dict[str, Any]]
) -> torch.Tensor:
    """|served - fp32| of each output token's log-probability, NEW_TOKENS per prompt."""
    errors = []
    model = reference(target)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = answer["output_ids"]
        assert len(ids) == NEW_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        served = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        errors.append((served - exact).abs())
    return torch.cat(errors)


def reference(target: Path) -> Any:
    """The target's bf16 weights, computed with in fp32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    return model.float()
