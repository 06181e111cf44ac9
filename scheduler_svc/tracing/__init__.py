"""What is written down of requests that are traced, while the step loop runs them.

Only of those: a request that is not traced has no object here. Knows no group, no queue and no clock.
"""
