"""Latent attention on a GPU: `latent_attention` launches it, `whole` and `pieces` are its kernels; before it goes
`latent_and_cache`. docs/latent-attention.md draws it.

The plan of a step, scratch, and how sums are joined are those of `kernels.gpu.attention`.
"""
