"""The worker's copy of what the scheduler decided: sequences by slot, checked before it is changed.

Never decides, and knows no device.
"""
