"""HTTP itself: connections with their bounds, bodies, streams of events, paths, metrics.

Nothing of what a request means.
"""
