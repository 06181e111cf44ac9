"""What is done to each row alone: norms, activations, rotation, and its way into the cache.

No product, no attention.
"""
