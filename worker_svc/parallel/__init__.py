"""The ranks of a parallel group: which process is which, what they tell each other, and the end of all with one.

Knows no model and no step.
"""
