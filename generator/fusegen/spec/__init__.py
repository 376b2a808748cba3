"""What people write in YAML: a dataclass per kind, reading, checks and schemas."""
