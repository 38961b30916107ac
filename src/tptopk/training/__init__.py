"""Sampling, the mechanism, and the loop that ties them to a plan."""
