"""Messages of the step protocol: written from decisions, and read into answers.

Nothing that sends or decides.
"""
