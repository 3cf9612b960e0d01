"""Arrays only: target, drafter, their caches and attention. Knows no requests and no text."""
