"""A stand-in for sglang.Engine, and what the tests of `generate` share."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from sglang_dlite.training import generate as command
from sglang_dlite.training.dataset import load_replies
from transformers import AutoTokenizer

from .conftest import VOCAB


class Killed(Exception):
    """Whatever ends a run."""


class FakeEngine:
    """Answers with a function of the prompt; dies after `lives` answers."""

    def __init__(self, lives: int = 10**9) -> None:
        self.lives, self.asked, self.together, self.most = lives, [], 0, 0
        self.loop = asyncio.new_event_loop()

    async def async_generate(self, input_ids: list[int], sampling_params: dict) -> dict:
        self.asked.append((input_ids, sampling_params))
        number = len(self.asked)
        self.together += 1
        self.most = max(self.most, self.together)
        for _ in range(len(input_ids) % 5 + 1):  # answers come in another order
            await asyncio.sleep(0)
        self.together -= 1
        if len(self.asked) > self.lives:
            raise Killed
        ids = [65 + (sum(input_ids) + i) % 26 for i in range(20)]
        if sampling_params["temperature"]:
            ids[0] = 65 + number % 26
        return {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop", "matched": 0}}}


def arguments(target: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    fixed = ["--target", str(target), "--out", str(out), "--max-new-tokens", "20"]
    return parser.parse_args([*fixed, "--concurrency", "3", *more])


def prompt_file(path: Path) -> str:
    turns = [["hi there"], ["one", "two", "three"], ["x" * 30], ["what?", "why?"]]
    rows = [{"messages": [{"role": "user", "content": t} for t in session]} for session in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def by_id(out: Path) -> dict[str, tuple]:
    replies = load_replies([out], VOCAB)
    return {r.id: (r.prompt_ids.tolist(), r.reply_ids.tolist()) for r in replies}


def prompts_asked(target: Path, serve, out: Path, *more: str) -> list[str]:
    """The prompts that a run sends to the engine."""
    fake = serve(FakeEngine())
    assert command.run(arguments(target, out, *more)) == 0
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [tokenizer.decode(ids) for ids, _ in fake.asked]


def question_file(path: Path, *texts: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    return f"{path}:q"
