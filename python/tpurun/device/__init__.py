"""How a process comes to have device ``tpu``."""
