"""What every side stands on: options, log, sockets, processes, cores.

Knows neither a service nor anything else of `octavo`, and nothing of models.
"""
