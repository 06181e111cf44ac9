"""The step loop: events in, steps out, which workers and requests are here, what is counted.

Knows workers by their handles, and no clients.
"""
