"""Files that a scheduler needs to speak to the model.

Nothing is tokenised here.
"""
