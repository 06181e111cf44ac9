"""Which worker gets which request, by what it costs there in seconds.

Nothing of what a worker does with it, and no step.
"""
