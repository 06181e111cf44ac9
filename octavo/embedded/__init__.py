"""The scheduler core in the caller's process, with a worker beside it: what `LLM` and `LLMEngine` stand on.

No socket that others may use, and nothing of how calls of `LLM` read their arguments.
"""
