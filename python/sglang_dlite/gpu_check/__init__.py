"""What can only be shown on a GPU: `python -m sglang_dlite.gpu_check`."""
