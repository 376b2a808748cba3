"""A small language model with mixtures of experts, trained twice.  Nothing imports it."""
