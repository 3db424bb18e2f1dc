"""Benchmarks of the planner: each prints a table, and JSON with --json."""
