"""Words for vector registers, and what the processor has of them.

No operation of a model.
"""
