"""Decisions: sequences, blocks, the prefix cache, queues, policies, and what each step computes.

No clock, no socket, no thread, no text: times come in as numbers, tokens as ids.
"""
