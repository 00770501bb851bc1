"""Builds the extension with the compiler at hand; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
HEADERS = sorted(str(path) for pattern in ("*.h", "*.inl") for path in Path("csrc").glob(pattern))

setup(
    ext_modules=[
        CppExtension(
            "sglang_dlite_kernel._C",
            SOURCES,
            depends=HEADERS,
            # Each kernel file names its own instruction set; these flags must run anywhere.
            extra_compile_args=[
                "-O3",
                "-std=c++20",
                "-fno-math-errno",
                "-Wall",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",
                "-Wno-uninitialized",
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
