"""Ids to text and text to ids: tokenizer, templates, stop strings.

Nothing of requests, processes or messages.
"""
