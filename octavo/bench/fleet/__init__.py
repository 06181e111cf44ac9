"""The real engine over simulated workers in virtual time: what a pool of any size would do with a load or a trace.

Here belongs what plays and measures such a pool; how workers compute, and what a scheduler decides, is elsewhere.
"""
