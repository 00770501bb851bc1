"""A server that cannot serve DLITE does not start, and its log says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from engines import environment
from safetensors.torch import load_file, save_file
from sglang_dlite.server_process import ServerError, ServerProcess

pytestmark = pytest.mark.server


def start_up_log(target: Path, drafter: Path, folder: Path) -> str:
    """The log of a server that must not come up."""
    server = ServerProcess(
        target,
        drafter,
        log_path=folder / "server.log",
        extra_args=["--dtype", "float32", "--max-total-tokens", "4096"],
    )
    with (
        environment(DLITE_DRAFTER_FACTORY=None),
        server,
        pytest.raises(ServerError, match="ended with status") as error,
    ):
        server.wait_ready()
    assert "ended with status 0" not in str(error.value)
    return (folder / "server.log").read_text()


def without_a_tensor(folder: Path) -> Path:
    path = tiny_models.make_drafter(folder / "drafter")
    weights = load_file(path / "model.safetensors")
    del weights["context_norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def truncated(folder: Path) -> Path:
    path = tiny_models.make_drafter(folder / "drafter")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    return path


def of_another_size(folder: Path) -> Path:
    return tiny_models.make_drafter(folder / "drafter", hidden_size=32)


def of_another_vocabulary(folder: Path) -> Path:
    return tiny_models.make_drafter(folder / "drafter", vocab_size=tiny_models.VOCAB_SIZE + 1)


@pytest.mark.parametrize(
    "make,words",
    [
        (without_a_tensor, ("missing: context_norm.weight", "not those of its config.json")),
        pytest.param(truncated, ("truncated or damaged",), marks=pytest.mark.slow),
        pytest.param(
            of_another_size,
            ("hidden_size is 32", "the target has 64", "trained for this target"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            of_another_vocabulary,
            ("vocab_size is 385", "384 tokens", "trained for this target"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_unfit_drafters(
    target: Path, tmp_path: Path, make: Callable[[Path], Path], words: tuple[str, ...]
) -> None:
    log = start_up_log(target, make(tmp_path), tmp_path)
    assert all(word in log for word in words), log[-3000:]


@pytest.mark.slow
def test_an_unsupported_target_class(tmp_path: Path) -> None:
    gemma = tiny_models.make_target(tmp_path / "gemma", "gemma2", tie_word_embeddings=True)
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    log = start_up_log(gemma, drafter, tmp_path)
    assert "Gemma2ForCausalLM" in log
    assert "Serve this model without speculation" in log
