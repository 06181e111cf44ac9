"""From the JSON of a request to messages for a scheduler, every field by name.

Nothing of HTTP, and no range of a number: the scheduler knows what it takes.
"""
