"""The test suite. A package, so that shared helpers are imported by name (`from tests.tiny_models import ...`)."""
