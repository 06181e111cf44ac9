"""The step loop in several processes: shards, each with workers and requests of its own, their parent, and what a
frontend chooses a shard by. Nothing here schedules a step: a shard is an engine as it is, and knows of no other."""
