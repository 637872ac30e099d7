"""The command line: one module a command, each parses, calls a layer below, and prints."""
