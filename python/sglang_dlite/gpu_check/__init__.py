"""`python -m sglang_dlite.gpu_check`: one script that proves the CUDA path on a GPU (docs/gpu.md).

All but `serving.py` imports no SGLang.
"""
