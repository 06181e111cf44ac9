"""Blocks of keys and values on the device and on the host, how many there are, what moves between.

Knows no sequences; of the blocks' content only what the next lease is told.
"""
