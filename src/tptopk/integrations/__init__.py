"""The library in the shape of others."""
