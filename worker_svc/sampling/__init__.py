"""From logits to tokens and their logprobs.

Nothing of layers or of the cache.
"""
