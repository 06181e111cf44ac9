"""The kinds of `octavo bench`, one a module: their options, and what is printed.

Nothing is measured here: `octavo.bench` and `kernels.bench` do that.
"""
