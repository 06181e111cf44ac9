"""What a scheduler does now, for pages that draw it: watched once, however many look.

Nothing of HTTP, and nothing that requests wait for.
"""
