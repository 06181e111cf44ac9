"""Decisions: who waits (`queues`), who runs (`sequences`), where its cache is (`blocks`), and what each step computes.

No clock, no socket, no thread, no text: times come in as numbers, tokens as ids.
"""
