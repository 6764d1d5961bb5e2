"""Everything that crosses workers."""
