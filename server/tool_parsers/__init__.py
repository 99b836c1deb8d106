"""How models of different families write tool calls: one module per family, and what they share."""
