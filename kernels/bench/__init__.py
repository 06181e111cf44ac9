"""Kernels measured: compiled for GPUs that need not be here, and timed on the one that is. Imports nothing."""
