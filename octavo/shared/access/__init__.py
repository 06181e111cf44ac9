"""Who may call a service, and how much: keys, tokens of others, tenants with their limits, TLS."""
