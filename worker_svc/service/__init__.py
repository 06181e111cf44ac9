"""Calls that a scheduler makes, and who may make them.

Nothing of what a step computes.
"""
