"""The machine: threads, cores, memory, pages, and how numbers get to the device and back.

Nothing of models or steps.
"""
