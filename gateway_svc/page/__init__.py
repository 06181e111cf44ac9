"""What a browser loads: a playground, and beside it a live panel. Plain HTML, CSS and ES modules, one noun a file.

Nothing that has to be built, nothing from elsewhere, and no Python: `http` serves these files as they are.
"""
