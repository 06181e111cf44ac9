"""What is known of the models that workers serve, and which of them a request gets.

No weights: a tokenizer, a template, limits, names.
"""
