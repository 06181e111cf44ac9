"""Measuring speed: the same workloads in this process, against a server, and beside other engines.

What users can run; the scripts behind published figures are in `benchmarks/`.
"""
