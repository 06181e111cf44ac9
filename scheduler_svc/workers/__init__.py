"""Addresses of workers, which of them are there, and the stream to each.

Nothing of what is sent there.
"""
