"""A rank process needs these around a program: its environment, its debugger and its end."""
