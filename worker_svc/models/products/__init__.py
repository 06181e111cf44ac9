"""Dense layers, y = x W^T + b: one file for each form of them, and `linear`, which takes one from a checkpoint.

Weights that a checkpoint has in few bits have a folder of their own (`worker_svc.models.quantized`); kernels are in
`kernels`.
"""
