"""Measuring speed: the same workloads in this process, against a server, and beside other engines."""
