"""Flags that several commands have: which server, how text is sampled, numbers within bounds.

No command of its own.
"""
