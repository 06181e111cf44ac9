"""Mixtures of experts: who chooses them, their products one by one or all in one launch, and how they are stored.

An expert itself is an `Mlp`. Which layers have experts, and of what kind, is the style's to say.
"""
