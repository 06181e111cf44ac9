"""From a scheduler's messages to JSON: events of a stream, and whole answers.

Nothing of what was asked but how it is to be shown, and no socket.
"""
