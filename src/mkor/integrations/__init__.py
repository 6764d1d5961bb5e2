"""Callbacks and factories for frameworks; each file needs its framework, and nothing else does."""
