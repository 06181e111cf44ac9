"""Calls that schedulers make, and which scheduler may make them.

Nothing of what a step computes.
"""
