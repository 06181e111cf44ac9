"""Paged attention, compiled for CPUs.

One sequence's row reads its own blocks alone, in an order that no other row changes.
"""
