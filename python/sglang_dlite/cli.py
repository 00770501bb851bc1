"""The `sglang-dlite` command: sub-commands are modules that are imported when called."""

from __future__ import annotations

import argparse
import importlib
import sys

# name -> (module, one-line help). Each module has `add_arguments(parser)` and `run(args) -> int`.
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("sglang_dlite.check", "diagnose this installation"),
    "prepare-model": (
        "sglang_dlite.embedded_model",
        "unpack the embedded target (SmolLM2-135M-Instruct) into the user's cache",
    ),
    "profile": ("sglang_dlite.platforms.profile", "split a decode step on a CPU into its parts"),
    "drafter-path": ("sglang_dlite.assets", "print the directory of the shipped drafter"),
    "generate": ("sglang_dlite.training.generate", "write the target's own replies to prompts"),
    "cache-states": (
        "sglang_dlite.training.cache_states",
        "store the target's states for the anchors that a training uses",
    ),
    "train": ("sglang_dlite.training.train", "train a drafter for a target"),
    "eval": ("sglang_dlite.training.evaluate", "measure a drafter's served acceptance length"),
    "bench": ("sglang_dlite.bench.command", "measure DLITE against its rivals, write a report"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; returns the exit status (2 for a usage error).

    A sub-command's module is imported only when it is the one asked for, so that `--help` and
    the light commands do not pay for importing torch or sglang.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="sglang-dlite", description="DLite speculative decoding for SGLang"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:
            importlib.import_module(module_name).add_arguments(sub)
    args, rest = parser.parse_known_args(argv)
    # argparse takes positionals in one run only; `CONFIG --dry-run key=value` shall work, too.
    if rest and (not hasattr(args, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return importlib.import_module(COMMANDS[args.command][0]).run(args)


if __name__ == "__main__":
    raise SystemExit(main())
