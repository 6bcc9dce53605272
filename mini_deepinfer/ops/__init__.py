"""The public ops, one module per stage."""
