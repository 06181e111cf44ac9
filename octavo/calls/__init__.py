"""One request as a client follows it: to which address, over which stream, and again after a loss.

Nothing of a scheduler in this process. What users import stands above: `octavo.client`, `octavo.retrying`.
"""
