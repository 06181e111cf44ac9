"""Paged attention on a GPU: `paged_attention` launches it, `prefill` and `decode` are its kernels.

docs/paged-attention.md draws it. Writing to the cache is not here: `reshape_and_cache` and `rotary_and_cache` do that.
"""
