"""What each operation means, in plain torch: what the kernels are held to.

Never fast, and run by tests and where torch does well already.
"""
