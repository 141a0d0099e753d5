"""Benchmarks: programs that compare side by side in one run, print a table, write JSON and say what the limit is."""
