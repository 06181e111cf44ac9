"""Sampling without a sort, compiled for CPUs.

Behind the signatures of `kernels.oracles.reference_sampling`.
"""
