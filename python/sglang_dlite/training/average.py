"""The moving average of a model's weights: what is evaluated, kept and exported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average of a model's parameters, in their own dtype (fp32)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Starts at the model's weights; decay in 0..1, per optimiser step."""
        named = dict(model.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._decay = decay
        self.start_anew(0)

    def start_anew(self, steps: int) -> None:
        """Start at the model's present weights, which `steps` steps have made."""
        self._values = [p.detach().clone() for p in self._parameters]
        self._steps = steps

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of one more step.

        Early on the average looks back over a tenth of the steps only, so that it is not held back
        by where it started.
        """
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(self._values, self._parameters, 1 - decay)
        self._steps += 1

    @property
    def weights(self) -> dict[str, Tensor]:
        """By the names of the model's state dict."""
        return dict(zip(self._names, self._values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        for value, name in zip(self._values, self._names, strict=True):
            value.copy_(state["weights"][name])
