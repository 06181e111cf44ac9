"""Who may call a service, and how much: keys, tokens of others, tenants with their limits, TLS.

Which calls they are is the services' to say: nothing here knows any.
"""
