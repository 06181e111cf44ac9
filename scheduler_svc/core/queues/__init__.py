"""Who waits, and whose turn it is: policies, queues in their order, what each tenant has had.

Knows no worker, no block and no step.
"""
