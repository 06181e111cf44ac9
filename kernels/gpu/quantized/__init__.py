"""Products with weights of few bits, which are unpacked where they are multiplied; `choice` picks one for a weight.

Each is laid out anew at load from a `QuantizedWeight`. Nothing here reads a checkpoint.
"""
