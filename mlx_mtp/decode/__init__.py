"""Token ids only: acceptance, rounds and the engine. Knows no text."""
