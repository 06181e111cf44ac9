"""Triton kernels, an operation a file; `operations` has them all, behind the signatures of `kernels.oracles`.

Importing any of them needs Triton.
"""
