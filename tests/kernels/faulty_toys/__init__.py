"""Kernels with one thing wrong each, as operations of a package of their own."""
