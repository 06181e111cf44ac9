"""Steps in order, two on their way: from the columns of a message to a launched pass and its answer.

No layer of a model, and no kernel.
"""
