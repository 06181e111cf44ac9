"""Requests as the scheduler sees them: groups, their sequences, the columns of their state, beams.

Knows no block's owner, no queue and no step.
"""
