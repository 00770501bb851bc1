"""Pivot capture on a toy model with the shape of SGLang's: which rows, in which order, or an error.

test/server/test_pivot_capture.py compares the real classes with transformers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_dlite.speculative.pivot_capture import (
    HYBRID_TARGETS,
    PivotCapture,
    UnsupportedTargetError,
    require_supported_target,
    split_states,
)
from torch import nn

NUM_LAYERS = 4


class Layer(nn.Module):
    """Adds 1; offers its input, the previous block's output, as SGLang's layers do."""

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):  # type: ignore[no-untyped-def]
        if capture_output is not None:
            capture_output(hidden_states, owned=False)
        return hidden_states + 1


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, input_ids, positions, forward_batch):  # type: ignore[no-untyped-def]
        hidden = input_ids[:, None].float().repeat(1, 2) * 100  # [rows, h = 2]
        for layer in self.layers:
            hidden = layer(positions, hidden, forward_batch, capture_output=None)
        return hidden + 1000  # the final norm


class ResidualLayer(nn.Module):
    """Adds 1 with the residual beside the hidden state, as SGLang's Gemma3 does."""

    def forward(self, positions, hidden_states, forward_batch, residual=None):  # type: ignore[no-untyped-def]
        residual = hidden_states if residual is None else residual.add_(hidden_states)  # in place
        return torch.ones_like(residual), residual


class ResidualBody(Body):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualLayer() for _ in range(NUM_LAYERS))

    def forward(self, input_ids, positions, forward_batch):  # type: ignore[no-untyped-def]
        hidden = input_ids[:, None].float().repeat(1, 2) * 100
        residual = None
        for layer in self.layers:
            hidden, residual = layer(
                positions=positions,
                hidden_states=hidden,
                forward_batch=forward_batch,
                residual=residual,
            )
        return hidden + residual + 1000


class LogitsProcessor(nn.Module):
    def forward(self, input_ids, hidden_states, lm_head, forward_batch, aux=None):  # type: ignore[no-untyped-def]
        return SimpleNamespace(hidden_states="upstream's own")


class LlamaForCausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = Body(), LogitsProcessor()

    def forward(self, input_ids, positions, forward_batch):  # type: ignore[no-untyped-def]
        hidden = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden, None, forward_batch)


class Gemma3ForCausalLM(LlamaForCausalLM):
    def __init__(self) -> None:
        super().__init__()
        self.model = ResidualBody()


class PhiForCausalLM(LlamaForCausalLM):
    pass


def run(model: nn.Module, mode: ForwardMode, extend_lens: list[int] | None = None) -> torch.Tensor:
    batch = SimpleNamespace(
        forward_mode=mode,
        extend_seq_lens=None if extend_lens is None else torch.tensor(extend_lens),
    )
    return model(torch.arange(6), torch.arange(6), batch).hidden_states


def expected(rows: list[int], layer_ids: tuple[int, ...]) -> torch.Tensor:
    """State of layer k at row r: 100 r + k + 1, and 1000 more behind the final norm."""
    return torch.tensor(
        [[[100 * r + k + 1 + 1000 * (k == NUM_LAYERS - 1)] * 2 for k in layer_ids] for r in rows]
    ).float()


@pytest.mark.parametrize("layer_ids", [(0, 2, 3), (3, 0), (3,), (1,), (2, 1, 0)])
@pytest.mark.parametrize("target", [LlamaForCausalLM, Gemma3ForCausalLM])
def test_rows_and_order(target: type[LlamaForCausalLM], layer_ids: tuple[int, ...]) -> None:
    model = target()
    PivotCapture(model, layer_ids)
    verify = split_states(run(model, ForwardMode.TARGET_VERIFY), len(layer_ids))
    assert torch.equal(verify, expected([0, 1, 2, 3, 4, 5], layer_ids))
    extend = split_states(run(model, ForwardMode.EXTEND, [1, 3, 2]), len(layer_ids))
    assert torch.equal(extend, expected([0, 3, 5], layer_ids))


@pytest.mark.parametrize("layer_ids", [(0, 3), (0, 1)])
def test_a_body_that_runs_without_its_hooks_is_an_error(layer_ids: tuple[int, ...]) -> None:
    """A replayed graph calls no module of the body; its states would be stale or missing."""
    model = LlamaForCausalLM()
    PivotCapture(model, layer_ids)
    run(model, ForwardMode.EXTEND, [6])
    model.model.forward = lambda input_ids, *rest: torch.zeros(6, 2)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"pivot capture: target layers \[0"):
        run(model, ForwardMode.EXTEND, [6])


def test_an_untested_class_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTargetError, match=r"'PhiForCausalLM' is not supported"):
        PivotCapture(PhiForCausalLM(), (0,))


@pytest.mark.parametrize("name", HYBRID_TARGETS)
def test_a_hybrid_is_refused_by_name_and_reason(name: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=rf"{name!r} is not supported \(a hybrid: "):
        require_supported_target(name)


def test_hybrid_names_are_classes_of_the_installed_sglang() -> None:
    models = Path(find_spec("sglang.srt.models").submodule_search_locations[0])  # type: ignore[union-attr,index]
    sources = "".join(path.read_text() for path in models.glob("*.py"))
    assert [name for name in HYBRID_TARGETS if f"class {name}(" not in sources] == []


def test_layers_without_a_way_in_are_refused() -> None:
    """Another sglang may have changed the decoder layers."""

    class Changed(nn.Module):
        def forward(self, positions, hidden_states):  # type: ignore[no-untyped-def]
            return hidden_states

    model = LlamaForCausalLM()
    model.model.layers = nn.ModuleList([Changed()])
    with pytest.raises(UnsupportedTargetError, match="neither `capture_output` nor `residual`"):
        PivotCapture(model, (0,))
