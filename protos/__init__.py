"""The seam: protobuf definitions and their generated stubs (`make protos` writes them; a test finds drift)."""

SCHEMA_REVISION = 4
"""Rises with every change of the protos that one side must know of; scheduler and worker compare theirs."""
