"""Addresses of workers, who of them is there, and the stream to each.

Nothing of what is sent there.
"""
