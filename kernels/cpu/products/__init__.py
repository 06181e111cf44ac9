"""Products of rows with packed weights: float32, bfloat16, int8, int4.

A row's sums are taken in one order, whatever rows stand beside it.
"""
