"""Many rows from a file: read, answered in batches, and never lost. One module per concern."""
