"""The flight recorder: what a step loop was told, decided and was answered last, in a ring, and the file of that.

Nothing here decides, and nothing knows the step loop: it is told. No text and no token id gets into a file.
"""
