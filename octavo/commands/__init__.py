"""The subcommands of `octavo`, one a module: `add_arguments(parser)` and `run(arguments) -> exit code`.

Options and what is printed; the work is done elsewhere.
"""
