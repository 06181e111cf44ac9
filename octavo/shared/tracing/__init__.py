"""Traces of requests: contexts as W3C writes them, spans as plain records, and a thread that exports them over OTLP.

Nothing of what a service does. OpenTelemetry's packages are imported by `otlp` alone, once tracing is switched on.
"""
