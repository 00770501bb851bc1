"""`sglang-dlite bench`: DLITE and its rivals on the same agent sessions, in one run."""
