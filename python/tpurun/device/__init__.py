"""How a process comes to have device ``tpu``, and what chips would refuse there."""
