"""Training code, transformers and SGLang agree on states, draft logits and the drafted block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from engines import engine
from safetensors.torch import load_file
from sglang_dlite.drafter import load_drafter
from sglang_dlite.training.anchors import AnchorSpec, Pick, Reply
from sglang_dlite.training.objective import predict
from sglang_dlite.training.states import OnlineStates
from sglang_dlite.training.targets import SUPPORTED_TARGETS, FrozenTarget
from workloads import random_prompts

from .parity_probe import FOLDER_VARIABLE

KINDS = ("llama", "mistral", "qwen2", "qwen3")
PROMPT_LENGTHS = [3, 17, 64, 130]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def _load(path: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _check_training_against_hf(target: Path, drafter_path: Path, replies: list[Reply]):
    """Compares with plain transformers; returns the training side's batch, drafter and embed."""
    plain, frozen = _load(target), FrozenTarget(_load(target))
    drafter = load_drafter(drafter_path)
    spec = AnchorSpec.of(drafter.config, 0)
    picks = [Pick(i, reply.places) for i, reply in enumerate(replies)]
    batch = OnlineStates(frozen, replies).batch(picks, spec)
    embed = torch.nn.Embedding.from_pretrained(frozen.embedding)
    hf_states, hf_groups = [], []
    for reply in replies:
        tokens = reply.tokens.tolist()
        with torch.no_grad():
            hidden = plain(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        for place in reply.places:
            a = len(reply.prompt_ids) + place
            hf_states.append(torch.stack([hidden[i + 1][0, a - 1] for i in spec.layer_ids]))
            hf_groups.append(tokens[a - spec.group_size + 1 : a + 1])
    states, groups = torch.stack(hf_states), torch.tensor(hf_groups)
    torch.testing.assert_close(batch.pivot_states, states, **TOLERANCE)
    assert torch.equal(batch.token_group, groups)
    block = drafter.draft(states, groups, plain.get_input_embeddings())
    ours = drafter.draft(batch.pivot_states, batch.token_group, embed)
    assert torch.equal(ours.token_ids, block.token_ids)
    # The teacher-forced path, fed the block itself, gives the logits that the block came from.
    forced = batch._replace(next_tokens=block.token_ids)
    with torch.no_grad():
        logits = drafter.draft_logits(predict(drafter, forced, embed).vectors)
    torch.testing.assert_close(logits, drafter.draft_logits(block.head_vectors), **TOLERANCE)
    return batch, ours.token_ids, logits


def _to_unit_size(states: torch.Tensor) -> torch.Tensor:
    """As the drafter sees them: a residual stream's rounding grows with the whole vector."""
    return states / states.square().mean(-1, keepdim=True).sqrt()


def _replies(prompts, answers: list[list[int]]) -> list[Reply]:
    return [
        Reply(f"{i}#0", "s", 0, np.array(prompt, np.int32), np.array(answer, np.int32))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def test_every_supported_class_is_covered() -> None:
    classes = [tiny_models.target_config(kind).model_type for kind in KINDS]
    assert sorted(classes) == sorted(KINDS) and len(SUPPORTED_TARGETS) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_training_agrees_with_transformers(kind: str, tmp_path: Path) -> None:
    target = tiny_models.make_target(tmp_path / "target", kind)
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    prompts = random_prompts(3, [3, 40])
    answers = [list(reply) for reply in random_prompts(4, [12, 9])]
    _check_training_against_hf(target, drafter, _replies(prompts, answers))


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("kind", KINDS)
def test_sglang_agrees_with_training(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # a spawned process inherits it
    target = tiny_models.make_target(tmp_path / "target", kind)
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    (tmp_path / "calls").mkdir()
    environment = {
        "DLITE_DRAFTER_FACTORY": "parity_probe:make",
        FOLDER_VARIABLE: str(tmp_path / "calls"),
    }
    prompts = random_prompts(5, PROMPT_LENGTHS)
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with engine(target, drafter, env=environment) as running:
        answers = running.generate(input_ids=[list(p) for p in prompts], sampling_params=params)
    replies = _replies(prompts, [answer["output_ids"] for answer in answers])
    batch, tokens, logits = _check_training_against_hf(target, drafter, replies)
    calls = [load_file(file) for file in sorted((tmp_path / "calls").iterdir())]
    served = {name: torch.cat([call[name] for call in calls]) for name in calls[0]}
    # Blocks of the warm-up, and those drafted at a reply's end, are not in the batch; every block
    # that a verify pass used is. Other anchors' states differ by whole units.
    ours, theirs = batch.pivot_states.flatten(1), served["states"].flatten(1)
    exact = "donot_use_mm_for_euclid_dist"  # by products, large states lose what is compared
    distances = torch.cdist(theirs, ours, compute_mode=exact)
    known = distances.amin(1) < 0.1
    assert known.sum() >= sum(answer["meta_info"]["spec_verify_ct"] for answer in answers) > 60
    rows = distances.argmin(1)[known]
    assert torch.equal(served["group"][known], batch.token_group[rows])
    torch.testing.assert_close(
        _to_unit_size(served["states"][known]), _to_unit_size(batch.pivot_states[rows]), **TOLERANCE
    )
    assert torch.equal(served["tokens"][known], tokens[rows])
    torch.testing.assert_close(served["logits"][known], logits[rows], **TOLERANCE)
