"""The step loop: events in, steps out, which workers and `requests` are here, `messages` to workers, `metrics`.

Knows workers by their handles, and no clients.
"""
