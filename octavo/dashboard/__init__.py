"""What `octavo top` shows: a server's state read over `Control`, and tables of it for a terminal.

Knows nothing of requests that are sent, nor of options: the command reads those.
"""
