"""Getting models: the names Octavo knows, their download, and the conversion of GGUF files."""
