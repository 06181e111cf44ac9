"""Mixtures of experts: which of them a token goes to, their products in 16 or 32 bits, and the sum over them.

Products of experts' weights of few bits are in `kernels.gpu.quantized`.
"""
