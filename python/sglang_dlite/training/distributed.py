"""Several processes (torchrun): each computes some of a step's batches, gradients are summed.

The batches of a step and the losses' denominators follow from the step number, so the sum over the
processes is the gradient of one process with the same global batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class World:
    """This process among its peers; without torchrun's variables, alone."""

    def __init__(self, device: str = "cpu") -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            if device == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("nccl" if device == "cuda" else "gloo")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the main one's values."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def of_main(self, value: float, device: torch.device) -> float:
        """The main process's value of a number that the processes measure themselves."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return shared.item()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each trainable parameter's gradient by the sum over the processes."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:  # this process had no batch in the step
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a scalar over the processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
