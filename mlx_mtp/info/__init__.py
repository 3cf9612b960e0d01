"""What is known of models and of this machine without running anything."""
