"""`sglang-dlite check`: what is installed, what SGLang sees of it, and how to mend what is not so.

SGLang logs a plugin that fails to load and goes on; the user then reads "Unknown speculative
algorithm name: DLITE", far from the cause. Each check here names one cause and its remedy.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import metadata
from typing import NamedTuple

from sglang_dlite import ALGORITHM

DIST = "sglang-dlite"
PLUGINS_GROUP, PLUGIN_NAME = "sglang.srt.plugins", "dlite"
PLATFORMS_GROUP, PLATFORM_NAME = "sglang.srt.platforms", "dlite_cpu"
REINSTALL = "install the package again in this environment: pip install ./python"


class Status(Enum):
    OK = "OK"
    FAIL = "FAIL"
    INFO = "INFO"


class Result(NamedTuple):
    status: Status
    name: str
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.status.value:<4}  {self.name:<22} {self.detail}"
        return f"{text}\n      fix: {self.fix}" if self.fix else text


def ok(name: str, detail: str) -> Result:
    return Result(Status.OK, name, detail)


def info(name: str, detail: str, fix: str = "") -> Result:
    return Result(Status.INFO, name, detail, fix)


def fail(name: str, detail: str, fix: str) -> Result:
    return Result(Status.FAIL, name, detail, fix)


def pinned_version() -> str:
    """The version of sglang that this package's own metadata requires."""
    for requirement in metadata.requires(DIST) or []:
        match = re.match(r"sglang\s*==\s*([^\s;,]+)", requirement)
        if match:
            return match[1]
    raise LookupError(f"the metadata of {DIST} pins no sglang version")


def check_python() -> Iterator[Result]:
    # pip does not install the package on an older Python than it needs.
    yield ok("python", f"{platform.python_version()} ({sys.executable})")


def check_sglang_version() -> Iterator[Result]:
    name = "sglang version"
    pin = pinned_version()
    fix = f"pip install sglang=={pin}"
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        yield fail(name, "sglang is not installed", fix)
        return
    if installed == pin:
        yield ok(name, installed)
    else:
        yield fail(name, f"{installed}; this version of {DIST} works with {pin} only", fix)


def check_entry_points() -> Iterator[Result]:
    for group, wanted in ((PLUGINS_GROUP, PLUGIN_NAME), (PLATFORMS_GROUP, PLATFORM_NAME)):
        name = f"entry point {wanted}"
        found = [entry for entry in metadata.entry_points(group=group) if entry.name == wanted]
        if len(found) == 1:
            yield ok(name, f"{group} -> {found[0].value}")
        elif not found:
            yield fail(name, f"not registered in group {group}", REINSTALL)
        else:
            values = ", ".join(entry.value for entry in found)
            yield fail(
                name,
                f"registered {len(found)} times: {values}",
                f"pip uninstall {DIST}, until nothing of it is left; then {REINSTALL}",
            )


def check_environment() -> Iterator[Result]:
    name = "environment"
    problems = 0
    whitelist = os.environ.get("SGLANG_PLUGINS", "")
    allowed = {entry.strip() for entry in whitelist.split(",") if entry.strip()}
    # The same list also decides which platforms are looked at.
    missing = [entry for entry in (PLUGIN_NAME, PLATFORM_NAME) if allowed and entry not in allowed]
    if missing:
        problems += 1
        yield fail(
            name,
            f"SGLANG_PLUGINS={whitelist} excludes {', '.join(missing)}",
            f"unset it, or SGLANG_PLUGINS={','.join([whitelist.strip(','), *missing])}",
        )
    selected = os.environ.get("SGLANG_PLATFORM", "")
    if selected and selected != PLATFORM_NAME:
        problems += 1
        yield fail(
            name,
            f"SGLANG_PLATFORM={selected} makes SGLang skip every plugin of {DIST}",
            "unset SGLANG_PLATFORM",
        )
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        yield info(
            name,
            "SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine, which needs a source build "
            "of sgl-kernel; DLITE has not been tried with it",
            "unset SGLANG_USE_CPU_ENGINE",
        )
    if not problems:
        yield ok(name, "no variable excludes the plugin")


def check_plugin() -> Iterator[Result]:
    """Load plugins as every SGLang process does, then look at what that left behind."""
    name = "plugin import"
    try:
        from sglang_dlite import plugin
    except Exception as error:
        yield fail(name, _describe(error), f"repair what the message names, or {REINSTALL}")
        return
    yield ok(name, f"{plugin.__name__} ({plugin.__file__})")

    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    name = "algorithm DLITE"
    try:
        algorithm = SpeculativeAlgorithm.from_string(ALGORITHM)
        yield ok(name, f"registered as {type(algorithm).__name__}")
    except ValueError as error:
        yield fail(
            name,
            _describe(error),
            "mend the other failures first; SGLang's log of start-up (--log-level info) has a "
            "line 'Failed to execute general plugin: dlite' with the reason",
        )
    problems = plugin.verify()
    for problem in problems:
        yield fail("hooks", problem, f"use the pinned sglang {pinned_version()}, unmodified")
    if not problems:
        yield ok("hooks", "all in place")


