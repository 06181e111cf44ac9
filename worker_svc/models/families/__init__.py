"""The families that Octavo knows: for each architecture, how its `config.json` tells sizes and style.

A function reads one family; what is absent in a file has the default that `transformers` gives it. No layer and no
weight.
"""
