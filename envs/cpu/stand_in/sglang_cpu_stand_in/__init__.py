"""Lets SGLang 0.5.23 serve text models on a CPU from PyPI's packages alone.

SGLang imports two packages that PyPI has for CUDA only: `sgl_kernel` and `torchvision`. A text model on a CPU calls
almost nothing of them. This is an SGLang platform plug-in (entry-point group `sglang.srt.platforms`) that gives both
names placeholders and the few operators that are called, in eager torch. It is found where its folder is on PYTHONPATH,
acts only on SGLANG_USE_CPU_ENGINE=1, and contains no module called `sgl_kernel`, so it cannot come before a real one.
"""
