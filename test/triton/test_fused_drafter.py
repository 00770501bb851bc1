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

from sglang_dlite.drafter import DLiteDrafter  # noqa: E402
from sglang_dlite.kernels.fused_drafter import (  # noqa: E402
    SWITCH,
    FusedDrafter,
    prepare_drafter,
    unsupported,
)
from sglang_dlite.kernels.projection import Sampling  # noqa: E402


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
    assert len(block.token_ids.unique()) > 10


def test_sampled_drafts_follow_the_law_that_draft_logits_state() -> None:
    config, n = SMALL.config(vocab_size=12, mask_token_id=11, block_size=3), 20_000
    states, tokens, table = draw_inputs(config, 1, torch.float32)
    states, tokens = states.expand(n, -1, -1), tokens.expand(n, -1)
    fused = FusedDrafter(random_drafter(config, torch.float32))
    sampling = Sampling(torch.full((n,), 0.3), torch.arange(n), torch.full((n,), 2**35 + 1))
    block = fused.draft_seeded(states, tokens, lambda ids: table[ids], sampling)
    # The first draft has one law; the second one's depends on the first.
    for first in [None, *block.token_ids[:, 0].unique().tolist()]:
        k = 0 if first is None else 1
        rows = slice(None) if first is None else block.token_ids[:, 0] == first
        law = torch.softmax(fused.draft_logits(block.head_vectors[rows, k]).double() / 0.3, -1)
        torch.testing.assert_close(law, law[:1].expand_as(law), rtol=0, atol=1e-5)
        counts = torch.bincount(block.token_ids[rows, k], minlength=12)
        expected = law[0] * len(law)
        large = expected >= 5
        if large.sum() < 3:
            continue
        chi_square = ((counts - expected)[large] ** 2 / expected[large]).sum()
        # Mean k, variance 2k: five standard deviations, and the seeds are fixed.
        assert chi_square < large.sum() + 5 * (2 * large.sum()) ** 0.5


def _draft_fake(drafter_class: type[FusedDrafter], n: int, group: int, sampled: bool) -> Any:
    config = SMALL.config(anchor_group_size=group)
    with FakeTensorMode():
        drafter = drafter_class(DLiteDrafter(config).requires_grad_(False))
        table = torch.empty(config.vocab_size, config.hidden_size)
        states = torch.empty(n, config.num_pivot_states, config.hidden_size)
        tokens = torch.empty(n, group, dtype=torch.int64)
        embed = lambda ids: torch.nn.functional.embedding(ids, table)  # noqa: E731
        if not sampled:
            return drafter.draft(states, tokens, embed)
        ids = torch.empty(n, dtype=torch.int64)
        return drafter.draft_seeded(states, tokens, embed, Sampling(torch.empty(n), ids, ids))


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


def test_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert isinstance(prepare_drafter(random_drafter(SMALL.config(), torch.bfloat16)), FusedDrafter)
    double = random_drafter(SMALL.config(), torch.float64)
    assert prepare_drafter(double) is double
    monkeypatch.setenv(SWITCH, "0")
    module = random_drafter(SMALL.config(), torch.bfloat16)
    assert prepare_drafter(module) is module


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
