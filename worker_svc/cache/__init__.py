"""Blocks of keys and values on the device and on the host, how many there are, what moves between.

Nothing of who they belong to, but for what the next lease is told.
"""
