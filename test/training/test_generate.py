"""Generation with a tiny random model: right tokens, right records, resumable."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_dlite.training import generate as command
from sglang_dlite.training.decoder import Request, SlotDecoder
from sglang_dlite.training.generate import select_target_layers
from sglang_dlite.training.replies import read_parts

LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers with grouped heads and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(vocab), eos_token_id=0, bos_token_id=None,
        pad_token_id=0, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _model(target: Path, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=dtype)


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_tokens_states_and_laws_equal_a_plain_forward(target: Path, slots: int) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(1, 250, (length,), generator=generator).tolist()
        for length in (3, 17, 9, 1, 30, 12, 5)
    ]
    reference, model = _model(target), _model(target)
    finished: list[Request] = []
    decoder = SlotDecoder(model, LAYERS, [0], slots, top_count=5)
    decoder.decode([Request(i, p) for i, p in enumerate(prompts)], 12, finished.append)
    assert sorted(r.key for r in finished) == list(range(len(prompts)))
    for request in finished:
        prompt, reply = prompts[request.key], request.reply_ids
        assert len(reply) == 12 or reply[-1] == 0
        with torch.no_grad():
            whole = reference(torch.tensor([prompt + reply]), output_hidden_states=True)
        rows = slice(len(prompt) - 1, len(prompt) - 1 + len(reply))
        logits = whole.logits[0, rows]
        assert logits.argmax(-1).tolist() == reply
        hidden = torch.stack([whole.hidden_states[i + 1][0, rows] for i in LAYERS], 1)
        torch.testing.assert_close(torch.stack(request.states), hidden, atol=2e-4, rtol=1e-3)
        top = logits.log_softmax(-1).topk(5, -1)
        assert torch.stack(request.top_ids).tolist() == top.indices.tolist()
        torch.testing.assert_close(
            torch.stack(request.top_logprobs).float(), top.values, atol=5e-3, rtol=2e-3
        )


def _args(target: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    fixed = ["--target", str(target), "--out", str(out), "--max-new-tokens", "6", "--slots", "4"]
    return parser.parse_args([*fixed, "--target-layers", "3", "--top", "4", *more])


def _prompt_file(path: Path) -> Path:
    turns = [["hi there"], ["one", "two", "three"], ["x" * 30], ["what?", "why?"]]
    rows = [{"messages": [{"role": "user", "content": t} for t in session]} for session in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _by_id(out: Path) -> dict[str, tuple]:
    found = {}
    for part in read_parts(out):
        for record in part.records:
            rows = slice(record["row"], record["row"] + len(record["reply_ids"]))
            assert record["id"] not in found, "duplicate"
            found[record["id"]] = (record["reply_ids"], np.array(part.states[rows]))
    return found


def test_a_killed_run_is_completed_without_loss_or_duplicates(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = str(_prompt_file(tmp_path / "prompts.jsonl"))
    assert command.run(_args(target, tmp_path / "whole", "--prompts", prompts)) == 0
    whole = _by_id(tmp_path / "whole")
    assert sorted(whole) == sorted(
        f"prompts/{i}#{t}" for i, turns in enumerate((1, 3, 1, 2)) for t in range(turns)
    )

    class Killed(BaseException):
        pass

    append, count = command.ReplyWriter.append, 0

    def failing(self, *args):
        nonlocal count
        count += 1
        if count == 4:
            self.commit()
            raise Killed
        append(self, *args)

    monkeypatch.setattr(command.ReplyWriter, "append", failing)
    broken = _args(target, tmp_path / "broken", "--prompts", prompts)
    with pytest.raises(Killed):
        command.generate(broken)
    monkeypatch.setattr(command.ReplyWriter, "append", append)
    assert len(_by_id(tmp_path / "broken")) == 3
    assert command.run(broken) == 0
    again = _by_id(tmp_path / "broken")
    assert {k: v[0] for k, v in again.items()} == {k: v[0] for k, v in whole.items()}
    assert all(len(states) == len(ids) for ids, states in again.values())


def test_shards_share_the_prompts(target: Path, tmp_path: Path) -> None:
    prompts = str(_prompt_file(tmp_path / "prompts.jsonl"))
    for share in ("0/2", "1/2"):
        args = _args(target, tmp_path / "out", "--prompts", prompts, "--shard", share)
        assert command.run(args) == 0
    assert len(_by_id(tmp_path / "out")) == 7


def test_evaluation_prompts_are_left_out(target: Path, tmp_path: Path) -> None:
    prompts = str(_prompt_file(tmp_path / "prompts.jsonl"))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": ["HI, there!"]}) + "\n")
    args = _args(target, tmp_path / "out", "--prompts", prompts)
    args.exclude = [tmp_path / "eval.jsonl"]
    assert command.run(args) == 0
    assert not any(name.startswith("prompts/0#") for name in _by_id(tmp_path / "out"))


def test_bad_arguments_are_reported(target: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert command.run(_args(target, out, "--prompts", "nowhere.jsonl")) == 1
    assert "'nowhere.jsonl' does not exist" in capsys.readouterr().err
    assert command.run(_args(target, out, "--builtin", "poems=3")) == 1
    assert "--builtin poems=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layers,count,expected",
    [
        (36, 14, (0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35)),
        (36, 7, (0, 1, 9, 17, 26, 34, 35)),
        (36, 12, (0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35)),
        (30, 8, (0, 1, 6, 12, 17, 23, 28, 29)),
        (4, 3, (0, 1, 3)),
        (4, 2, (0, 3)),
    ],
)
def test_target_layers_follow_the_official_rule(layers: int, count: int, expected: tuple) -> None:
    assert select_target_layers(layers, count) == expected
