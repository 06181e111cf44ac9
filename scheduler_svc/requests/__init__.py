"""A request checked, rendered, tokenised and made a group, or refused.

Nothing of what happens to it afterwards.
"""
