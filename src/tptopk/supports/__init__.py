"""Which coordinates a step may touch: supports, the scores that rank coordinates, and how each method chooses."""
