"""What callers of `LLM` and `LLMEngine` give: prompts, conversations, vLLM's names, read into one shape.

Nothing of what is done with it, and no scheduler.
"""
