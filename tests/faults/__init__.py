"""Ranks that crash, hang, disagree or are only slow, and what a job does then."""
