"""Temperature > 0: the law of the output is the target's, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from oracle_engine import LaunchOracle
from references import References
from workloads import Request

pytestmark = pytest.mark.server

TOP_K = 3
SAMPLES = 1200
TEMPERATURE = 2.0
# Chance of a sound sampler to fail; the seed is fixed, so that a pass is a pass.
SIGNIFICANCE = 1e-4


def target_law(target: Path, prompt: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `length` tokens, from HF's logits."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for ids, probability in law.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            top = (logits / TEMPERATURE).topk(TOP_K)
            for token, p in zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True):
                longer[(*ids, token)] = probability * p
        law = longer
    return law


def chi_square_p(observed: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """p-value; cells of fewer than 5 expected samples are taken together."""
    total = sum(observed.values())
    cells = [[0.0, 0.0]]
    for outcome, probability in law.items():
        cell = [float(observed[outcome]), probability * total]
        if cell[1] < 5:
            cells[0] = [cells[0][0] + cell[0], cells[0][1] + cell[1]]
        else:
            cells.append(cell)
    cells = [cell for cell in cells if cell[1] > 0]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half = torch.tensor((len(cells) - 1) / 2)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2)))


def test_the_law_of_the_first_tokens(references: References, launch_oracle: LaunchOracle) -> None:
    """Token 1 is the prefill's; 2 and 3 are verified drafts, rejected ones, and their followers.

    The oracle drafts the greedy continuation, which sampling follows now and then: a rule that
    favoured drafts, or took a rejected row's successor, would move the law of tokens 2 and 3.
    """
    request = references.requests["lengths"][0]
    params = {"temperature": TEMPERATURE, "top_k": TOP_K}
    sampled = Request(request.prompt, request.sequence, 3, params)
    law = target_law(references.target, request.prompt, 3)
    with launch_oracle(
        references.target, references.table, max_running_requests=64, random_seed=11
    ) as running:
        answers = running.play([sampled] * SAMPLES, "right")
        # A greedy request beside sampled ones is still greedy.
        neighbours = references.requests["mixed"][:8]
        together = running.play([*neighbours, *[sampled] * 8], "right")
    observed = Counter(tuple(answer["output_ids"]) for answer in answers)
    assert set(observed) <= set(law)  # nothing outside top_k
    accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    assert accepted > SAMPLES / 20  # else only rejections were tested
    assert chi_square_p(observed, law) > SIGNIFICANCE
    expected = references.expected("mixed")[:8]
    assert [answer["output_ids"] for answer in together[:8]] == expected
