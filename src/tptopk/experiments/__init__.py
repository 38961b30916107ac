"""Measurements and experiments, as configurations over the library."""
