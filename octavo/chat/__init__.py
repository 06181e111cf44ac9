"""What `octavo chat` does at a terminal: a conversation that fits, lines with a history, words with a slash.

Knows no options: the commands read those.
"""
