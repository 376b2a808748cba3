"""Text for people, and what escapes it."""
