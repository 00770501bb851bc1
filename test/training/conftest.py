"""A tiny target, and data sets of its own greedy replies, written through the real writer."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang_dlite.training.config import ModelSection, TrainConfig, from_dict
from sglang_dlite.training.dataset import Description, ReplyRecord, ReplyWriter
from sglang_dlite.training.session import Session
from sglang_dlite.training.targets import FrozenTarget
from sglang_dlite.training.trainer import Trainer

VOCAB = 257
LAYERS = 4
MODEL = {
    "num_layers": 1,
    "block_size": 5,
    "rank": 16,
    "group_size": 2,
    "pivot_states": 3,
    "mask_token_id": 256,
    "warm_start": False,
    "window": 6,
}


def model_section(**changes) -> ModelSection:
    return ModelSection(**(MODEL | changes))


@pytest.fixture(scope="session")
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
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, eos_token_id=0, bos_token_id=None,
        pad_token_id=0, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def hf_model(target: Path):
    """The tiny target as plain transformers has it, without our hooks."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.fixture(scope="session")
def frozen(target: Path) -> FrozenTarget:
    from transformers import AutoModelForCausalLM

    return FrozenTarget(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """Plain greedy decoding, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count and ids[-1] != 0:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def describe(**changes) -> Description:
    values = {
        "target": "tiny",
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 20,
        "provenance": [{"command": ["test"]}],
    }
    return Description(**(values | changes))


WriteReplies = Callable[..., Path]


@pytest.fixture(scope="session")
def write_replies(hf_model) -> WriteReplies:
    """write_replies(folder, lengths, seed, share): greedy replies of at most these lengths."""

    def write(folder: Path, lengths: list[int], seed: int = 0, share: str = "part-0") -> Path:
        describe().bind(folder)
        writer = ReplyWriter(folder, share)
        generator = torch.Generator().manual_seed(seed)
        for index, length in enumerate(lengths):
            size = int(torch.randint(1, 14, (), generator=generator))
            prompt = torch.randint(1, VOCAB, (size,), generator=generator).tolist()
            reply = greedy(hf_model, prompt, length)
            writer.append(
                ReplyRecord(
                    id=f"{share}/{seed}-{index}#0",
                    source=f"source-{index % 2}",
                    turn=0,
                    category="",
                    prompt_ids=prompt,
                    reply_ids=reply,
                    text="",
                    finish="length",
                )
            )
        writer.close()
        return folder

    return write


@pytest.fixture(scope="session")
def data_folder(write_replies: WriteReplies, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 replies; tests must not write to it."""
    return write_replies(tmp_path_factory.mktemp("data"), [12, 1, 20, 7, 2, 16] * 5)


def train_settings(target: Path, data: Path, folder: Path) -> dict:
    """The raw config of a tiny run."""
    return {
        "target": {"path": str(target), "dtype": "float32"},
        "data": {"replies": [str(data)], "held_out_percent": 20, "states": "online"},
        "model": MODEL,
        "stages": {"unit": "steps", "stable": 10},
        "loss": {"w_base": 0.06, "sample_positions": True},
        "optim": {
            "batch_replies": 6,
            "anchors_per_reply": 4,
            "micro_replies": 6,
            "lr": 3e-3,
            "seed": 5,
        },
        "run": {
            "folder": str(folder),
            "device": "cpu",
            "bf16": False,
            "log_every": 1,
            "eval_every": 100,
            "checkpoint_every": 4,
        },
    }


@pytest.fixture
def config(target: Path, data_folder: Path):
    """config(folder, section={key: value}, ...)."""

    def make(folder: Path, **sections) -> TrainConfig:
        raw = train_settings(target, data_folder, folder)
        for name, values in sections.items():
            raw[name] = raw.get(name, {}) | values
        return from_dict(raw)

    return make


def make_trainer(config: TrainConfig) -> Trainer:
    """The drafter's trainer, at its last checkpoint."""
    session = Session(config)
    trainer = session.trainer("drafter", session.fresh_drafter(), None)
    assert trainer is not None
    return trainer


@pytest.fixture
def file_size_limit():
    """file_size_limit(bytes): inside, no file can grow beyond that, as on a full disk.

    The kernel refuses the write (EFBIG), so that the real code paths fail.
    """

    @contextlib.contextmanager
    def limit(size: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch):
    """serve(fake): `generate` gets it in place of an engine."""
    from sglang_dlite.training import generate as command

    def use(fake):
        @contextlib.contextmanager
        def engine(args, drafter=None):
            yield fake

        monkeypatch.setattr(command, "engine", engine)
        return fake

    return use
