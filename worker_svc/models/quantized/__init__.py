"""Checkpoints whose weights are numbers of few bits: which format each layer has, and how it is read and multiplied.

Every format is read as a `kernels.quantized_weight.QuantizedWeight`. Nothing of what a device makes of it belongs here.
"""
