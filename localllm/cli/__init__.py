"""The command line: one file per command, which parses, calls a service, and renders."""
