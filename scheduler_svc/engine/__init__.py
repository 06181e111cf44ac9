"""The step loop: events in, steps out, who is here, what is counted.

Knows workers by their handles, and clients not at all.
"""
