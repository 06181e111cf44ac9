"""Requests that were taken and have not ended: by id and tenant, how many may wait, whose turn was lost.

Knows no worker and no step.
"""
