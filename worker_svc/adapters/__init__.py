"""Low-rank adapters: read from PEFT's folders, kept, and added to the products of a decoder for rows that use them.

Knows no requests: rows come with the numbers of their adapters.
"""
