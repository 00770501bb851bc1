"""Triton kernels of the draft step, each beside its torch reference. Imports nothing of SGLang."""
