"""The HTTP service: who speaks OpenAI's API is answered by a scheduler.

Holds nothing: it is a client of the public services, and any number of it may run.
"""
