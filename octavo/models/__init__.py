"""Getting models: the names Octavo knows, their download, and the conversion of GGUF files.

No model runs here: a worker reads what lies in the folder that this gives.
"""
