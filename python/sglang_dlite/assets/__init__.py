"""The shipped drafter: where it is, and the `drafter-path` command that prints it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DRAFTER_NAME = "smollm2-135m-instruct-dlite"


def shipped_drafter_dir() -> Path:
    """The checkpoint folder of the embedded model's drafter (config.json, model.safetensors)."""
    return Path(__file__).parent / DRAFTER_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`drafter-path` takes no options."""


def run(args: argparse.Namespace) -> int:
    """Print the folder as the last line; an error if the weights are not there."""
    folder = shipped_drafter_dir()
    if not (folder / "model.safetensors").is_file():
        print(
            f"drafter-path: no drafter in {folder}. Installed from a source tree without it? "
            f"Train one with `sglang-dlite train smollm2_135m`, or reinstall the package.",
            file=sys.stderr,
        )
        return 1
    print(folder)
    return 0
