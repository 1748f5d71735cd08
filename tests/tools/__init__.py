"""Helpers that several rooms of tests use: jobs, hosts, schedulers, and the slice of a commit."""
