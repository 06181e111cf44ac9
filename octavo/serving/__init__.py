"""What `octavo serve` starts on one machine: which processes, how they trust each other, what it says then.

No process is started here: `Supervisor` does that.
"""
