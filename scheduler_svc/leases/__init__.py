"""What is known of one worker under its lease: its scheduler, its speed, what it can be believed.

No decision between workers, and no way to them.
"""
