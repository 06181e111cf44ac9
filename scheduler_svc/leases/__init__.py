"""What is known of one worker under its lease: its `Scheduler`, its speed, and which of its claims can be true.

Does not choose between workers, and cannot reach them.
"""
