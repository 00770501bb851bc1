"""SGLang with DLite, a history-free speculative drafter, built in."""

__version__ = "0.1.0"
