"""The worker service: owns weights, key/value cache, kernels and sampling; mirrors what a scheduler decides.

It never decides: which sequences run, and in which blocks, comes with every step (`protos/worker.proto`). It imports
neither the scheduler service nor, on its way to readiness, `transformers`.
"""
