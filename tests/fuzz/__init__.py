"""Parsers under fire: ``targets`` says what may come out, ``mutation`` replays, ``__main__`` searches guided by coverage."""
