"""All layers of a pass in one call.

Puts the operations of the other folders in order; computes nothing itself.
"""
