"""What a request passes before it is a group: read, checked, rendered and tokenised, in processes that can be killed.

Nothing here knows queues, steps or clients, and what a text process imports is light: neither grpc nor numpy.
"""
