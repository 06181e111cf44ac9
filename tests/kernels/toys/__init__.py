"""Kernels that compile, as operations of a package of their own."""
