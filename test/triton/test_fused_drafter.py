"""The fused step on a CPU, where its operators are the torch references; and on shapes alone.

That the kernels equal those references is for test_triton_interpreter.py.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from drafters import SMALL, assert_block_is_the_modules, draw_inputs, random_drafter
from kernel_cases import DTYPES
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_dlite.drafter import DLiteDrafter
from sglang_dlite.kernels.fused_drafter import (
    SWITCH,
    FusedDrafter,
    prepare_drafter,
    unsupported,
)
from sglang_dlite.kernels.launch import unsupported_gpu
from sglang_dlite.speculative import drafting


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_against_the_module(n: int, group: int, dtype: str) -> None:
    config = SMALL.config(anchor_group_size=group)
    states, tokens, table = draw_inputs(config, n, DTYPES[dtype])
    fused = FusedDrafter(random_drafter(config, DTYPES[dtype]))
    block = fused.draft(states, tokens, lambda ids: table[ids])
    module = random_drafter(config, DTYPES[dtype]).float()
    assert_block_is_the_modules(block, module, states, tokens, table)


def test_exactly_the_modules_tokens_in_fp32() -> None:
    config = SMALL.config(anchor_group_size=2)
    states, tokens, table = draw_inputs(config, 40, torch.float32)
    expected = random_drafter(config, torch.float32).draft(states, tokens, lambda ids: table[ids])
    fused = FusedDrafter(random_drafter(config, torch.float32))
    block = fused.draft(states, tokens, lambda ids: table[ids])
    assert torch.equal(block.token_ids, expected.token_ids)
    assert len(block.token_ids.unique()) > 5


def _worst_chi_square(drafter_class: type[FusedDrafter], temperature: float) -> float:
    """Of sampled drafts against `law_logits`, in standard deviations above its mean.

    Over the first draft's law and the second one's after each first.
    """
    config, n = SMALL.config(vocab_size=12, mask_token_id=11, block_size=3), 20_000
    states, tokens, table = draw_inputs(config, 1, torch.float32)
    states, tokens = states.expand(n, -1, -1), tokens.expand(n, -1)
    fused = drafter_class(random_drafter(config, torch.float32))
    uniforms = torch.rand(
        n, config.num_drafts, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    temperatures, greedy = torch.full((n,), temperature), torch.zeros(n, dtype=torch.bool)
    block = fused.draft_sampled(
        states, tokens, lambda ids: table[ids], temperatures, greedy, uniforms
    )
    excesses = []
    for first in [None, *block.token_ids[:, 0].unique().tolist()]:
        k = 0 if first is None else 1
        rows = slice(None) if first is None else block.token_ids[:, 0] == first
        law = torch.softmax(
            fused.law_logits(block.head_vectors[rows, k]).double() / temperature, -1
        )
        torch.testing.assert_close(law, law[:1].expand_as(law), rtol=0, atol=1e-5)
        counts = torch.bincount(block.token_ids[rows, k], minlength=12)
        expected = law[0] * len(law)
        large = expected >= 5
        freedom = int(large.sum()) - 1
        if freedom >= 2:
            chi_square = ((counts - expected)[large] ** 2 / expected[large]).sum().item()
            excesses.append((chi_square - freedom) / (2 * freedom) ** 0.5)
    assert len(excesses) >= 4
    return max(excesses)


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_sampled_drafts_follow_the_law_that_law_logits_state(temperature: float) -> None:
    assert _worst_chi_square(FusedDrafter, temperature) < 5


def test_that_check_finds_one_seed_for_two_draws() -> None:
    class OneSeed(FusedDrafter):
        def _serial_loop(self, hidden: Any, group: Any, temperatures: Any, seeds: Any) -> Any:
            return super()._serial_loop(hidden, group, temperatures, seeds[:, :1].expand_as(seeds))

    assert _worst_chi_square(OneSeed, 5.0) > 50


def _draft_fake(
    drafter_class: type[FusedDrafter], n: int, group: int, sampled: bool, constants: str = "cuda"
) -> Any:
    """A step on fake tensors of a GPU, which no operator may mix with those of a CPU."""
    config = SMALL.config(anchor_group_size=group)
    with FakeTensorMode(), torch.device("cuda"):
        module = DLiteDrafter(config).requires_grad_(False)
        module.constants.to(constants)
        drafter = drafter_class(module)
        table = torch.empty(config.vocab_size, config.hidden_size)
        states = torch.empty(n, config.num_pivot_states, config.hidden_size)
        tokens = torch.empty(n, group, dtype=torch.int64)
        embed = lambda ids: torch.nn.functional.embedding(ids, table)  # noqa: E731
        if not sampled:
            return drafter.draft(states, tokens, embed)
        draws = (torch.empty(n), torch.empty(n, dtype=torch.bool))
        uniforms = torch.empty(n, config.num_drafts, dtype=torch.float64)
        return drafter.draft_sampled(states, tokens, embed, *draws, uniforms)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_the_step_reads_nothing_back(n: int, group: int, sampled: bool) -> None:
    block = _draft_fake(FusedDrafter, n, group, sampled)
    assert block.token_ids.shape == (n, SMALL.drafts)
    assert block.token_ids.dtype == torch.int64
    assert block.head_vectors.shape == (n, SMALL.drafts, SMALL.rank)


def test_that_check_finds_a_planted_sync() -> None:
    class Item(FusedDrafter):
        def _backbone(self, *arguments: Any) -> torch.Tensor:
            hidden = super()._backbone(*arguments)
            return hidden * hidden.sum().item()

    with pytest.raises(DataDependentOutputException):
        _draft_fake(Item, 2, 1, False)


def test_that_check_finds_a_tensor_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        _draft_fake(FusedDrafter, 2, 1, False, constants="cpu")


def test_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert isinstance(prepare_drafter(random_drafter(SMALL.config(), torch.bfloat16)), FusedDrafter)
    double = random_drafter(SMALL.config(), torch.float64)
    assert prepare_drafter(double) is double
    monkeypatch.setenv(SWITCH, "0")
    module = random_drafter(SMALL.config(), torch.bfloat16)
    assert prepare_drafter(module) is module


def test_the_kernels_are_chosen_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delenv(drafting.FACTORY_VARIABLE, raising=False)
    loaded = random_drafter(SMALL.config(), torch.bfloat16)
    monkeypatch.setattr(drafting, "drafter_directory", lambda path, revision: path)
    monkeypatch.setattr(drafting, "load_drafter", lambda path, device, dtype: loaded)
    built = drafting.build_drafter("folder", None, "cuda", torch.bfloat16)
    assert isinstance(built, FusedDrafter)
    assert drafting.require_sampled_drafts(built) is built  # serves rejection sampling too


def test_a_failure_of_the_kernels_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)

    def fail(self: FusedDrafter) -> None:
        raise RuntimeError("ptxas said no")

    monkeypatch.setattr(FusedDrafter, "warm_up", fail)
    with pytest.raises(RuntimeError, match=f"ptxas said no.*{SWITCH}=0"):
        prepare_drafter(random_drafter(SMALL.config(), torch.bfloat16))


@pytest.mark.parametrize(
    "changes,message",
    [({"block_size": 130}, "133 keys"), ({"head_dim": 258}, "head_dim is 258"), ({}, None)],
)
def test_unsupported(changes: dict[str, int], message: str | None) -> None:
    reason = unsupported(SMALL.config(**changes), torch.bfloat16)
    assert reason is None if message is None else message in str(reason)


@pytest.mark.parametrize(
    "hip,capability,message",
    [(None, (7, 5), "Some GPU has compute capability 7.5; 8.0"), ("6.4", (9, 4), "ROCm")],
)
def test_an_older_or_foreign_gpu_is_served_by_the_module(
    hip: str | None,
    capability: tuple[int, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with FakeTensorMode(), torch.device("cuda"):
        module = DLiteDrafter(SMALL.config()).requires_grad_(False)
        assert prepare_drafter(module) is module
    assert message in caplog.text


def test_a_newer_gpu_is_served_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert unsupported_gpu(torch.device("cuda")) is None


def test_nothing_here_imports_sglang() -> None:
    code = (
        "import sys, pkgutil, importlib\n"
        "import sglang_dlite.drafter, sglang_dlite.kernels as kernels\n"
        "for module in pkgutil.iter_modules(kernels.__path__):\n"
        "    importlib.import_module('sglang_dlite.kernels.' + module.name)\n"
        "sys.exit(any(name.split('.')[0] == 'sglang' for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
