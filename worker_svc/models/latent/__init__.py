"""Multi-head latent attention, DeepSeek's: what its configuration says, its layer, and the products of its heads.

Nothing of the cache's blocks, and of experts only how they are read.
"""
