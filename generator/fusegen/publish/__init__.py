"""Text to files: the lock, what changed, and writing all of it or nothing."""
