"""Tokens to a client's messages, each made when it is written.

Nothing that decides what is computed.
"""
