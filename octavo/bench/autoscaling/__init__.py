"""Autoscaling of a simulated pool: Kubernetes' rule, what it reads, the pods it moves, and what a day of it costs.

Here belongs what plays a day and judges it; the pool, its engine and its clock are those of `octavo.bench.fleet`.
"""
