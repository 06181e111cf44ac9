"""Kernels, one operation a file. This package imports nothing: take what you need from its modules."""
