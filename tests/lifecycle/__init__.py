"""Small programs that a plain interpreter, a forked rank and a spawned rank must run alike."""
