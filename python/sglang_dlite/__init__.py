"""SGLang with DLite, a history-free speculative drafter, built in."""

__version__ = "0.1.0"

SGLANG_VERSION = "0.5.23"
"""The one SGLang that this package is made for (also pinned in pyproject.toml)."""

ALGORITHM = "DLITE"
"""The value of --speculative-algorithm."""
