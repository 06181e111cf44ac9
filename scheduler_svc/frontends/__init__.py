"""Where calls are answered: in the core's process, or in others with a link to it.

What is on which side of the link, and what travels there.
"""
