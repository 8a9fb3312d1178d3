"""What the core asks of a framework, and which framework owns a call."""
