"""The public services, what a call passes before them, and metrics.

No decision and no state of requests.
"""
