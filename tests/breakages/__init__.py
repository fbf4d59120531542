"""Ways to break each promise, one file for each part of the code."""
