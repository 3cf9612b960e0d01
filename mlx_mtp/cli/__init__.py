"""The command line: parses, imports late and calls. Everything it can do the Python API can."""