def check_device() -> Iterator[Result]:
    import torch
    from sglang.srt.platforms import current_platform

    from sglang_dlite.platforms import CPU_PLATFORM, has_accelerator

    active = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if has_accelerator():
        kind = torch.accelerator.current_accelerator()
        label = torch.cuda.get_device_name() if torch.cuda.is_available() else str(kind)
        yield ok("device", f"{torch.accelerator.device_count()} x {label}")
        yield info("platform", active)
        yield info("attention backend", "chosen by SGLang at start-up from the GPU and the model")
        return
    yield ok("device", f"cpu, {platform.machine()}, {os.cpu_count()} cores; no accelerator seen")
    if active != CPU_PLATFORM:
        yield fail(
            "platform",
            f"{active} is active instead of {CPU_PLATFORM}",
            "mend the entry point and environment failures above",
        )
        return
    yield ok("platform", active)
    yield ok("attention backend", current_platform.get_default_attention_backend())


def check_drafter() -> Iterator[Result]:
    import torch

    from sglang_dlite.assets import shipped_drafter_dir
    from sglang_dlite.drafter import load_drafter

    name = "shipped drafter"
    path = shipped_drafter_dir()
    if not (path / "model.safetensors").is_file():
        yield fail(
            name,
            f"none in {path}",
            f"{REINSTALL}; to make one yourself: sglang-dlite train smollm2_135m",
        )
        return
    drafter = load_drafter(path, torch.device("cpu"), torch.bfloat16)
    millions = sum(parameter.numel() for parameter in drafter.parameters()) / 1e6
    yield ok(name, f"{path}: {millions:.1f} M parameters")


def check_embedded_model() -> Iterator[Result]:
    from sglang_dlite.embedded_model import embedded_model_dir

    directory = embedded_model_dir()
    if (directory / "config.json").is_file():
        yield ok("embedded target", str(directory))
    else:
        yield info(
            "embedded target", f"not prepared yet in {directory}", "sglang-dlite prepare-model"
        )


def check_kernels() -> Iterator[Result]:
    """The compiled CPU kernels: an option, without which a CPU serves on torch operators."""
    from sglang_dlite.platforms import has_accelerator
    from sglang_dlite.platforms.kernels import SWITCH

    name = "CPU kernels"
    if has_accelerator():
        yield info(name, "not used: there is an accelerator")
        return
    if os.environ.get(SWITCH, "1") == "0":
        yield info(name, f"switched off by {SWITCH}=0: torch operators serve", f"unset {SWITCH}")
        return
    slower = "torch operators serve instead, several times slower"
    build = "pip install --no-build-isolation ./sgl-kernel (what `make install` does)"
    try:
        import sglang_dlite_kernel as kernels
    except ModuleNotFoundError:
        first = "" if _compiler() else "install a C++ compiler (apt-get install g++), then "
        yield info(name, f"not built; {slower}", first + build)
        return
    except ImportError as error:
        yield fail(name, f"{_describe(error)}; {slower}", f"build them again: {build}")
        return
    try:
        yield ok(name, f"{kernels.isa()}, {kernels.num_threads()} threads")
    except RuntimeError as error:
        yield fail(name, _describe(error), "unset or mend the variable that the message names")


def check_compiler() -> Iterator[Result]:
    compiler = _compiler()
    if compiler is not None:
        yield ok("C++ compiler", compiler)
    else:
        yield info(
            "C++ compiler",
            "none found; the CPU kernels and Triton need one",
            "apt-get install g++",
        )


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# What is called, and what is said to have failed if the call itself raises.
CHECKS: tuple[tuple[str, Callable[[], Iterator[Result]]], ...] = (
    ("python", check_python),
    ("sglang version", check_sglang_version),
    ("entry points", check_entry_points),
    ("environment", check_environment),
    ("plugin", check_plugin),
    ("device", check_device),
    ("CPU kernels", check_kernels),
    ("shipped drafter", check_drafter),
    ("embedded target", check_embedded_model),
    ("C++ compiler", check_compiler),
)


def run_checks() -> Iterator[Result]:
    """Every result as soon as it is known; a check that breaks is a failure, not the end."""
    for name, check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            yield fail(name, _describe(error), REINSTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`check` takes no options."""


def run(args: argparse.Namespace) -> int:
    """Print every result; 1 if there is a failure among them."""
    failures = 0
    with warnings.catch_warnings():
        # Upstream warns, at import, of every accelerator that is not there.
        warnings.simplefilter("ignore")
        for result in run_checks():
            print(result, flush=True)
            failures += result.status is Status.FAIL
    print(f"{failures} failure(s)" if failures else "all is well")
    return 1 if failures else 0
