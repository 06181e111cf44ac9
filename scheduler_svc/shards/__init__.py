"""The step loop in several processes: shards with workers of their own, their parent, and how a frontend chooses one.

Nothing here schedules a step: a shard is an `Engine`, and knows of no other.
"""
