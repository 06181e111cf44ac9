"""Sizes of the model that kernels are timed for: those of Llama 3 8B."""

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
HIDDEN, INTERMEDIATE, NUM_LAYERS, VOCAB_SIZE = 4096, 14336, 32, 128_256
BLOCK_SIZE = 16  # tokens in a block of the cache
