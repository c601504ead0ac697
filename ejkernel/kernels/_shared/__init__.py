"""What the specs and every backend may use; it knows no backend and no op."""
