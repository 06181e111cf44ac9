"""What an operator asks of the step loop, counted where it happens.

Nothing of how it is shown, and no engine: `load` and `statistics` read one.
"""
