"""Blocks of the cache: who holds which, what of prefixes can be found, what is swapped.

Decides nothing: it says what can be had, and gives it.
"""
