"""What kernels are written with: `vector_code` for vectors in registers, `numbers` for memory and single numbers.

Above these: tiles of float32 products, sums of products in one instruction, and prefetches of the cache. No operation
of a model.
"""
