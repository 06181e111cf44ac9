"""Load on a server that runs: what is sent when, over gRPC or OpenAI's HTTP, and what came back by the client's clock.

Figures of one run, their file, comparison and pictures are here; nothing that needs a model or a worker is.
"""
