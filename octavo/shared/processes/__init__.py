"""Child processes: started, watched, started again, ended with the one that started them.

Nothing here knows what they do.
"""
