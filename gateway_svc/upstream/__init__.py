"""The schedulers behind this service: connections to them, and what their refusals mean over HTTP.

Nothing of fields and of what a client sees of an answer.
"""
