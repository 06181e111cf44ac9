"""Scales of a cache of eight bits: as numbers (`cache_scales`), as checkpoints have them, and which a worker takes.

The cache itself is not here (`worker_svc.cache`), and neither are scales of weights (`worker_svc.models.quantized`).
"""
