"""What tenants may have, counted in the one place that all requests pass.

No clock, no thread and no text: times come in as numbers, requests as keys.
"""
