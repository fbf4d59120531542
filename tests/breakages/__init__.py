"""Ways to break each promise, a file for each: what is broken -> old text (once in its file), new text, tests that notice."""
