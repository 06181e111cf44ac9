"""The seam: protobuf definitions and their generated stubs (`make protos` writes them; a test finds drift)."""
